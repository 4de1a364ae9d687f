"""Certificates: finite changes at redrawn points and on fresh inputs, families at once, bisected where they fail."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.rng import generator
from normgauge.symmetry._family import Family
from normgauge.symmetry._matrix import MatrixFamily
from normgauge.symmetry._probe import VECTOR_SPREAD, Signatures, generic_point
from normgauge.symmetry._terms import Scale
from normgauge.symmetry._values import BARE, Function, Point, Setting

SPREADS = (1.0, 0.4, 1.6)  # of the redrawn points a certificate rests on: what saturates at one does not at another
REDRAWS = 4  # points tried for each, of which the quietest is kept
FAR_SHIFT = 30.0
LARGEST_TOLERANCE = 1e-7  # in float64: where rounding alone moves the outputs further, nothing is certified
NEARLY = 1e-2  # movement below which a family that is null to first order is reported, as undecided
_ORDER = ("dead", "shift", "matrix", "rescale", "scale")
HOPELESS = 0.05  # relative derivative above which no finite change needs to be tried


class Certifier:
    """Tries finite changes without eps at redrawn points; then with eps, at the user's point, and in eval mode."""

    def __init__(self, function: Function, seed: int) -> None:
        self.function, self.seed = function, seed
        double = function.double and function.dtype == torch.float64
        self.unit = 2.0**-51 if double else 2.0**-23
        self.part = function.part(max(8, -(-function.samples[0] // 4)), generator(seed + 3))
        self._reference: dict[tuple[int, Setting], Tensor] = {}
        if self.part is None:
            self._reference[-1, Setting(eps=True)] = function.given
        self._held: tuple[int, Point] = (-2, {})
        quiet = [self._quietest(number) for number in range(len(SPREADS))]
        self._seeds = [chosen for chosen, _ in quiet]
        self.noise = max(noise for _, noise in quiet)
        least, most = (1e-10, LARGEST_TOLERANCE) if double else (1e-5, 1e-3)
        self.tolerance = min(max(300 * self.noise, least), most)
        self.precision = min(max(100 * self.noise, 10 * least), 10 * most)

    def _quietest(self, number: int) -> tuple[int, float]:
        """Return the seed of the redrawn point at which rounding moves the outputs least, and how far that is."""
        first = self.seed + 100 * number
        best = (first, float("inf"))
        for seed in range(first, first + REDRAWS):
            point = generic_point(self.function, seed, SPREADS[number])
            drawn = self.function.drawn_points.get((seed, SPREADS[number], VECTOR_SPREAD))
            before, noise = self._measure_noise(point, drawn[1] if drawn and self.part is None else None)
            if noise < best[1]:
                best, self._reference[number, BARE] = (seed, noise), before
            if best[1] < 1e3 * self.unit:
                break
        return best

    def point(self, number: int) -> Point:
        """Return a redrawn point, or the user's for -1; one is held at a time, the others are drawn again."""
        if self._held[0] != number:
            self._held = (-2, {})  # freed before the next is made
            drawn = number >= 0
            point = generic_point(self.function, self._seeds[number], SPREADS[number]) if drawn else self.function.user
            self._held = (number, point)
        return self._held[1]

    def _measure_noise(self, point: Point, before: Tensor | None = None) -> tuple[Tensor, float]:
        """Return the outputs, and how far they move as all parameters do in their last place; uses up the point."""
        source = generator(self.seed + 1)
        try:
            before = self.function.outputs(point, BARE, self.part) if before is None else before
            for name, value in point.items():
                noise = torch.randn(value.shape, generator=source, dtype=torch.float64).to(value)
                point[name] = noise.mul_(self.unit).add_(1).mul_(value)
            return before, _distance(self.function.outputs(point, BARE, self.part), before)
        except NonFiniteError:
            return torch.empty(0), float("inf")

    def reference(self, number: int, setting: Setting) -> Tensor:
        """Return the outputs at a point (the user's is number -1), computed once."""
        if (number, setting) not in self._reference:
            self._reference[number, setting] = self.function.outputs(self.point(number), setting, self.part)
        return self._reference[number, setting]

    def movement(self, families: Sequence[Family], number: int, sign: float, setting: Setting) -> float:
        """Return how far the outputs move, relative to their largest entry; infinite if they stop being finite."""
        try:
            before = self.reference(number, setting)
            point = self.point(number)
            self._held = (-2, {})  # used up by the change: a large point is drawn again sooner than held twice
            self._change(families, sign, point)
            return _distance(self.function.outputs(point, setting, self.part), before)
        except NonFiniteError:
            return float("inf")

    def _change(self, families: Sequence[Family], sign: float, point: Point) -> None:
        """Make a random change of all families at once: powers of two for scales, far enough to show a small eps.

        Each has amounts of its own, so that none makes up for another. Shifts come first: large factors drown them.
        """
        source = generator(self.seed + 2)
        for family in sorted(families, key=lambda family: _ORDER.index(family.kind)):
            if isinstance(family, MatrixFamily):
                point.update(family.act_randomly(point, source))
            elif family.scaling:
                exponents = torch.randint(8, 13, (len(family),), generator=source).double()
                signs = torch.randint(0, 2, (len(family),), generator=source).double() * 2 - 1
                point.update(family.act(point, sign * signs * exponents))
            else:
                values = torch.randn(len(family), generator=source, dtype=torch.float64)
                far = 1.0 if sign > 0 else FAR_SHIFT  # a unit that is linear on this data only must not pass
                point.update(family.act(point, sign * far * values * _step(family, point)))

    def worst(self, families: Sequence[Family], trials: Iterable[tuple[int, float, Setting]]) -> float:
        """Return the largest movement over trials (point, direction, setting); stops at the first that is too far."""
        most = 0.0
        for number, sign, setting in trials:
            for group in _apart(families) if sign < 0 else [families]:
                if group and most <= self.tolerance:
                    most = max(most, self.movement(group, number, sign, setting))
        return most

    # -- verdicts -----------------------------------------------------------------------------------------------

    def certify(self, families: Sequence[Family]) -> list[Family]:
        """Return the families that hold without eps at every point, each `exact`, and the undecided ones."""
        fresh = Setting(fresh=1)
        trials = [(0, 1.0, BARE), (0, -1.0, BARE), (1, 1.0, fresh), (2, -1.0, BARE)]
        verdicts = self._certify(list(families), trials)
        settled = [f for f in verdicts if f.status == "exact" or f.kind != "dead"]
        # an entry whose sign counts has no gradient either: its scale is free, its value is not
        sizes = [_as_scale(f) for f in families if f.kind == "dead" and not _covered(f, settled)]
        return [*settled, *self._certify(sizes, trials)]

    def _certify(self, families: list[Family], trials: list[tuple[int, float, Setting]]) -> list[Family]:
        if not families:
            return []
        moved = self.worst(families, trials)
        note = {"moved": moved, "tolerance": self.tolerance, "noise": self.noise, "points": float(len(SPREADS))}
        if moved <= self.tolerance:
            return [replace(family, status="exact", certificate=note) for family in families]
        if len(families) > 1:
            return [done for part in _parts(families) for done in self._certify(part, trials)]
        family = families[0]
        if not isinstance(family, MatrixFamily) and len(family) > 1 and family.certificate.get("depth", 0.0) < 3:
            half = len(family) // 2
            deeper = {"depth": family.certificate.get("depth", 0.0) + 1}
            parts = [family.subset(range(half)), family.subset(range(half, len(family)))]
            return [done for part in parts for done in self._certify([replace(part, certificate=deeper)], trials)]
        null = max(family.residuals, default=1.0) <= 10 * self.precision
        return [replace(family, status="undecided", certificate=note)] if null or moved < NEARLY else []

    def tell_eps(self, families: Sequence[Family]) -> list[Family]:
        """Mark what holds without eps only, by a gradient with eps at the first point and by finite changes."""
        setting = Setting(eps=True)
        moved = self.eps_effect()
        sure = [f for f in families if f.status == "exact"]
        if moved == 0.0:  # nothing was removed, or it cannot be seen
            suspects: list[Family] = []
        else:
            suspects = self._departing(sure, setting, 30 * self.precision)
        rest = [f for f in sure if not _among(f, suspects)]
        far = [(0, 1.0, setting), (0, -1.0, setting)]
        failing = [*suspects, *self._failing(rest, far)]
        # what the redrawn points allow must hold at the user's values too, with eps where it does there, else without
        strict = [f for f in rest if not _among(f, failing)]
        failing += self._failing(strict, [(-1, 1.0, setting)])
        here = self._failing(failing, [(-1, 1.0, BARE)])
        doubtful = here if here and self._quiet_here() else []
        result = []
        for family in families:
            if _among(family, doubtful):
                note = {**family.certificate, "moved_here": self.movement([family], -1, 1.0, setting)}
                result.append(replace(family, status="undecided", certificate=note))
            elif _among(family, failing):
                note = {**family.certificate, "eps_effect": moved}
                result.append(replace(family, status="exact_without_eps", certificate=note))
            else:
                result.append(family)
        return result

    def _quiet_here(self) -> bool:
        """Tell whether rounding leaves the user's outputs alone without eps: constant channels would be noise."""
        return self._measure_noise(self.function.user)[1] < self.tolerance / 10

    def eps_effect(self) -> float:
        """Return how far eps moves the outputs at the user's point, or at the first redrawn one."""
        for number in (-1, 0):
            try:
                bare, kept = (self.reference(number, setting) for setting in (BARE, Setting(eps=True)))
            except NonFiniteError:
                continue
            if (effect := _distance(kept, bare)) > 0.0:
                return effect
        return 0.0

    def depends_on_mode(self) -> bool:
        """Tell whether the objective is in train mode and eval mode gives other outputs."""
        if self.function.objective.mode != "train":
            return False
        train, stored = (self.reference(0, setting) for setting in (BARE, Setting(mode="eval")))
        return _distance(train, stored) > self.tolerance

    def tell_batch_statistics(self, families: Sequence[Family]) -> list[Family]:
        """Mark what fails in eval mode, by a gradient there, without eps, and by finite changes."""
        setting = Setting(mode="eval")
        certified = [f for f in families if f.status not in ("undecided", "exact_here")]
        suspects = self._departing(certified, setting, HOPELESS)
        rest = [f for f in certified if not _among(f, suspects)]
        lost = [*suspects, *self._failing(rest, [(0, 1.0, setting)])]
        return [replace(f, status="batch_statistics_only") if _among(f, lost) else f for f in families]

    def _departing(self, families: Sequence[Family], setting: Setting, limit: float) -> list[Family]:
        """Return the families that are no symmetries to first order, by one gradient at the first point."""
        plain = [f for f in families if f.kind != "dead" and not isinstance(f, MatrixFamily)]
        made, source = Signatures(self.point(0)), generator(self.seed + 30)
        terms = dict.fromkeys(term.with_coefficient(1.0) for family in plain for term in family.terms)
        made.add(terms, partial(self.function.probe, number=0, source=source, part=self.part, setting=setting))
        return [family for family in plain if made.departure(family) > limit]

    def _failing(self, families: list[Family], trials: list[tuple[int, float, Setting]]) -> list[Family]:
        if not families or self.worst(families, trials) <= self.tolerance:
            return []
        if len(families) == 1:
            return families
        return [lost for part in _parts(families) for lost in self._failing(part, trials)]

    def holding_here(self, families: list[Family]) -> list[Family]:
        """Return the families whose finite change leaves the outputs at the user's own values, with eps, alone."""
        trials = [(-1, sign, Setting(eps=True)) for sign in (1.0, -1.0)]
        failing = self._failing(families, trials)
        return [family for family in families if not _among(family, failing)]


def _covered(family: Family, settled: Sequence[Family]) -> bool:
    items = {i for f in settled if f.kind == "dead" and f.parameters == family.parameters for i in f.items}
    return set(family.items) <= items


def _as_scale(family: Family) -> Family:
    return replace(family, kind="scale", terms=tuple(Scale(term.slot) for term in family.terms))


def _among(family: Family, families: Sequence[Family]) -> bool:
    return any(family is other for other in families)


def _parts(families: Sequence[Family]) -> list[list[Family]]:
    """Split what did not hold together: by kind, which stand or fall together, then in halves."""
    kinds: dict[str, list[Family]] = {}
    for family in families:
        kinds.setdefault(family.kind, []).append(family)
    half = len(families) // 2
    return list(kinds.values()) if len(kinds) > 1 else [list(families[:half]), list(families[half:])]


def _apart(families: Sequence[Family]) -> list[list[Family]]:
    """Split changes whose sizes would multiply when they are far: rounding alone would then move the outputs."""
    shifts, rest = ([f for f in families if (f.kind == "shift") == shift] for shift in (True, False))
    centred = [f for f in shifts if any(term.role in ("centred", "undone") for term in f.terms)]
    return [centred, [f for f in shifts if not _among(f, centred)], rest]


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


def _step(family: Family, point: Point) -> float:
    """Return a length comparable with the entries that are shifted."""
    sizes = [float(torch.linalg.vector_norm(point[n])) / point[n].numel() ** 0.5 for n in family.parameters]
    return min(1.0, max(0.1, *sizes))
