"""Symmetries without closed form: what a small network's Jacobian still maps to zero, walked as a finite change."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.objective import Mode
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
SAME = 1e-6  # cosine above which a null direction counts as found in another setting too
HELD_OUT = Setting(fresh=998), Setting(fresh=999)  # the inputs on which a walk is judged
STEPS = (0.04, 0.008, 0.0016, 0.0003)  # of a walk, over the length of the parameters
CORRECTIONS = 20
WALKS, AGREEING = 3, 4  # walks from points, and points in all, with the least count
SPREADS = (1.6, 1.0, 2.5, 10.0, 1.6, 4.0, 1.0, 2.5, 1.6, 4.0, 1.0, 2.5)  # of the points; large ones wake more units
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


def can_walk(function: Function) -> bool:
    """Tell whether a Jacobian of the outputs can be written out in float64, on inputs of our own."""
    count = sum(value.numel() for value in function.user.values())
    return count <= MOST_PARAMETERS and function.of == "outputs" and function.double and function.draws_inputs


def fibre_families(
    function: Function, certifier: Certifier, families: Sequence[Family], unused: dict[str, Tensor], seed: int
) -> list[FibreFamily] | None:
    """Return what is null at every redrawn point beside the families, as at most one family; `None` if not settled.

    The null space of the Jacobian over fresh inputs is taken modulo the families (undecided ones too: what a far change
    broke is not claimed by a short walk). At points where units are silent or never bend it is larger, so the least of
    its dimensions counts, if four points and a third of all have it and walks of finite length from three of them leave
    it and held-out outputs as they are. The status is the first whose settings have all these directions in common and
    the walks pass in every one of them at once. Nothing is where the gradients are not the function's.
    """
    starts: list[_Walk] = []
    for number, spread in enumerate(SPREADS):
        point = generic_point(function, seed + 700 + number, spread, BIASES[number % len(BIASES)])
        apart = starts[0].apart if starts else function.keeps_samples_apart(point)
        if number == 0 and not _has_slopes(function, point):
            return None
        start = _Walk(function, point, families, unused, apart=apart)
        if start.nullity == 0:
            return []
        starts += [start] if start.nullity is not None else []
        least = min((s.nullity for s in starts if s.nullity is not None), default=0)
        chosen = [s for s in starts if s.nullity == least]
        if len(chosen) >= max(AGREEING, len(starts) / 3):
            break
    else:
        return None
    for status, settings in _claims(certifier):
        if walks := _walked(chosen, settings, certifier.tolerance, seed):
            moved, distance = max(w.moved for w in walks), min(w.distance for w in walks)
            note = {"moved": moved, "distance": distance, "tolerance": certifier.tolerance, "points": float(len(walks))}
            note |= {"eps_effect": certifier.eps_effect()} if status == "exact_without_eps" else {}
            return [FibreFamily("fibre", (), least, status=status, certificate=note, names=walks[0].touched())]
    return None


def _has_slopes(function: Function, point: Point) -> bool:
    """Tell whether outputs move as their gradients say: not where they are rounded or a part is detached."""
    source = generator(11)
    step = {name: 1e-6 * torch.randn(v.shape, generator=source, dtype=v.dtype) for name, v in point.items()}
    ahead, behind = (function.outputs({n: v + sign * step[n] for n, v in point.items()}) for sign in (1.0, -1.0))
    mix = torch.randn((8, len(ahead)), generator=source, dtype=ahead.dtype)
    slopes = function.mixed_gradients(point, mix, BARE, None) @ torch.cat([v.reshape(-1) for v in step.values()])
    return bool((mix @ (ahead - behind) / 2 - slopes).norm() <= 1e-2 * slopes.norm())


def _claims(certifier: Certifier) -> list[tuple[SymmetryStatus, tuple[Setting, ...]]]:
    """Return each status with the settings in which the same finite change must hold, the strongest first."""
    modes: tuple[Mode | None, ...] = (None, "eval") if certifier.depends_on_mode() else (None,)
    bare = tuple(Setting(mode) for mode in modes)
    kept = tuple(Setting(mode, eps=True) for mode in modes) if certifier.eps_effect() > 0.0 else ()
    claims: list[tuple[SymmetryStatus, tuple[Setting, ...]]] = [("exact", (BARE, *(kept or bare[1:])))]
    claims += [("exact_without_eps", bare)] if kept else []
    return [*claims, ("batch_statistics_only", (BARE,))] if len(modes) > 1 else claims


def _walked(starts: Sequence["_Walk"], settings: Sequence[Setting], tolerance: float, seed: int) -> list["_Walk"]:
    """Return three walks that leave the outputs alone in all these settings, or none."""
    walks: list[_Walk] = []
    for number, walk in enumerate(starts):
        if len(walks) < WALKS:
            if not walk.holds_in(settings):
                return []
            walks += [walk] if walk.walk(generator(seed + number), tolerance) else []
    return walks if len(walks) == WALKS and all(walk.moved <= tolerance for walk in walks) else []


class _Walk:
    """One redrawn point, the equations F(theta) = F(start) in one or more settings, and steps along their solutions.

    `null` is what the function without eps maps to zero, orthogonal to the families' vectors and to the entries that no
    data touch.
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
        fixed = torch.cat([vectors, torch.eye(len(silent), dtype=torch.float64)[silent]])
        self.part = function.part(MOST_SAMPLES, generator(5))
        outputs = function.outputs(point, part=self.part).numel()
        wanted = ROWS * (len(self.start) - int(torch.linalg.matrix_rank(fixed))) + 20
        draws = max(BATCHES, math.ceil(wanted / outputs))
        together = 4 if apart and wanted < 200 else 1  # draws side by side in one batch
        self.draws = [Setting(fresh=WIDER + k, times=together) for k in range(0, draws, together)]
        self.whole = [Setting(fresh=WIDER, times=together * len(self.draws))] if apart else self.draws
        shape = (math.ceil(wanted / len(self.draws)), outputs * together)
        self.mixes = [torch.randn(shape, generator=generator(k), dtype=torch.float64) for k in range(len(self.draws))]
        self.likes: tuple[Setting, ...] = (BARE,)
        self.bare = self._rows(self.start, BARE)
        self.nullity, self.null, _ = _decompose(torch.cat([self.bare[0], fixed]))
        self.moved, self.distance = math.inf, 0.0

    def _point(self, flat: Tensor) -> Point:
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(self.shapes[name]) for name, part in zip(self.names, parts, strict=True)}

    def _rows(self, flat: Tensor, like: Setting) -> tuple[Tensor, Tensor]:
        """Return the gradients of the mixed outputs at a point, each of length one, and their lengths."""
        pairs, point = zip(self.draws, self.mixes, strict=True), self._point(flat)
        settings = ((replace(draw, mode=like.mode, eps=like.eps), mix) for draw, mix in pairs)
        rows = torch.cat([self.function.mixed_gradients(point, mix, s, self.part) for s, mix in settings])
        lengths = rows.norm(dim=1, keepdim=True)
        lengths = lengths.clamp_min(1e-12 * float(lengths.max()) + 1e-300)
        return rows / lengths, lengths[:, 0]

    def _outputs(self, flat: Tensor, draws: Sequence[Setting]) -> list[Tensor]:
        """Return the outputs on these draws, in every setting that is claimed."""
        settings = [replace(draw, mode=like.mode, eps=like.eps) for like in self.likes for draw in draws]
        return [self.function.outputs(self._point(flat), setting, self.part) for setting in settings]

    def holds_in(self, likes: Sequence[Setting]) -> bool:
        """Take these settings' equations together; tell whether they leave all of `null` free, up to the families."""
        self.likes = tuple(likes)
        pairs = [self.bare if like == BARE else self._rows(self.start, like) for like in likes]
        self.lengths = torch.cat([lengths for _, lengths in pairs])
        self.free, space, self.solver = _decompose(torch.cat([rows for rows, _ in pairs]))
        common = space @ self.null.mT
        self.along = space.mT @ common  # null, as near as these equations allow
        return self.free is not None and int((torch.linalg.svdvals(common) > SAME).sum()) == self.nullity

    def touched(self) -> tuple[str, ...]:
        sizes = self._point(self.null.square().sum(0))
        return tuple(name for name, size in sizes.items() if float(size.max()) > 1e-12)

    def walk(self, source: torch.Generator, tolerance: float) -> bool:
        """Walk in a random direction, measure the relative distance and how far held-out outputs move.

        False where Newton's method fails: nothing is known then. A nullity that changes on the way counts as moving.
        """
        along = self.along @ torch.randn(self.along.shape[1], generator=source, dtype=torch.float64)
        along, length = along / along.norm(), float(self.start.norm())
        for step in STEPS:
            try:
                end, left = self._correct(self.start + step * length * along)
                first, last = (self._outputs(point, HELD_OUT) for point in (self.start, end))
            except NonFiniteError:
                continue
            self.distance = float((end - self.start) @ along) / length
            if left <= tolerance / 10 and self.distance > step / 2:
                pairs = zip(first, last, strict=True)
                self.moved = max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-300)) for a, b in pairs)
                if _decompose(torch.cat([self._rows(end, like)[0] for like in self.likes]))[0] != self.free:
                    self.moved = math.inf
                return True
        return False

    def _correct(self, flat: Tensor) -> tuple[Tensor, float]:
        """Return a solution near a point, by Newton's method with the start's Jacobian, and what is left of the gap."""
        size = last = math.inf
        before, mixes = self._outputs(self.start, self.whole), self.mixes * len(self.likes)
        scale = max(float(value.abs().max()) for value in before)
        for _ in range(CORRECTIONS):
            pairs = zip(self._outputs(flat, self.whole), before, strict=True)
            gaps = [gap for a, b in pairs for gap in (a - b).chunk(len(self.draws) // len(self.whole))]
            size = max(float(gap.abs().max()) for gap in gaps) / scale
            if size > 0.7 * last or size == 0.0:
                break
            last = size
            right, image = self.solver
            flat = flat - right @ (
                image @ (torch.cat([m @ gap for m, gap in zip(mixes, gaps, strict=True)]) / self.lengths)
            )
        return flat, size


def _decompose(rows: Tensor) -> tuple[int | None, Tensor, tuple[Tensor, Tensor]]:
    """Return the nullity of equations (None where it is not clear), their null space, and what solves them."""
    finite = bool(rows.isfinite().all())
    orthogonal, upper = torch.linalg.qr(rows if finite else torch.zeros_like(rows))
    left, sigma, right = torch.linalg.svd(upper)
    rank = int((sigma > NULL * sigma[0]).sum())
    clear = finite and not bool((sigma[:rank] < CLEAR * sigma[0]).any())
    solver = (right[:rank].mT / sigma[:rank], (orthogonal @ left[:, :rank]).mT)
    return len(right) - rank if clear else None, right[rank:], solver
