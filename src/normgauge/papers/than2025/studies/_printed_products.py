"""A small trained network as S2 sees it: statistics of the training data, and the products its corollaries print."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.lab import data, models
from normgauge.lab.data import Dataset
from normgauge.lab.models.normalized import normalized_layers
from normgauge.lab.runs.evaluate import evaluate, recalibrated_copy
from normgauge.measure.lipschitz.operator_norm import operator_norm
from normgauge.papers.language import Record, Spec, fit
from normgauge.papers.than2025.studies._layer_sizes import scale_to_ball


@dataclass(frozen=True)
class Products:
    """log10 of the factors of S2 Theorem 9 and Corollaries 10 and 11, one entry per layer or normalizer."""

    weights: tuple[float, ...]  # operator norms, the last layer's included
    # the normalizers' constants with the deviations seen: BN the Euclidean norm of 1/sigma_k (Lemma 1), LN 1/sigma_k at
    # the sample where it is largest, which is how sec. 4.2 reads it
    printed: tuple[float, ...]
    everywhere: tuple[float, ...]  # the same on all inputs: for LN 1/sqrt(eps), what Lemma 2 defines
    scales: tuple[float, ...]  # the largest |gamma| of each normalizer, which S2 leaves out

    @property
    def weight_product(self) -> float:
        """P_w."""
        return sum(self.weights)

    @property
    def normalizers(self) -> float:
        """The product of 1/sigma."""
        return sum(self.printed)

    @property
    def bound(self) -> float:
        """P_w times the product of 1/sigma: the right-hand side of Corollary 10 (1) and 11, and of Lemma 5."""
        return self.weight_product + self.normalizers

    @property
    def scaled(self) -> float:
        """The same times the largest |gamma|: for BN, a true bound."""
        return self.bound + sum(self.scales)

    @property
    def power(self) -> float:
        """P_w sigma^-K with the smallest sigma: Corollary 10 (2)."""
        return self.weight_product + len(self.printed) * max(self.printed, default=0.0)

    @property
    def defined(self) -> float:
        """P_w times the constants on all inputs: Corollary 11 with sigma_k as Lemma 2 defines it."""
        return self.weight_product + sum(self.everywhere)


@dataclass(frozen=True)
class Trained:
    """A network before and after training, both settled, its data, and the radius of the ball they lie in."""

    start: nn.Module
    end: nn.Module
    dataset: Dataset
    reach: float


def train_network(spec: Spec, record: Record) -> Trained:
    """Train by Adam on data in the unit ball (S2 App. E.1) and record the accuracies.

    A model called "mlp x10" is an mlp whose inputs lie in the ball of radius 10: variances are 100 times as large.

    Raises:
        NonFiniteError: when training diverged.
    """
    name, _, reach = str(spec["model"]).partition(" x")
    dataset = scale_to_ball(data.load(spec["data"]), float(reach or 1))
    seed, steps = int(spec["seed"]), int(spec["steps"])
    network = models.build(name, spec["norm"], dataset.shape, dataset.classes, seed)
    start = settle_statistics(network, dataset)
    optimizer = torch.optim.Adam(network.parameters(), lr=float(spec["lr"]))
    fit(spec, network, dataset, optimizer).whole()
    end = settle_statistics(network, dataset)
    for split in ("train", "validation", "test"):
        record(steps, f"{split}_accuracy", evaluate(end, dataset, split, limit=2000).accuracy)
    return Trained(start, end, dataset, float(reach or 1))


def settle_statistics(network: nn.Module, dataset: Dataset, limit: int = 2000) -> nn.Module:
    """Return a copy in evaluation mode whose BatchNorms hold the statistics of the training data, its 'population'."""
    return recalibrated_copy(network, [dataset.train[0][:limit]])


def printed_products(network: nn.Module, inputs: Tensor) -> Products:
    """Measure the factors on a settled chain of `Normalized` layers; leaves no trace.

    Norms are those of operators (convolutions too), estimates by Ritz value plus residual.
    """
    model = copy.deepcopy(network)
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    norms = [part.norm for part in normalized_layers(model) if not isinstance(part.norm, nn.Identity)]
    shapes: dict[nn.Module, torch.Size] = {}
    deviations: dict[nn.Module, float] = {}

    def note_shape(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        shapes[module] = args[0].shape[1:]

    def note_deviation(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        deviations[module] = float(args[0].flatten(1).double().var(1, unbiased=False).min())

    for layer in layers:
        layer.register_forward_pre_hook(note_shape)
    for norm in norms:
        norm.register_forward_pre_hook(note_deviation)
    with torch.no_grad():
        model(inputs)
    weights = [operator_norm(layer, tuple(shapes[layer]), kind="estimate").upper for layer in layers]
    printed, everywhere, scales = [], [], []
    for norm in norms:
        eps, gain = float(norm.eps), norm.weight  # type: ignore[arg-type]
        if isinstance(norm, _BatchNorm):
            assert norm.running_var is not None  # settle_statistics keeps them
            printed.append(float((norm.running_var.double() + eps).rsqrt().norm()))
            everywhere.append(printed[-1])
        else:
            printed.append((deviations[norm] + eps) ** -0.5)
            everywhere.append(eps**-0.5)
        scales.append(float(gain.detach().abs().max()) if isinstance(gain, Tensor) else 1.0)
    return Products(_logs(weights), _logs(printed), _logs(everywhere), _logs(scales))


def _logs(values: list[float]) -> tuple[float, ...]:
    return tuple(math.log10(max(value, 1e-300)) for value in values)
