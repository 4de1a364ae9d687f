"""Symmetries without closed form: what a small network's Jacobian still maps to zero, walked as a finite change."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.rng import generator
from normgauge.symmetry._certify import Certifier
from normgauge.symmetry._family import Family, SymmetryStatus
from normgauge.symmetry._independence import written_out
from normgauge.symmetry._probe import generic_point
from normgauge.symmetry._values import BARE, WIDER, Function, Point, Setting

MOST_PARAMETERS = 1500  # beyond, a Jacobian written out costs more than everything else
MOST_SAMPLES = 64
BATCHES = 24  # few leave units silent that others wake, and statistics of batches are hardly seen on one
ROWS = 1.3  # equations per unknown
NULL, CLEAR = 1e-13, 1e-11  # relative singular values below the one are null; between the two nothing is decided
HELD_OUT = 998, 999  # numbers of the inputs on which a walk is judged
STEPS = (0.04, 0.008, 0.0016, 0.0003)  # of a walk, over the length of the parameters
CORRECTIONS = 20
WALKS, AGREEING = 3, 4  # walks from points, and points in all, with the least count
SPREADS = (1.6, 1.0, 2.5, 1.6, 0.7, 4.0, 1.0, 2.5, 1.6, 4.0, 1.0, 2.5)  # of the points; large ones wake more units
BIASES = (0.3, 0.01, None)  # of the points, in turn: a large bias, or one taken for a gain, keeps a unit from bending


@dataclass(frozen=True)
class FibreFamily(Family):
    """Directions along the set of parameters with the same function, beyond those of the other families.

    Where the rank of the Jacobian is constant this set is a manifold and its tangent space the null space; a walk of
    finite length stays on it by Newton's method. There is no formula for the change, so nothing is divided out.
    """

    names: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.coordinates.closure(self.names)

    def __len__(self) -> int:
        return 1

    @property
    def block_dimension(self) -> int:
        return self.size

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "names": list(self.names)}

    def describe(self) -> str:
        return ", ".join(self._titled(name) for name in self.names)


def fibre_families(
    function: Function, certifier: Certifier, families: Sequence[Family], unused: dict[str, Tensor], seed: int
) -> list[FibreFamily]:
    """Return what is null at every redrawn point, beside the given families, as at most one family.

    The null space of the Jacobian over the user's and fresh inputs is taken modulo the families. At points where units
    are silent or never bend it is larger, so the least of its dimensions counts, if four points and a third of all
    have it and walks of finite length from three of them leave it and held-out outputs as they are.
    """
    count = sum(value.numel() for value in function.user.values())
    if count > MOST_PARAMETERS or function.of != "outputs" or not function.double or not function.draws_inputs:
        return []
    starts: list[_Walk] = []
    for number, spread in enumerate(SPREADS):
        point = generic_point(function, seed + 700 + number, spread, BIASES[number % len(BIASES)])
        apart = starts[0].apart if starts else function.keeps_samples_apart(point)
        start = _Walk(function, point, families, unused, apart=apart)
        if start.nullity == 0:
            return []
        starts += [start] if start.nullity is not None else []
        least = min((s.nullity for s in starts if s.nullity is not None), default=0)
        chosen = [s for s in starts if s.nullity == least]
        if len(chosen) >= max(AGREEING, len(starts) / 3):
            break
    else:
        return []
    walks: list[_Walk] = []
    for number, walk in enumerate(chosen):
        if len(walks) < WALKS and walk.walk(generator(seed + number), certifier.tolerance):
            walks.append(walk)
    if len(walks) < WALKS or any(walk.moved > certifier.tolerance for walk in walks):
        return []
    moved, distance = max(w.moved for w in walks), min(w.distance for w in walks)
    certificate = {"moved": moved, "distance": distance, "tolerance": certifier.tolerance, "points": float(len(walks))}
    status: SymmetryStatus = "exact"
    if walks[0].nullity_in(Setting(eps=True)) != least:
        status, certificate["eps_effect"] = "exact_without_eps", certifier.eps_effect()
    if function.objective.mode == "train" and walks[0].nullity_in(Setting(mode="eval")) != least:
        status = "batch_statistics_only"
    return [FibreFamily("fibre", (), least, status=status, certificate=certificate, names=walks[0].touched())]


class _Walk:
    """One redrawn point, the equations F(theta) = F(start) and C (theta - start) = 0, and steps along their solutions.

    C holds the tangent vectors of the families and the entries that no data touch.
    """

    def __init__(
        self, function: Function, point: Point, families: Sequence[Family], unused: dict[str, Tensor], *, apart: bool
    ) -> None:
        self.function, self.apart = function, apart
        self.names, self.shapes = list(point), {name: value.shape for name, value in point.items()}
        self.start = torch.cat([value.reshape(-1) for value in point.values()])
        silent = torch.cat(
            [unused.get(n, torch.zeros(s, dtype=torch.bool)).reshape(-1) for n, s in self.shapes.items()]
        )
        vectors = written_out(families, point, self.names)
        self.fixed = torch.cat([vectors, torch.eye(len(silent), dtype=torch.float64)[silent]])
        self.part = function.part(MOST_SAMPLES, generator(5))
        outputs = function.outputs(point, part=self.part).numel()
        wanted = ROWS * (len(self.start) - min(len(self.fixed), len(self.start) // 2)) + 20
        draws = max(BATCHES, math.ceil(wanted / outputs))
        together = 4 if apart else 1  # draws side by side in one batch
        self.settings = [Setting(fresh=WIDER + k, times=together) for k in range(0, draws, together)]
        shape = (math.ceil(wanted / len(self.settings)), outputs * together)
        self.mixes = [
            torch.randn(shape, generator=generator(k), dtype=torch.float64) for k in range(len(self.settings))
        ]
        self.before = [function.outputs(point, setting, self.part) for setting in self.settings]
        self.scale = float(torch.cat(self.before).abs().max())
        self.nullity, self.null, self.solver = self._solve(self.start)
        self.moved, self.distance = math.inf, 0.0

    def _point(self, flat: Tensor) -> Point:
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(self.shapes[name]) for name, part in zip(self.names, parts, strict=True)}

    def _solve(self, flat: Tensor, like: Setting = BARE) -> tuple[int | None, Tensor, tuple[Tensor, ...]]:
        """Return the nullity at a point (None where it is not clear), the null space, and what solves the equations."""
        settings = [replace(s, mode=like.mode, eps=like.eps) for s in self.settings]
        pairs, point = zip(settings, self.mixes, strict=True), self._point(flat)
        rows = torch.cat([self.function.mixed_gradients(point, mix, s, self.part) for s, mix in pairs])
        lengths = rows.norm(dim=1, keepdim=True)
        lengths = lengths.clamp_min(1e-12 * float(lengths.max()) + 1e-300)
        orthogonal, upper = torch.linalg.qr(torch.cat([rows / lengths, self.fixed]))
        left, sigma, right = torch.linalg.svd(upper)
        rank = int((sigma > NULL * sigma[0]).sum())
        clear = not bool((sigma[:rank] < CLEAR * sigma[0]).any())
        solver = (right[:rank].mT / sigma[:rank], (orthogonal @ left[:, :rank]).mT, lengths[:, 0])
        return len(right) - rank if clear else None, right[rank:], solver

    def nullity_in(self, setting: Setting) -> int | None:
        return self._solve(self.start, setting)[0]

    def touched(self) -> tuple[str, ...]:
        sizes = self._point(self.null.square().sum(0))
        return tuple(name for name, size in sizes.items() if float(size.max()) > 1e-12)

    def walk(self, source: torch.Generator, tolerance: float) -> bool:
        """Walk in a random direction, measure the relative distance and how far held-out outputs move.

        False where Newton's method fails: nothing is known then. A nullity that changes on the way counts as moving.
        """
        along = self.null.mT @ torch.randn(len(self.null), generator=source, dtype=torch.float64)
        along, length = along / along.norm(), float(self.start.norm())
        for step in STEPS:
            try:
                end, left = self._correct(self.start + step * length * along)
                first, last = (self._held_out(point) for point in (self.start, end))
            except NonFiniteError:
                continue
            self.distance = float((end - self.start) @ along) / length
            if left <= tolerance / 10 and self.distance > step / 2:
                self.moved = float((first - last).abs().max() / first.abs().max().clamp_min(1e-300))
                if self._solve(end)[0] != self.nullity:
                    self.moved = math.inf
                return True
        return False

    def _held_out(self, flat: Tensor) -> Tensor:
        return torch.cat([self.function.outputs(self._point(flat), Setting(fresh=k), self.part) for k in HELD_OUT])

    def _correct(self, flat: Tensor) -> tuple[Tensor, float]:
        """Return a solution near a point, by Newton's method with the start's Jacobian, and what is left of the gap."""
        size = before = math.inf
        for _ in range(CORRECTIONS):
            point = self._point(flat)
            after = [self.function.outputs(point, setting, self.part) for setting in self.settings]
            gaps = [a - b for a, b in zip(after, self.before, strict=True)]
            size = max(float(gap.abs().max()) for gap in gaps) / self.scale
            if size > 0.7 * before or size == 0.0:
                break
            before = size
            right, image, lengths = self.solver
            mixed = torch.cat([mix @ gap for mix, gap in zip(self.mixes, gaps, strict=True)]) / lengths
            flat = flat - right @ (image @ torch.cat([mixed, self.fixed @ (flat - self.start)]))
        return flat, size
