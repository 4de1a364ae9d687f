"""`ng.trainable_depth`: how deep a network of this kind may be before its gradients are too uneven to train."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.measure.signal.mean_field_network import COVERED
from normgauge.measure.signal.signal_propagation import EXPLAINED, gradient_chart, signal_propagation
from normgauge.network import first_tensor
from normgauge.objective import Mode, Objective, tensors
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument
from normgauge.rng import generator

# Of squared gradients, end to end: ReLU networks with BatchNorm learn digits at 10 layers (54) and not at 30 (2e5)
LIMIT = 1000.0
NEARBY = 0.01  # of the inputs' size: how far the neighbours lie
SHATTERED = 0.1  # correlation of neighbours' gradients under which they say nothing of each other


@dataclass(frozen=True)
class TrainableDepth(Result):
    """The depth at which squared gradients differ by `limit` from end to end.

    Attributes:
        depth: in affine layers; inf where gradients do not change with depth, nan where branches differ more.
        layers: hidden affine layers of the network.
        law: how squared gradients change with depth: by a factor per layer, or as a power of the depth (residual).
        rate: that factor, or that power; towards the input.
        growth: measured factor per layer over this network.
        predicted: the theory's factor per layer; nan where it does not speak of the network.
        gradients: squared gradients at the hidden affine layers, as measured.
        theory: as predicted, up to one factor; empty where there is none.
        correlation: mean cosine of the gradients, of one direction of each output, at inputs and at neighbours.
        limit: of the ratio of squared gradients.
        withheld: why there is no prediction; `depth` then follows the measured gradients.
        explained: share of the differences that depth explains; 1 where they hardly differ.
    """

    depth: float
    layers: int
    law: Literal["exponential", "power"]
    rate: float
    growth: float
    predicted: float
    gradients: tuple[float, ...]
    theory: tuple[float, ...]
    correlation: float
    limit: float
    withheld: str = ""
    explained: float = 1.0

    def readings(self) -> tuple[Reading, ...]:
        """Return the depth, growth predicted and measured, and the correlation of neighbours' gradients."""
        why = self.withheld or "gradients do not change with depth"
        untold = "depth does not explain the gradients" if math.isnan(self.depth) else why
        depth = self.depth if math.isfinite(self.depth) else math.nan
        return (
            Reading.measured("trainable depth", depth, "estimate", why=untold),
            Reading.measured("predicted growth of the squared gradient", self.predicted, "estimate", why=why),
            Reading("measured growth of the squared gradient", self.growth, "estimate"),
            Reading.measured("correlation of neighbours' gradients", self.correlation, why="no gradient at the inputs"),
        )

    def _title(self) -> str:
        said = "not told" if math.isnan(self.depth) else f"{self.depth:.3g} layers"
        return f"Trainable depth {said}; this network has {self.layers}"

    def _rows(self) -> list[dict[str, Any]]:
        theory = self.theory or (math.nan,) * len(self.gradients)
        pairs = zip(self.gradients, theory, strict=True)
        return [{"layer": i, "gradient": value, "theory": said} for i, (value, said) in enumerate(pairs)]

    def _meaning(self) -> str:
        if math.isnan(self.depth):
            said = f"Squared gradients differ between {self.layers} layers, as between branches, but depth explains "
            return f"{said}{self.explained:.0%} of it (under {EXPLAINED:.0%}): no depth is told; compare like layers."
        way = f"by {self.rate:.4g} per layer" if self.law == "exponential" else f"as depth^{self.rate:.3g}"
        said = f"Squared gradients change {way} towards the input"
        if math.isfinite(self.depth):
            said += f"; beyond {self.depth:.3g} layers they differ by over {self.limit:g}"
        torn = f" Gradients of neighbours have correlation {self.correlation:.2g}"
        torn = f"{torn} (under {SHATTERED:g}): they are shattered." if self.correlation < SHATTERED else ""
        if self.layers > self.depth:
            advice = "skip connections, an activation nearer to linear, other initial scales, or fewer layers"
            return f"{said}. This network has {self.layers}: too deep for plain steps; try {advice}.{torn}"
        return f"{said}. This network has {self.layers}: depth is no obstacle here.{torn}"

    def _notes(self) -> str:
        if self.withheld:
            return f"measured, no prediction: {self.withheld}; {COVERED}"
        return f"predicted at infinite width ({self.predicted:.4g} per layer; measured {self.growth:.4g})"

    def chart(self) -> Chart:
        """Return squared gradients over depth, measured and predicted."""
        names = [str(i) for i in range(len(self.gradients))]
        theory = dict(zip(names, self.theory, strict=True)) if self.theory else {}
        return gradient_chart(dict(zip(names, self.gradients, strict=True)), theory)


@instrument
def trainable_depth(
    model: nn.Module,
    inputs: Any,
    *,
    mode: Mode = "train",
    limit: float = LIMIT,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    seed: int = 0,
) -> TrainableDepth:
    """Say how deep a network like `model` may be, from the growth of its squared gradients with depth.

    With squared gradients `g_l` at the affine layers (of a random direction of each output), predicted at infinite
    width where the theory covers the network and measured elsewhere: `g ~ rate^-l` or, in residual networks,
    `g ~ l^-rate`, whichever fits better. `depth` is where the ends differ by `limit`: `ln(limit) / |ln rate|` or
    `limit^(1 / |rate|)`; nan where measured gradients differ for other reasons, as in the branches of attention.

    Beside it the correlation of gradients at neighbouring inputs, which falls with depth where gradients shatter.

    Kind: estimate. Cost: three gradients and, for the prediction, one forward pass.

    Args:
        model: at initialization; for trained weights read the measured growth.
        inputs: one batch.
        mode: "train" or "eval".
        limit: of the ratio of squared gradients between the ends.
        forward: `forward(model, inputs) -> output` for unusual calls.
        seed: of the direction and the neighbours.

    Raises:
        InputError: for fewer than three affine layers that gradients reach, or a limit of at most 1.

    Examples:
        ReLU after BatchNorm multiplies squared gradients by nearly pi / (pi - 1) per layer:

        >>> _ = torch.manual_seed(0)
        >>> blocks = [m for _ in range(12) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
        >>> found = trainable_depth(nn.Sequential(*blocks, nn.Linear(64, 10)), torch.randn(64, 64))
        >>> 1.4 < found.predicted < 1.6, round(found.depth) in range(15, 20)
        (True, True)

    References: schoenholz2017, yang2019, balduzzi2017
    """
    if not limit > 1:
        raise InputError("trainable_depth", "limit is above 1", str(limit), "Leave it out")

    def loss(output: Any, _: Any) -> Tensor:
        out = first_tensor(output)
        if out is None:
            raise InputError("trainable_depth", "the model returns a tensor", type(output).__name__, "Pass forward=")
        direction = torch.randn(out.shape, generator=generator(seed), dtype=torch.float64).to(out)
        return (out * direction).sum() / max(len(out), 1)

    first = next(iter(tensors(inputs)))
    objective = Objective(model, loss, (inputs, torch.zeros(len(first))), mode=mode, forward=forward)
    signal = signal_propagation(objective, theory=True)
    found = {entry.layer: entry.gradient for entry in signal.layers}
    squares = [found[name] for name in signal.fitted]
    if len(squares) < 2:
        raise InputError(
            "trainable_depth", "gradients reach three affine layers", f"{len(squares) + 1}", "Measure a deeper one"
        )
    theory = signal.theory if signal.theory and signal.theory.layers == signal.fitted else None
    law, rate, depth = depth_of(theory.gradients if theory else squares, limit)
    explained = 1.0 if theory else signal._explained
    return TrainableDepth(
        depth=depth if explained >= EXPLAINED else math.nan,
        layers=len(squares),
        law=law,
        rate=rate,
        growth=signal.growth,
        predicted=theory.square_growth if theory else math.nan,
        gradients=tuple(squares),
        theory=theory.gradients if theory else (),
        correlation=_neighbour_correlation(objective, inputs, seed),
        limit=limit,
        withheld="" if theory else signal.withheld or "other layers than the theory's get a gradient",
        explained=explained,
        mode=mode,
    )


def depth_of(squares: Sequence[float], limit: float) -> tuple[Literal["exponential", "power"], float, float]:
    """Return the law that fits better, its rate towards the input and the depth at which the ends differ by `limit`.

    Examples:
        >>> for squares in ([2.0**-l for l in range(20)], [1 / (l + 1) for l in range(20)]):
        ...     law, rate, depth = depth_of(squares, 1024.0)
        ...     print(law, round(rate, 6), round(depth))
        exponential 2.0 10
        power 1.0 1024
    """
    y = torch.tensor(squares, dtype=torch.float64).log()
    depths = torch.arange(1, len(squares) + 1, dtype=torch.float64)
    fits = []
    for x in (depths, depths.log()):
        x, centred = x - x.mean(), y - y.mean()
        slope = float((x @ centred) / (x @ x))
        fits.append((float((centred - slope * x).square().sum()), -slope))
    if fits[1][0] < fits[0][0]:
        power = fits[1][1]
        return "power", power, limit ** min(1 / abs(power), 300 / math.log10(limit)) if power else math.inf
    return "exponential", math.exp(fits[0][1]), math.log(limit) / abs(fits[0][1]) if fits[0][1] else math.inf


def _neighbour_correlation(objective: Objective, inputs: Any, seed: int) -> float:
    """Return the mean cosine over samples between the gradients at the inputs and at neighbours; nan without them."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return math.nan
    noise = torch.randn(inputs.shape, generator=generator(seed + 1), dtype=torch.float64).to(inputs)
    size = NEARBY * float(inputs.detach().norm()) / max(float(noise.norm()), 1e-300)
    number, batch = next(iter(objective.batches()))
    slopes: list[Tensor | None] = []
    for place in (inputs.detach(), inputs.detach() + size * noise):
        leaf = place.clone().requires_grad_()

        def body(model: nn.Module, leaf: Tensor = leaf) -> Tensor | None:
            value = torch.stack(list(objective.terms_of(model, number, (leaf, batch[1]), copied=False).values())).sum()
            objective.count_backward(batch)
            return torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None

        slopes.append(objective.evaluate(number, body))
    if slopes[0] is None or slopes[1] is None:
        return math.nan
    a, b = slopes[0].double().flatten(1), slopes[1].double().flatten(1)
    cosines = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
    return float(cosines.mean())
