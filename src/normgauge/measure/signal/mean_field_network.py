"""What the mean-field theory says of a whole network: variances and squared gradients at every layer, or why nothing.

The recorded steps are read as a tensor program at infinite width. Its signals are Gaussian over units, with the
variance at each position and the covariances of two samples; linear maps, convolutions and sums of independent signals
keep them so. Normalizers divide by what their statistics tend to, activations act by their values. Gradients go back
with weights as if drawn anew; those of two ways that join are independent, so their squares add.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normgauge.measure.signal.layer_statistics import fit_growth
from normgauge.network import Made, Network, Step, copy_model, replaced
from normgauge.objective import Objective
from normgauge.theory.mean_field import Law, batchnorm_backward, law_of, symmetry_stability

COVERED = "the theory covers linear maps and convolutions, their normalizers, activations by entry, and sums of them"
REPELS = 30.0  # over all layers: GELU follows the symmetric fixed point for 50 of them (20), SiLU does not (120)
_SHAPES = ("Flatten", "flatten", "view", "reshape", "permute", "transpose", "contiguous", "Identity")
_WIDE = 8  # the fewest inputs of a unit, or channels of a group, for which a limit of width says something
_MOST = 4_000_000  # values of a curve, over units, positions and nodes
_POSITIONS = 1024
_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_GRADIENT = tuple[np.ndarray, float]  # squared gradient at each position; product of two samples' (without space)
Curve = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class NotCovered(Exception):
    """The theory does not speak of a network; the message says why."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted at infinite width."""

    layers: tuple[str, ...]  # names of the hidden affine layers, from the input
    variances: tuple[float, ...]  # mean squares of their outputs
    gradients: tuple[float, ...]  # squared norms of the gradients at their outputs, up to one factor
    square_growth: float  # factor per layer towards the input, fitted to `gradients` as the measured one is
    stability: float  # the largest factor per layer of `theory.mean_field.symmetry_stability`; 0 without BatchNorm


@dataclass(eq=False)
class _Signal:
    """Units with values `phi(gain h / divisor + shift)` of Gaussian h, on positions of space and two samples."""

    square: np.ndarray  # [S], of h / divisor
    overlap: np.ndarray  # [S, S], of two samples
    channels: int
    space: tuple[int, ...] = ()
    origins: frozenset[int] = frozenset()  # the affine steps whose outputs it sums
    law: Law = field(default_factory=law_of)
    gain: np.ndarray = field(default_factory=lambda: np.ones(1))
    shift: np.ndarray = field(default_factory=lambda: np.zeros(1))
    phi: Curve | None = None
    back: Callable[[_GRADIENT], None] = lambda _: None  # hands the gradient of h on
    divisor: np.ndarray | None = None  # what a normalizer divides by, per position; None where there is none
    gradient: _GRADIENT | None = None

    def receive(self, square: np.ndarray, product: float) -> None:
        """Add a gradient of the values that is independent of what has come so far."""
        old = self.gradient or (np.zeros_like(self.square), 0.0)
        self.gradient = (old[0] + square, old[1] + product)

    def changed(self, **changes: Any) -> _Signal:
        """Return the same signal seen through something else, with a gradient of its own."""
        return replace(self, gradient=None, **changes)

    def curves(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return values and slopes in h / divisor, `[units, positions, nodes]`."""
        z = self.gain[:, None, None] * np.sqrt(self.square)[:, None] * nodes + self.shift[:, None, None]
        values, slopes = self.phi(z) if self.phi else (z, np.ones_like(z))
        return values, slopes * self.gain[:, None, None]

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean square per position and mean product of two samples of the values, over units."""
        if self.phi is None:
            g, s = np.mean(self.gain**2), np.mean(self.shift**2)
            return g * self.square + s, g * self.overlap + s
        values = self.curves(self.law.y)[0]
        square = self.law.mean(values**2).mean(0)
        if math.isfinite(self.law.batch):
            return square, np.full((1, 1), self.law.pair(values).mean())
        heads = self.law.coefficients(values)
        spread = np.sqrt(np.maximum(self.square, 1e-300))
        correlation = np.clip(self.overlap / spread[:, None] / spread, -1, 1)
        total, power = np.zeros_like(correlation), np.ones_like(correlation)
        for k in range(heads.shape[-1]):
            total += power * (heads[:, :, k].T @ heads[:, :, k]) / len(heads)
            power = power * correlation
        return square, total

    def hand_back(self) -> None:
        """Take the gradient of the values to h, and on to what h was made of."""
        if self.gradient is None:
            return
        square, product = self.gradient
        values, slopes = self.curves(self.law.y)
        divisor = np.ones(1) if self.divisor is None else self.divisor
        if math.isfinite(self.law.batch):  # the batch's mean and variance move with every sample
            alone, together = batchnorm_backward(self.law, values, slopes)
            total = ((square - product) * alone + product * together) / divisor
            self.back((total * (1 - 1 / self.law.batch), -float(total[0]) / self.law.batch))
            return
        factor = self.law.mean(slopes**2).mean(0) / divisor
        pair = 0.0
        if not self.space and product:
            correlation = float(self.overlap[0, 0] / max(self.square[0], 1e-300))
            pair = product * float(self.law.pair(slopes, correlation).mean() / divisor[0])
        self.back((square * factor, pair))


def predict(objective: Objective) -> Prediction:
    """Return the prediction for the objective's network on its first batch, or raise `NotCovered` with the reason.

    The inputs' variances and products are taken from the batch, weights by their mean square, gains and shifts as they
    are. That the weights are independent, of mean zero and many, cannot be asked of one network: it is so at
    initialization.

    Cost: one forward pass.
    """
    try:
        return _Reader(objective).prediction()
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RuntimeError, ArithmeticError) as reason:
        raise NotCovered(f"a step could not be read ({type(reason).__name__}: {reason})") from reason


class _Reader:
    """Reads the steps of one forward pass, forth and back."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.batch = next(iter(objective.batches()))[1]
        steps = Network.of(objective).record().steps
        affine = [step for step in steps if isinstance(step.module, (nn.Linear, nn.Conv1d, nn.Conv2d))]
        if len(affine) < 3:
            raise NotCovered(f"{len(affine)} linear maps or convolutions are too few (3 needed)")
        self.steps, self.hidden, self.head = steps, affine[:-1], affine[-1]
        repeated = {step.name for step in affine if sum(other.module is step.module for other in affine) > 1}
        if repeated:
            raise NotCovered(f"the weights of {min(repeated)!r} are used more than once")
        self.signals: dict[int, _Signal] = {}
        self.stability: list[float] = []

    def prediction(self) -> Prediction:
        for step in self.steps[: self.head.number]:
            reads = [number for number in step.reads if number in self.signals or number < 0]
            if not reads:
                continue
            try:
                self.signals[step.number] = self._read(step)
            except NotCovered:
                if step.number < self.hidden[-1].number:
                    raise
        apart = math.prod(self.stability)
        if apart > REPELS:
            raise NotCovered(
                f"differences between the samples' variances grow by {max(self.stability):.3g} per layer, {apart:.3g} "
                f"in all (over {REPELS:g}): the fixed point that treats all samples alike repels"
            )
        last = self.hidden[-1]
        if last.number not in self.signals:
            raise NotCovered(f"{last.name!r} does not depend on the inputs")
        self._hand_back()
        here = [self.signals[step.number] for step in self.hidden]
        sizes = [math.prod(step.outputs[0][1:]) for step in self.hidden]
        gradients = [
            size * float(s.gradient[0].mean()) if s.gradient else 0.0 for size, s in zip(sizes, here, strict=True)
        ]
        if not all(0 < value < math.inf for value in gradients):
            raise NotCovered("no gradient of finite size reaches every layer")
        variances = tuple(float(s.square.mean()) for s in here)
        names = tuple(step.name for step in self.hidden)
        return Prediction(
            names, variances, tuple(gradients), fit_growth(gradients)[0], max(self.stability, default=0.0)
        )

    def _hand_back(self) -> None:
        """Start gradients at the last signals, which only the head, or what is left out before it, reads."""
        first = {id(signal): number for number, signal in sorted(self.signals.items(), reverse=True)}
        read = {
            id(self.signals[number])
            for step in self.steps
            if step.number in self.signals and step.kind not in _SHAPES
            for number in step.reads
            if number in self.signals
        }
        for number in sorted(first.values(), reverse=True):
            signal = self.signals[number]
            if id(signal) not in read:
                signal.receive(np.ones_like(signal.square), 0.0)
            signal.hand_back()

    # -- one step -----------------------------------------------------------------------------------------------

    def _read(self, step: Step) -> _Signal:
        module = step.module
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            return self._affine(step, module)
        reads = [self._signal(number, step) for number in step.reads]
        if step.kind in _SHAPES and len(reads) == 1 and (reads[0].space or step.kind not in ("permute", "transpose")):
            return reads[0]
        if step.kind.strip("_") in ("add", "iadd", "radd") and len(reads) == 2 and not step.kwargs:
            return self._sum(step, reads[0], reads[1])
        if len(reads) != 1:
            raise NotCovered(f"{step.name!r} ({step.kind}) reads {len(reads)} signals")
        if isinstance(module, (*_BATCH, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)):
            return self._normalize(step, module, reads[0])
        return self._activate(step, reads[0])

    def _signal(self, number: int, step: Step) -> _Signal:
        if number >= 0:
            if number not in self.signals:
                raise NotCovered(f"{step.name!r} ({step.kind}) reads what the theory does not follow")
            return self.signals[number]
        if number not in self.signals:
            inputs = self.batch[0] if isinstance(self.batch, (tuple, list)) else self.batch
            if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim < 2:
                raise NotCovered("the inputs are not one tensor of real numbers")
            self.signals[number] = _inputs(inputs, isinstance(step.module, nn.Linear) or inputs.ndim == 2)
        return self.signals[number]

    def _parameter(self, step: Step, name: str) -> Tensor | None:
        module: Any = step.module
        if f"{step.name}.{name}" in self.objective.parameters:
            return self.objective.parameters[f"{step.name}.{name}"].detach().double().cpu()
        if hasattr(module, "parametrizations"):
            module = copy_model(module)  # reading a parametrized weight may write buffers
        value = getattr(module, name, None)
        return None if value is None else value.detach().double().cpu()

    def _affine(self, step: Step, module: Any) -> _Signal:
        signal, weight = self._signal(step.reads[0], step), self._parameter(step, "weight")
        bias = self._parameter(step, "bias")
        assert weight is not None
        groups = getattr(module, "groups", 1)
        if groups > 1 and weight.shape[1] < _WIDE:
            raise NotCovered(f"{step.name!r} reads {weight.shape[1]} channels per unit, too few for a limit of width")
        power, floor = float(weight.square().mean()), 0.0 if bias is None else float(bias.square().mean())
        mean = float(weight.mean()) ** 2
        if mean * weight[0].numel() > 0.1 * power and mean * weight.numel() > 36 * power:
            raise NotCovered(f"the weights of {step.name!r} are not of mean zero")
        positions = max(1, math.prod(signal.space))
        if isinstance(module, nn.Linear):
            flat = positions > 1 and weight.shape[1] == signal.channels * positions
            index, space = (
                (torch.arange(positions)[:, None], ()) if flat else (torch.arange(positions)[None], signal.space)
            )
            reads, writes = signal.channels, weight.shape[0]
            fits = flat or weight.shape[1] == signal.channels
        else:
            fits = len(signal.space) == weight.ndim - 2 and weight.shape[1] * groups == signal.channels
            index, space = _positions(module, signal.space) if fits else (torch.zeros(1, 1), ())
            reads, writes = weight.shape[1], weight.shape[0] // groups
        if not fits:
            raise NotCovered(f"{step.name!r} reads another axis than the units'")
        square, overlap = signal.moments()
        square, overlap = np.append(square, 0.0), np.pad(overlap, ((0, 1), (0, 1)))  # place -1 is the padding
        rows = index.numpy()
        new_square = power * reads * square[rows].sum(0) + floor
        new_overlap = floor + power * reads * np.sum([overlap[np.ix_(row, row)] for row in rows], axis=0)

        def back(gradient: _GRADIENT) -> None:
            total = np.zeros(positions + 1)
            np.add.at(total, rows, np.broadcast_to(power * writes * gradient[0], rows.shape))
            signal.receive(total[:-1], power * writes * gradient[1] if positions == 1 else 0.0)

        return _Signal(new_square, new_overlap, weight.shape[0], space, frozenset([step.number]), back=back)

    def _sum(self, step: Step, a: _Signal, b: _Signal) -> _Signal:
        if any(s.phi is not None or np.ptp(s.gain) > 0 or s.shift.any() for s in (a, b)):
            raise NotCovered(f"{step.name!r} adds what an activation, unequal gains or shifts have made")
        if a.origins & b.origins or a.space != b.space:
            raise NotCovered(f"{step.name!r} adds signals that are not independent")

        def back(gradient: _GRADIENT) -> None:
            a.receive(*gradient)
            b.receive(*gradient)

        (q, c), (r, d) = a.moments(), b.moments()
        return _Signal(q + r, c + d, a.channels, a.space, a.origins | b.origins, back=back)

    def _normalize(self, step: Step, module: Any, signal: _Signal) -> _Signal:
        if signal.phi is not None or math.isfinite(signal.law.batch):
            raise NotCovered(f"{step.name!r} normalizes what is not the output of linear maps")
        weight, bias = self._parameter(step, "weight"), self._parameter(step, "bias")
        gain = np.ones(signal.channels) if weight is None else weight.numpy().ravel()
        shift = np.zeros(signal.channels) if bias is None else bias.numpy().ravel()
        square, overlap = signal.moments()
        law, eps = law_of(), float(module.eps or 0.0)
        if isinstance(module, _BATCH) and not (module.track_running_stats and self.objective.mode != "train"):
            samples = step.inputs[0][0] * math.prod(step.inputs[0][2:])
            if signal.space:
                rows, middle = overlap.mean(1), overlap.mean()
                square, overlap = square - 2 * rows + middle, overlap - rows[:, None] - rows + middle
                divisor = np.full_like(square, square.mean())
            elif samples < 4:
                raise NotCovered(f"{step.name!r} has {samples} values per channel (4 needed)")
            else:
                law, divisor = law_of(samples), square - overlap[0]
                square, overlap = divisor, -divisor[:, None] / (samples - 1)
        elif isinstance(module, _BATCH):
            mean, variance = (getattr(module, name).double().cpu().numpy() for name in ("running_mean", "running_var"))
            gain = gain / np.sqrt(variance + eps)
            gain, shift, divisor, eps = gain, shift - gain * mean, np.ones_like(square), 0.0
        elif isinstance(module, nn.GroupNorm) or len(module.normalized_shape) > 1:
            if isinstance(module, nn.GroupNorm) and signal.channels < _WIDE * module.num_groups:
                raise NotCovered(f"the groups of {step.name!r} have too few channels for a limit of width")
            divisor = np.full_like(square, square.mean())
        elif module.normalized_shape[0] != signal.channels:
            raise NotCovered(f"{step.name!r} normalizes another axis than the units'")
        else:
            divisor = square
        if not (divisor > 0).all():
            raise NotCovered(f"{step.name!r} normalizes a constant")
        shrink = math.sqrt(float((divisor / (divisor + eps)).mean()))
        gain, shift = _few(gain * shrink, shift, len(square))
        return signal.changed(
            square=square / divisor,
            overlap=overlap / np.sqrt(divisor)[:, None] / np.sqrt(divisor),
            divisor=divisor,
            law=law,
            gain=gain,
            shift=shift,
            back=lambda gradient: signal.receive(*gradient),
        )

    def _activate(self, step: Step, signal: _Signal) -> _Signal:
        phi = _elementwise(step, training=self.objective.mode == "train")
        y = law_of().y
        values = phi(y)[0]
        factor = float(values @ y) / float(y @ y)
        if np.allclose(values, factor * y, atol=1e-9) and signal.phi is None:
            return signal.changed(gain=signal.gain * factor, shift=signal.shift * factor)
        inner = signal.phi

        def composed(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            if inner is None:
                return phi(z)
            first, slope = inner(z)
            value, outer = phi(first)
            return value, outer * slope

        raw = inner is None and signal.divisor is None and (signal.gain == 1).all() and not signal.shift.any()
        new = signal.changed(phi=composed, back=(lambda g: signal.receive(*g)) if raw else signal.back)
        if math.isfinite(signal.law.batch):
            self.stability.append(symmetry_stability(*new.curves(y)))
        return new


def _few(gain: np.ndarray, shift: np.ndarray, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the gains and shifts that stand for all: one where all are equal, at most as many as fit."""
    if np.ptp(gain) == 0 and np.ptp(shift) == 0:
        return gain[:1], shift[:1]
    every = max(1, math.ceil(len(gain) * positions * len(law_of().y) / _MOST))
    return gain[::every], shift[::every]


def _inputs(inputs: Tensor, last: bool) -> _Signal:
    """Return the inputs' mean squares and mean products of two samples; units lie along axis 1 or the last."""
    value = inputs.detach().double().cpu()
    space = () if last else tuple(value.shape[2:])
    table = value.reshape(-1, value.shape[-1], 1) if last else value.flatten(2)
    count, channels, positions = table.shape
    if positions > _POSITIONS or count < 2:
        raise NotCovered(f"{count} samples of {positions} positions (at least 2, at most {_POSITIONS})")
    square = table.square().mean((0, 1))
    total = table.sum(0)
    own = sum(torch.einsum("bcs,bct->st", part, part) for part in table.split(64))
    overlap = (total.T @ total - own) / (channels * count * (count - 1))
    return _Signal(square.numpy(), overlap.numpy(), channels, space)


def _positions(module: Any, space: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Return, per entry of the kernel, the place of the input that each place of the output reads; -1 for padding."""
    flat = len(space) == 1
    image = torch.arange(math.prod(space), dtype=torch.float64).reshape(1, 1, *((1, *space) if flat else space)) + 1
    if isinstance(module.padding, str) or module.padding_mode not in ("zeros", "circular"):
        raise NotCovered(f"convolutions pad by numbers and zeros or circularly here, not {module.padding_mode!r}")
    kernel, stride, padding, dilation = (
        ((1 if name in ("kernel_size", "stride", "dilation") else 0), *value) if flat else tuple(value)
        for name, value in ((n, getattr(module, n)) for n in ("kernel_size", "stride", "padding", "dilation"))
    )
    if module.padding_mode == "circular":
        image, padding = F.pad(image, (padding[1], padding[1], padding[0], padding[0]), mode="circular"), (0, 0)
    index = F.unfold(image, kernel, dilation=dilation, padding=padding, stride=stride)[0].round().long() - 1
    sizes = [
        (image.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)
    ]
    return index, (sizes[1],) if flat else tuple(sizes)


def _elementwise(step: Step, *, training: bool) -> Curve:
    """Return values and slopes of a step that acts entry by entry; `NotCovered` is raised for any other."""
    function = step.function if step.module is None else copy_model(step.module).double().train(training)
    args, kwargs = step.args, {k: v for k, v in step.kwargs.items() if k != "inplace"}

    def call(y: Tensor) -> Any:
        given = replaced((args, kwargs), Made, lambda _: y.clone())
        return function(*given[0], **given[1])

    probe = torch.linspace(-4.0, 4.0, 40, dtype=torch.float64)
    order = torch.arange(40).flip(0)
    try:
        with torch.no_grad():
            there, again = call(probe.reshape(20, 2)), call(probe[order].reshape(20, 2))
        alike = there.shape == again.shape == (20, 2) and bool(
            torch.allclose(there.flatten()[order].double(), again.flatten().double(), atol=1e-9, equal_nan=False)
        )
        alike &= torch.allclose(call(probe.reshape(40, 1)).flatten().double(), there.flatten().double(), atol=1e-9)
    except Exception as reason:  # whatever a function says of numbers it does not take
        raise NotCovered(f"{step.name!r} ({step.kind}) does not act entry by entry") from reason
    if not alike:
        raise NotCovered(f"{step.name!r} ({step.kind}) is no linear map, normalizer, sum or activation by entry")

    def curve(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.enable_grad():
            y = torch.from_numpy(np.ascontiguousarray(z)).reshape(-1, 1).requires_grad_()
            values = call(y)
            slopes = torch.autograd.grad(values.sum(), y)[0] if values.requires_grad else torch.zeros_like(y)
        return values.detach().numpy().reshape(z.shape), slopes.numpy().reshape(z.shape)

    return curve
