"""A network as S2 sees it: sizes and deviations of its layers in training, and the products its corollaries print."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.lab import data, models
from normgauge.lab.data import Dataset
from normgauge.lab.models.normalized import normalized_layers
from normgauge.lab.runs.evaluate import evaluate, recalibrated_copy
from normgauge.measure.lipschitz.operator_norm import operator_norm
from normgauge.papers.language import Record, Spec, fit


@dataclass(frozen=True)
class Sizes:
    """Of every layer: its operator norm, its Frobenius norm, and the deviation of what it gives to what follows."""

    names: tuple[str, ...]
    norms: tuple[float, ...]
    frobenius: tuple[float, ...]
    deviations: tuple[float, ...]


def layer_sizes(network: nn.Module, inputs: Tensor) -> Sizes:
    """Measure every linear and convolutional layer but the last on one batch, in training mode; leaves no trace.

    The deviation is the root of the mean over channels of the variance over batch and space, before the normalizer or
    the activation: the sigma of S2's Figure 2.
    """
    model = copy.deepcopy(network).train()
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))][:-1]
    seen: dict[nn.Module, tuple[tuple[int, ...], float]] = {}

    def watch(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        axes = [axis for axis in range(output.dim()) if axis != 1]
        seen[layer] = tuple(args[0].shape[1:]), float(output.var(axes, unbiased=False).mean().sqrt())

    hooks = [layer.register_forward_hook(watch) for _, layer in layers]
    with torch.no_grad():
        model(inputs)
    for hook in hooks:
        hook.remove()
    brackets = [operator_norm(layer, seen[layer][0], kind="estimate") for _, layer in layers]
    return Sizes(
        tuple(name for name, _ in layers),
        tuple(bracket.upper if math.isfinite(bracket.upper) else bracket.lower for bracket in brackets),
        tuple(float(layer.weight.detach().norm()) for _, layer in layers),
        tuple(seen[layer][1] for _, layer in layers),
    )


def average_pixels(dataset: Dataset, size: int) -> Dataset:
    """Return images whose squares of this many pixels a side are averaged to one."""
    splits = (dataset.train, dataset.validation, dataset.test)
    train, validation, test = ((nn.functional.avg_pool2d(x, size) if size > 1 else x, y) for x, y in splits)
    return replace(dataset, train=train, validation=validation, test=test)


def scale_to_ball(dataset: Dataset, radius: float = 1.0) -> Dataset:
    """Return the data divided by the largest norm of a training sample, as S2 App. E.1 does, times a radius."""
    splits = (dataset.train, dataset.validation, dataset.test)
    largest = float(dataset.train[0].flatten(1).norm(dim=1).max())
    train, validation, test = ((radius * (inputs / largest), targets) for inputs, targets in splits)
    return replace(dataset, train=train, validation=validation, test=test)


def train_and_watch(spec: Spec, record: Record) -> None:
    """Train by Adam as S2 App. E.1 says, recording norms and deviations per layer and their products."""
    dataset = scale_to_ball(average_pixels(data.load(spec["data"]), int(spec.get("pool", 1))))
    network = models.build(spec["architecture"], spec["norm"], dataset.shape, dataset.classes, int(spec["seed"]))
    optimizer = torch.optim.Adam(network.parameters(), lr=float(spec["lr"]), weight_decay=1e-4)
    batch = dataset.train[0][:128]
    steps = int(spec["steps"])

    def watch(step: int, model: nn.Module) -> None:
        sizes = layer_sizes(model, batch)
        for index, name in enumerate(sizes.names):
            layer = f"{index + 1:02d} {name}"
            record(step, "layer_norm", sizes.norms[index], layer=layer, kind="estimate")
            record(step, "layer_deviation", sizes.deviations[index], layer=layer)
        norm, frobenius, sigma = (sum(_logs(part)) for part in (sizes.norms, sizes.frobenius, sizes.deviations))
        record(step, "smallest_weight_norm", min(sizes.norms), kind="estimate")
        record(step, "log10_norm_product", norm, kind="estimate")
        record(step, "log10_frobenius_product", frobenius)
        record(step, "log10_sigma_product", sigma)
        record(step, "largest_deviation", max(sizes.deviations))
        record(step, "train_accuracy_now", evaluate(model, dataset, "train", limit=500).accuracy)
        if step == 0:
            record(step, "first_log10_norm_product", norm, kind="estimate")
            record(step, "first_log10_sigma_product", sigma)

    at = {0, steps // 4, steps // 2, steps} if steps >= 8 else {0, steps}
    fit(spec, network, dataset, optimizer, at=at, watch=watch).whole()
    record(steps, "train_accuracy", evaluate(network, dataset, "train", limit=1000).accuracy)


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


def _logs(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(math.log10(max(value, 1e-300)) for value in values)
