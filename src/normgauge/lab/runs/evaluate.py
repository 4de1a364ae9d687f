"""The one evaluation: loss and accuracy on a split under stored, recalibrated or batch statistics."""

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, unknown_name
from normgauge.lab.data import Dataset

Statistics = Literal["stored", "batch", "recalibrated"]
STATISTICS: tuple[str, ...] = get_args(Statistics)
_COUNT = "num_batches_tracked"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean loss and accuracy on a split."""

    loss: float  # not finite for a network that no longer is
    # the share of right decisions, of broken guesses where a network is no longer finite; nan for a regression
    accuracy: float
    metric: float = math.nan  # the data's own metric; nan where there is none


def evaluate(
    network: nn.Module,
    data: Dataset,
    split: str = "test",
    *,
    statistics: Statistics = "stored",
    limit: int | None = None,
    batch: int = 512,
    rest: bool = False,
    inputs: Iterable[Tensor] | None = None,
) -> Evaluation:
    """Return loss and accuracy on a split; the network, its modes included, is left as it was.

    Statistics are "stored", as the network would be used (evaluation mode); "recalibrated", taken anew on a copy on the
    batches `inputs`, or those of the split (see `recalibrated_copy`); or "batch", as training sees it, noise included:
    training mode on a copy, every batch by its own. Then a short last batch, whose statistics are others, counts with
    `rest` only, and a single sample never. `limit` takes the first samples of the split.

    Examples:
        >>> from normgauge.lab.data import load
        >>> digits = load("digits")
        >>> network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
        >>> 0 <= evaluate(network, digits, statistics="batch", limit=100, batch=50).accuracy < 0.5
        True
    """
    if statistics not in STATISTICS:
        raise unknown_name("statistics", statistics, STATISTICS)
    samples, targets = (part[:limit] for part in getattr(data, split))
    smallest = 1 if statistics != "batch" else 2 if rest else min(batch, len(targets))
    batches = [(x, y) for x, y in zip(samples.split(batch), targets.split(batch), strict=True) if len(y) >= smallest]
    if statistics == "recalibrated":
        network = recalibrated_copy(network, (x for x, _ in batches) if inputs is None else inputs)
    with torch.no_grad(), _prepare_network(network, statistics) as ready:
        pieces = [(ready(x), y) for x, y in batches]
    if statistics != "batch":  # samples do not depend on each other: one mean over all
        pieces = [(torch.cat([output for output, _ in pieces]), targets)]
    sizes = [len(y) for _, y in pieces]
    loss = fmean([float(data.loss(output, y)) for output, y in pieces], sizes)
    metric = math.nan if data.metric is None else fmean([_own_metric(data, *piece) for piece in pieces], sizes)
    if data.task != "classification" or pieces[0][0].shape[:-1] != pieces[0][1].shape:
        return Evaluation(loss, math.nan, metric)
    right = sum(int((output.argmax(-1) == y).sum()) for output, y in pieces)
    return Evaluation(loss, right / sum(y.numel() for _, y in pieces), metric)


def _own_metric(data: Dataset, outputs: Tensor, targets: Tensor) -> float:
    assert data.metric is not None
    value = data.metric(outputs, targets)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        rule = "metric(outputs, targets) returns one number"
        raise InputError("metric", rule, type(value).__name__, "Take the mean over the samples") from error


def recalibrated_copy(network: nn.Module, inputs: Iterable[Tensor]) -> nn.Module:
    """Return a copy whose stored statistics are the means over these batches of inputs at its weights.

    The moving average that training keeps lags behind the weights, and the lag multiplies over depth. Only layers that
    store statistics are in training mode meanwhile: dropout and noise are off.
    """
    twin = copy.deepcopy(network).eval()
    layers = [part for part in twin.modules() if _COUNT in dict(part.named_buffers(recurse=False))]
    for layer in layers:
        layer.train()
        layer.momentum = None  # type: ignore[assignment]  # the cumulative average
        for name, buffer in layer.named_buffers(recurse=False):
            if name == _COUNT or name.startswith("running_"):
                buffer.zero_()
    with torch.no_grad():
        for batch in inputs if layers else ():
            twin(batch)
    return twin.eval()


@contextmanager
def _prepare_network(network: nn.Module, statistics: Statistics) -> Iterator[nn.Module]:
    """Yield the network in evaluation mode, with its modes put back afterwards, or a copy in training mode."""
    if statistics == "batch":
        yield copy.deepcopy(network).train()
        return
    modes = [(module, module.training) for module in network.modules()]
    try:
        yield network.eval()
    finally:
        for module, mode in modes:
            module.training = mode
