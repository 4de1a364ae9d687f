"""How the optimizer moves each tensor: one tensor is copied before a step and compared after it, then the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.measure.weights.laws import Law, law_of

RADIAL = 2e-3  # |cos| of weight and gradient below which the scale looks free: eps and rounding stay below it
PROOF = math.log(1e-6)  # of so many small cosines by chance


@dataclass
class TensorTrack:
    """What is known of one tensor's motion.

    Attributes:
        name: of the parameter.
        rows: a view's first axis: the granularity at which the scale looks free; 1 for the whole tensor, 0 for none.
        norm: root mean square over rows (or of the whole).
        angle: median angle of a step, of the direction where the scale is free, of the tensor otherwise.
        relative: |change| / |weight|.
        effective_rate: of the direction, by the optimizer's law; nan where the scale is not free.
        predicted_angle: of a step at equilibrium, by the law.
        predicted_norm: at equilibrium; infinite without decay.
        decay: weight decay of its group.
        stuck: share of entries with a gradient that a step left as they were.
        angles: of all looks, for what is usual.
        first_norm: when watching began.
        first_rate: the effective rate it would have at that norm, under today's options of the optimizer.
        evidence: log-probability of the cosines seen, by granularity, if nothing were free.
    """

    name: str
    rows: int = 0
    norm: float = math.nan
    angle: float = math.nan
    relative: float = math.nan
    effective_rate: float = math.nan
    predicted_angle: float = math.nan
    predicted_norm: float = math.nan
    decay: float = 0.0
    stuck: float = 0.0
    angles: list[float] = field(default_factory=list)
    first_norm: float = math.nan
    first_rate: float = math.nan
    evidence: dict[str, float] = field(default_factory=lambda: {"rows": 0.0, "tensor": 0.0})

    @property
    def free(self) -> bool:
        """Whether the function seems to ignore the scale of its rows, or of the whole."""
        return min(self.evidence.values()) < PROOF


class Blocks:
    """Measures every tensor once in `every` optimizer steps, so that one copy at a time is held."""

    def __init__(self, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], every: int) -> None:
        names = {id(value): name for name, value in model.named_parameters()}
        self.places: list[tuple[str, Tensor, torch.optim.Optimizer, dict[str, Any]]] = [
            (names[id(value)], value, optimizer, group)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for value in group["params"]
            if id(value) in names and value.requires_grad
        ]
        self.tracks = {
            name: TensorTrack(name, first_norm=float(value.detach().float().norm())) for name, value, *_ in self.places
        }
        self.every, self._held = every, {}  # type: tuple[int, dict[str, Tensor]]

    def before(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Copy the tensors whose turn it is."""
        self._held = {
            name: value.detach().clone()
            for number, (name, value, owner, _) in enumerate(self.places)
            if owner is optimizer and number % self.every == step % self.every and value.grad is not None
        }

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare with the copies, and let them go."""
        held, self._held = self._held, {}
        for name, value, owner, group in self.places:
            if owner is optimizer and name in held and value.grad is not None:
                self._compare(self.tracks[name], held.pop(name), value, law_of(owner, group))

    def _compare(self, track: TensorTrack, old: Tensor, new: Tensor, law: Law) -> None:
        slope = new.grad
        assert slope is not None  # asked by the caller
        slope = slope.to_dense() if slope.is_sparse else slope
        touched = slope != 0
        track.stuck = float(((new == old) & touched).sum() / touched.sum().clamp_min(1))
        track.decay = law.decay
        if new.ndim < 2:
            track.norm = float(old.float().norm())
            track.relative = float((new.float() - old.float()).norm()) / max(track.norm, 1e-30)
            return
        w, g, move = (x.detach().flatten(1).float() for x in (old, slope, new - old))
        by_row = {"rows": (w, g, move), "tensor": tuple(x.reshape(1, -1) for x in (w, g, move))}
        for kind, (a, b, _) in by_row.items():
            sizes = a.norm(dim=1) * b.norm(dim=1)
            live = sizes > 0
            if a.shape[1] < 4 or not bool(live.any()):
                continue
            worst = float(((a * b).sum(1).abs() / sizes)[live].max())
            chance = min(0.0, math.log(RADIAL * math.sqrt(2 * a.shape[1] / math.pi)))
            track.evidence[kind] = track.evidence[kind] + int(live.sum()) * chance if worst < RADIAL else 0.0
        track.rows = w.shape[0] if track.evidence["rows"] < PROOF else int(track.evidence["tensor"] < PROOF)
        a, b, d = by_row["rows" if track.rows > 1 else "tensor"]
        lengths = a.norm(dim=1).clamp_min(1e-30)
        along = (a * d).sum(1) / lengths
        angles = torch.atan2((d - (along / lengths)[:, None] * a).norm(dim=1), lengths + along)
        track.norm = float(lengths.square().mean().sqrt())
        track.angle, track.relative = float(angles.median()), float(d.norm() / a.norm().clamp_min(1e-30))
        track.angles.append(track.angle)
        if not track.free:
            track.effective_rate = track.predicted_angle = track.predicted_norm = math.nan
            return
        size, square = a.shape[1], float((a.square().sum(1) * b.square().sum(1)).median())
        settled = law.equilibrium(size, square, track.norm)
        track.predicted_norm, track.predicted_angle = settled.norm, settled.angle
        track.effective_rate = law.effective_rate(track.norm)
        track.first_rate = law.effective_rate(track.first_norm / math.sqrt(max(track.rows, 1)))
