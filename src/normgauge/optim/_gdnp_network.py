"""GDNP for a net with one hidden layer of tanh units, by alternating units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.optim._gdnp_problems import _samples, _second_moment
from normgauge.records import Reading
from normgauge.results import Result, instrument, spend
from normgauge.rng import generator

if TYPE_CHECKING:
    import altair

ALIGNED = 0.99  # |cos|: within 8 degrees of the line


@dataclass(frozen=True)
class GDNPNetworkRun(Result):
    """A run of `gdnp_network`.

    Attributes:
        weights: hidden weights, one row per unit.
        output: the output weights, as given.
        losses: after each sweep over the units, the first before any.
        gradient_norms: `|gradient by a unit's weights|` in the norm of `S^-1`, the largest over units, per sweep.
        evaluations: of the loss and its gradient, from the start to each sweep; the searches of steps are counted too.
        alignments: per sweep, the smallest `|cos|` (S metric) of a unit with `S^-1 u`, S3's line of critical points.
    """

    weights: Tensor
    output: Tensor
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    alignments: tuple[float, ...]
    evaluations: tuple[int, ...]

    def _title(self) -> str:
        return f"GDNP on {len(self.output)} tanh units: loss {self.losses[-1]:.6g} after {len(self.losses) - 1} sweeps"

    def _rows(self) -> list[dict[str, Any]]:
        columns = zip(self.losses, self.gradient_norms, self.alignments, self.evaluations, strict=True)
        return [
            {"sweep": i, "loss": loss, "gradient_norm": norm, "alignment": cosine, "evaluations": count}
            for i, (loss, norm, cosine, count) in enumerate(columns)
        ]

    def readings(self) -> tuple[Reading, ...]:
        """Return loss, largest gradient norm and smallest alignment at the end."""
        ends = {"loss": self.losses, "gradient norm": self.gradient_norms, "alignment": self.alignments}
        return tuple(Reading(name, values[-1]) for name, values in ends.items())

    def _meaning(self) -> str:
        said = f"{len(self.losses) - 1} sweeps took the loss from {self.losses[0]:.4g} to {self.losses[-1]:.4g}; "
        if self.alignments[-1] >= ALIGNED:
            return f"{said}every unit lies along S^-1 u (|cos| at least {ALIGNED:g}), as for Gaussian data."
        off = f"a unit is off the line S^-1 u (|cos| {self.alignments[-1]:.3g}, under {ALIGNED:g})"
        return f"{said}{off}: what holds for Gaussian data does not hold here."

    def _notes(self) -> str:
        return "samples, so no rate is promised"

    def chart(self) -> altair.TopLevelMixin:
        """Return loss, gradient norm and alignment over the sweeps, side by side."""
        from normgauge.charts import panels

        ys = {"loss": "loss", "gradient_norm": "largest gradient norm", "alignment": "smallest |cos| with S^-1 u"}
        return panels(self._rows(), x="sweep", ys=ys)


@instrument
def gdnp_network(
    x: Tensor,
    y: Tensor,
    *,
    output: Tensor,
    start: Tensor | None = None,
    sweeps: int = 20,
    iterations: int = 1,
    seed: int = 0,
) -> GDNPNetworkRun:
    """Train the hidden weights of `F(x) = sum_i theta_i tanh(x^T w_i)` for `mean(softplus(-y F))`, unit by unit.

    The other units and the output weights stay fixed while one unit's direction takes a step against the S-tangent part
    of its gradient, of length 1 / L in the S metric and halved until the loss falls, and its length is searched.

    Args:
        x: samples `[n, d]`, centred.
        y: labels -1 and 1.
        output: theta, one weight per unit; not trained.
        start: first hidden weights `[units, d]`; random when `None`.
        sweeps: over all units.
        iterations: of the direction per unit and sweep.
        seed: of a random start.

    Raises:
        InputError: for shapes that do not fit.

    Deviations: S3 takes the stopping criterion and step size of the halfspace; with other units present the gradient
        of a unit is not `c1 u + c2 S w` for one common u on samples, so the step is chosen by descent. That all
        critical units lie on the line of `S^-1 u` is a statement about Gaussian data; `alignments` shows how far it
        holds.

    References: kohler2019, batchnorm_article
    """
    x, y = _samples(x, y, "gdnp_network")
    theta, S = output.to(x), _second_moment(x)
    units, d = len(theta), x.shape[1]
    W = torch.randn(units, d, generator=generator(seed), dtype=x.dtype) if start is None else start.to(x).clone()
    if W.shape != (units, d):
        raise InputError("gdnp_network", f"start is [{units}, {d}]", str(tuple(W.shape)), "One row per output weight")
    inverse, L = torch.linalg.inv(S), float(torch.linalg.eigvalsh(S)[-1])
    target = inverse @ (-(y @ x) / len(x))

    count = 0

    def loss_and_slopes(hidden: Tensor) -> tuple[float, Tensor]:
        nonlocal count
        count += 1
        spend("gradients")
        t = torch.tanh(x @ hidden.T)
        margin = y * (t @ theta)
        weight = -y * torch.sigmoid(-margin) / len(x)
        slopes = (weight[:, None] * (1 - t * t) * theta).T @ x
        return float(torch.nn.functional.softplus(-margin).mean()), slopes

    def state(hidden: Tensor) -> tuple[float, float, float, int]:
        value, slopes = loss_and_slopes(hidden)
        sizes = ((slopes @ inverse) * slopes).sum(1).clamp_min(0).sqrt()
        lengths = ((hidden @ S) * hidden).sum(1).sqrt() * math.sqrt(float(target @ S @ target))
        cosines = (hidden @ S @ target).abs() / lengths
        return value, float(sizes.max()), float(cosines.min()), count

    history = [state(W)]
    for _ in range(sweeps):
        for unit in range(units):
            for _ in range(iterations):
                _improve(W, unit, S, L, loss_and_slopes)
        history.append(state(W))
    losses, norms, cosines, counts = zip(*history, strict=True)
    return GDNPNetworkRun(W, theta, losses, norms, cosines, counts)


def _improve(W: Tensor, unit: int, S: Tensor, L: float, loss_and_slopes: Any) -> None:
    """Turn one unit, then stretch it; every accepted change lowers the loss."""
    value, slopes = loss_and_slopes(W)
    w, g = W[unit].clone(), slopes[unit]
    length2 = float(w @ S @ w)
    across = g - S @ w * (float(w @ g) / length2)
    size = math.sqrt(max(float(across @ across), 0.0))
    step = math.sqrt(length2 / L) / size if size > 0 else 0.0
    for _ in range(40):
        turned = w - step * across
        W[unit] = turned * math.sqrt(length2 / float(turned @ S @ turned))
        after = loss_and_slopes(W)[0]
        if after <= value:
            value = after
            break
        W[unit] = w
        step /= 2
    factor, base = 2.0, W[unit].clone()
    for _ in range(40):
        tried = [(loss_and_slopes(_replace_row(W, unit, base * f))[0], f) for f in (factor, 1 / factor)]
        best = min(tried)
        if best[0] < value:
            value, base = best[0], base * best[1]
        else:
            factor = math.sqrt(factor)
            if factor < 1 + 1e-9:
                break
    W[unit] = base


def _replace_row(W: Tensor, unit: int, row: Tensor) -> Tensor:
    changed = W.clone()
    changed[unit] = row
    return changed
