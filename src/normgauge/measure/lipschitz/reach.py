"""What is known of one tensor inside a network as a function of the input: slopes in three senses, size, movement."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

_ROUNDING = math.log1p(1e-12)  # per step, for the float64 arithmetic of norms and statistics


@dataclass(frozen=True)
class Gain:
    """By how much one step may stretch its input; logarithms, so that depth cannot overflow.

    Attributes:
        at: at the datum.
        ball: on the image of the ball around the datum.
        everywhere: on all inputs.
        peak: what no entry of the output exceeds in size, whatever the input.
        rows: what no row (last axis) of the output exceeds in length.
        reach: how far the output can move at all.
    """

    at: Tensor
    ball: Tensor
    everywhere: Tensor
    peak: float = math.inf
    rows: float = math.inf
    reach: float = math.inf


def constant_gain(value: float | Tensor, peak: float = math.inf, rows: float = math.inf) -> Gain:
    """Return the gain of a step with one Lipschitz constant in all three senses."""
    return three_gains(value, value, value, peak, rows)


def three_gains(
    at: float | Tensor,
    ball: float | Tensor,
    everywhere: float | Tensor,
    peak: float = math.inf,
    rows: float = math.inf,
    reach: float = math.inf,
) -> Gain:
    """Return the gain of a step from its constants at the data, on the ball and everywhere."""
    # what cannot be told (infinity times zero, a value that overflowed) is not bounded
    logs = [
        torch.nan_to_num(torch.as_tensor(value, dtype=torch.float64).log(), math.inf, math.inf, -math.inf)
        for value in (at, ball, everywhere)
    ]
    return Gain(logs[0], logs[1], logs[2], peak, rows, reach)


@dataclass(frozen=True)
class Form:
    """What a tensor is of another one, so that a norm written by hand is known when its parts meet.

    Attributes:
        kind: "mean", "centred" (x - mean), "square", "power" (mean square), "root", "inverse" (1 / root)
            or "written" (the other tensor over its root).
        base: the other tensor.
        axes: over which the mean is taken.
        factor: times the mean square.
        eps: added to it under the root.
        outside: added to the root.
        floor: the root is at least this.
    """

    kind: str
    base: Reach
    axes: tuple[int, ...] = ()
    factor: float = 1.0
    eps: float = 0.0
    outside: float = 0.0
    floor: float = 0.0


@dataclass(frozen=True)
class Reach:
    """A tensor of the network at one datum, seen from the input.

    Attributes:
        value: at the datum, float64.
        at: log of a bound on the norm of the Jacobian at the datum `[1]`.
        ball: log of a Lipschitz constant on the ball around the datum `[1]`.
        everywhere: log of a Lipschitz constant on all inputs.
        spread: how far the value may move while the input stays in the ball `[1]`; 0 without a ball.
        peak: bound on the size of an entry over all inputs.
        rows: bound on the length of a row (last axis) over all inputs.
        low: what no entry is below, whatever the input.
        form: what it is of another tensor, if that is one of the parts of a norm.
    """

    value: Tensor
    at: Tensor
    ball: Tensor
    everywhere: Tensor
    spread: Tensor
    peak: float = math.inf
    rows: float = math.inf
    low: float = -math.inf
    form: Form | None = field(default=None, repr=False)

    @classmethod
    def of_inputs(cls, inputs: Tensor, radius: float) -> Reach:
        """Return the input itself: slope 1, moving by the radius."""
        zeros = torch.zeros(1, dtype=torch.float64)
        return cls(inputs, zeros, zeros, torch.zeros((), dtype=torch.float64), torch.full_like(zeros, radius))

    @classmethod
    def of_constant(cls, value: Tensor) -> Reach:
        """Return a tensor that does not move."""
        nothing = torch.full((1,), -math.inf, dtype=torch.float64)
        peak, rows = float(value.abs().max()), float(value.double().norm(dim=-1).max())
        return cls(value.double(), nothing, nothing, nothing[0], torch.zeros(1, dtype=torch.float64), peak, rows)

    def pass_through(self, gain: Gain, value: Tensor) -> Reach:
        """Return the output of a step with a gain."""
        spread = torch.where(self.spread == 0, self.spread, self.spread * gain.ball.exp())
        spread = torch.where(torch.isneginf(gain.ball), torch.zeros_like(spread), spread)
        rows = min(gain.rows, gain.peak * math.sqrt(width(value)))
        return Reach(
            value=value,
            at=chain_logs(self.at, gain.at),
            ball=chain_logs(self.ball, gain.ball),
            everywhere=chain_logs(self.everywhere, gain.everywhere),
            spread=spread.clamp_max(gain.reach) * (1 + 1e-12),
            peak=min(gain.peak, rows),
            rows=rows,
        )

    def move_entries(self, value: Tensor, rows: float | None = None) -> Reach:
        """Return the numbers after a step that only moves or drops entries; lengths of rows are lost if not given."""
        limit = self.peak * math.sqrt(width(value))
        return replace(self, value=value, rows=limit if rows is None else min(rows, limit), form=None)

    def drop_value(self) -> Reach:
        """Return the numbers without the tensor."""
        return replace(self, value=self.value.new_empty(0), form=None)


def width(value: Tensor) -> int:
    """Return the number of entries of a row, the last axis."""
    return value.shape[-1] if value.ndim else 1


def chain_logs(first: Tensor, second: Tensor) -> Tensor:
    """Return the log of a product of constants; a constant of zero wins against an infinite one."""
    total = first + second + _ROUNDING
    nothing = torch.isneginf(first) | torch.isneginf(second)
    return torch.where(nothing, torch.full_like(total, -math.inf), total)


def add_reaches(
    parts: list[tuple[Reach, Gain]], value: Tensor, peak: float = math.inf, rows: float = math.inf
) -> Reach:
    """Return a sum of steps: constants and movements add up."""
    moved = [reach.pass_through(gain, value) for reach, gain in parts]
    first = moved[0]
    at, ball, everywhere, spread = first.at, first.ball, first.everywhere, first.spread
    for other in moved[1:]:
        at, ball = torch.logaddexp(at, other.at), torch.logaddexp(ball, other.ball)
        everywhere, spread = torch.logaddexp(everywhere, other.everywhere), spread + other.spread
    rows = min(rows, peak * math.sqrt(width(value)))
    return Reach(value=value, at=at, ball=ball, everywhere=everywhere, spread=spread, peak=min(peak, rows), rows=rows)


def join_reaches(parts: list[Reach], value: Tensor, peak: float, rows: float) -> Reach:
    """Return parts laid side by side: squares of constants and of movements add up."""
    at, ball, everywhere = (
        torch.stack([2 * getattr(part, name) for part in parts]).logsumexp(0) / 2 + _ROUNDING
        for name in ("at", "ball", "everywhere")
    )
    spread = torch.stack([part.spread for part in parts]).square().sum(0).sqrt() * (1 + 1e-12)
    return Reach(
        value=value,
        at=at,
        ball=ball,
        everywhere=everywhere,
        spread=spread,
        peak=peak,
        rows=min(rows, peak * math.sqrt(width(value))),
    )
