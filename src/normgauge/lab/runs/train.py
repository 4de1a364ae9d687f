"""The training loop studies share: data resident as tensors, any optimizer, a watcher on schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, explain
from normgauge.lab.data import Dataset
from normgauge.lab.runs.layout import Layout
from normgauge.rng import generator

# A loss this many times its first value is taken as divergence: training does not come back from there.
DIVERGENCE_FACTOR = 10.0
Watch = Callable[[int, nn.Module], None]


@dataclass
class Fit:
    """What training did: the loss of every step, and the step at which it diverged, if it did."""

    losses: list[float] = field(default_factory=list)
    diverged_at: int | None = None

    @property
    def diverged(self) -> bool:
        """Whether the loss left every reasonable range."""
        return self.diverged_at is not None

    def steps_to(self, target: float, *, window: int = 10) -> int | None:
        """Return after how many steps the mean loss of the last `window` steps fell to `target`, `None` if never."""
        for step in range(1, len(self.losses) + 1):
            recent = self.losses[max(0, step - window) : step]
            if sum(recent) / len(recent) <= target:
                return step
        return None


def fit(
    network: nn.Module,
    dataset: Dataset,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    batch: int,
    seed: int,
    at: Collection[int] = (),
    watch: Watch | None = None,
    augment: bool = False,
    schedule: Callable[[int], float] | None = None,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    share: float | None = None,
) -> Fit:
    """Train the network in place and return the losses; divergence ends training and is a value, not an exception.

    Steps use channels-last memory where that is faster (`Layout`); `watch` and the caller find the usual layout.

    Args:
        network: what to train.
        dataset: its data; the order of batches depends on the seed only, so that arms can be paired.
        optimizer: any torch optimizer over its parameters.
        steps: how many.
        batch: samples per step; the whole training split if larger.
        seed: of the order of batches and the augmentation.
        at: steps at which `watch(step, network)` is called, before that step; `steps` itself is the end.
        watch: the measuring function; it is called in whatever mode the network is.
        augment: random shifts by up to an eighth of the image and horizontal flips, drawn per batch row.
        schedule: step -> factor on every group's first learning rate.
        penalty: network -> a term added to the loss (an l1 norm of scales, for instance).
        share: at most this share of the time goes to measurements; see `MeasuringShare`.
    """
    result = Fit()
    measuring = MeasuringShare(share)
    layout = Layout(network, dataset.train[0])
    rates = [group["lr"] for group in optimizer.param_groups]
    batches = Batches(len(dataset.train[1]), batch, seed)
    source = generator(2000 + seed)
    with layout.training():
        for step in range(steps + 1):
            if watch is not None and step in at and measuring.allows(essential=step in (0, steps)):
                with measuring.timed(), layout.measuring():
                    watch(step, network)
            if step == steps:
                break
            if schedule is not None:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * schedule(step)
            rows = next(batches)
            inputs = dataset.train[0][rows]
            inputs = layout.inputs(augmented(inputs, source) if augment else inputs)
            network.train()
            optimizer.zero_grad()
            loss = dataset.loss(network(inputs), dataset.train[1][rows])
            total = loss if penalty is None else loss + penalty(network)
            total.backward()
            optimizer.step()
            result.losses.append(float(loss.detach()))
            if _left_range(result.losses):
                result.diverged_at = step + 1
                break
    return result


def _left_range(losses: list[float]) -> bool:
    return not math.isfinite(losses[-1]) or losses[-1] > DIVERGENCE_FACTOR * max(losses[0], 1.0)


def evaluate(
    network: nn.Module, dataset: Dataset, split: str = "test", *, limit: int | None = None
) -> tuple[float, float]:
    """Return loss and accuracy on a split with stored statistics (eval mode); the network's mode is put back.

    The accuracy of a regression is nan; so is the loss of a network that is no longer finite.
    """
    inputs, targets = (part[:limit] for part in getattr(dataset, split))
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    total, right = 0.0, 0
    try:
        with torch.no_grad():
            for x, y in zip(inputs.split(512), targets.split(512), strict=True):
                output = network(x)
                total += float(dataset.loss(output, y)) * len(y)
                right += int((output.argmax(1) == y).sum()) if dataset.task == "classification" else 0
    finally:
        for module, mode in modes:
            module.training = mode
    return total / len(targets), right / len(targets) if dataset.task == "classification" else math.nan


def augmented(images: Tensor, source: torch.Generator) -> Tensor:
    """Return the images shifted by up to an eighth of their size (zeros move in) and flipped half of the time."""
    reach = max(1, images.shape[-1] // 8)
    padded = nn.functional.pad(images, (reach,) * 4)
    count, channels, height, width = images.shape
    down, right = (torch.randint(0, 2 * reach + 1, (count, 1), generator=source) for _ in range(2))
    ys = (torch.arange(height) + down).view(count, 1, height, 1)
    xs = (torch.arange(width) + right).view(count, 1, 1, width)
    flip = torch.rand(count, 1, 1, 1, generator=source) < 0.5
    xs = torch.where(flip, xs.flip(-1), xs)
    return padded[torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1), ys, xs]


class MeasuringShare:
    """Keeps measurements within a stated share of a run's time: those that come when it is spent are left out.

    The first and the last measurement are always made. Without a share all are, and a run depends on its spec alone.

    Args:
        share: between 0 and 1, or `None`.

    Raises:
        InputError: for a share out of range.

    Examples:
        >>> MeasuringShare(None).allows(essential=False)
        True
        >>> spent = MeasuringShare(0.5)
        >>> spent.seconds = 1e9
        >>> spent.allows(essential=False), spent.allows(essential=True), spent.skipped
        (False, True, 1)
    """

    def __init__(self, share: float | None) -> None:
        if share is not None and not 0 <= share <= 1:
            raise InputError(explain("measuring share", "a number from 0 to 1", str(share), "Give 0.2 for a fifth"))
        self.share, self.seconds, self.skipped = share, 0.0, 0
        self._begin = time.perf_counter()

    def allows(self, *, essential: bool) -> bool:
        """Say whether there is time for a measurement now."""
        fits = self.share is None or self.seconds <= self.share * (time.perf_counter() - self._begin)
        self.skipped += not (fits or essential)
        return fits or essential

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what happens inside as measuring."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin


class Batches:
    """An endless stream of shuffled batches; the order depends on the seed only, so arms can be paired."""

    def __init__(self, samples: int, batch: int, seed: int) -> None:
        self._samples, self._batch = samples, min(batch, samples)
        self._source = generator(1000 + seed)
        self._order = torch.empty(0, dtype=torch.int64)

    def __next__(self) -> Tensor:
        if len(self._order) < self._batch:  # a short rest is dropped: batch statistics want full batches
            self._order = torch.randperm(self._samples, generator=self._source)
        rows, self._order = self._order[: self._batch], self._order[self._batch :]
        return rows
