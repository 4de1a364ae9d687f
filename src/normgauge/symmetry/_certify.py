"""Certificates: finite changes at redrawn points and on fresh inputs, families at once, bisected where they fail."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.rng import generator
from normgauge.symmetry._family import Family
from normgauge.symmetry._matrix import MatrixFamily
from normgauge.symmetry._probe import generic_point
from normgauge.symmetry._terms import Scale
from normgauge.symmetry._values import BARE, Function, Point, Setting

SPREADS = (1.0, 0.4, 1.6)  # of the redrawn points a certificate rests on: what saturates at one does not at another
REDRAWS = 4  # points tried for each, of which the quietest is kept
FAR_SHIFT = 30.0
LARGEST_TOLERANCE = 1e-7  # in float64: where rounding alone moves the outputs further, nothing is certified
NEARLY = 1e-2  # movement below which a family that is null to first order is reported, as undecided
HOPELESS = 0.05  # relative derivative above which no finite change needs to be tried


class Certifier:
    """Tries finite changes without eps at redrawn points; then with eps, at the user's point, and in eval mode."""

    def __init__(self, function: Function, seed: int) -> None:
        self.function, self.seed = function, seed
        double = function.double and function.dtype == torch.float64
        self.unit = 2.0**-51 if double else 2.0**-23
        self.part = function.part(max(8, -(-function.samples[0] // 4)), generator(seed + 3))
        self._reference: dict[tuple[int, Setting], Tensor] = {}
        self._held: tuple[int, Point] = (-2, {})
        quiet = [self._quietest(seed + 100 * number, spread) for number, spread in enumerate(SPREADS)]
        self._seeds = [chosen for chosen, _ in quiet]
        self.noise = max(noise for _, noise in quiet)
        least, most = (1e-10, LARGEST_TOLERANCE) if double else (1e-5, 1e-3)
        self.tolerance = min(max(300 * self.noise, least), most)
        self.precision = min(max(100 * self.noise, 10 * least), 10 * most)

    def _quietest(self, seed: int, spread: float) -> tuple[int, float]:
        """Return the seed of the redrawn point at which rounding moves the outputs least, and how far that is."""
        best = (seed, float("inf"))
        for number in range(REDRAWS):
            noise = self._measure_noise(generic_point(self.function, seed + number, spread))
            best = min(best, (seed + number, noise), key=lambda pair: pair[1])
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

    def _measure_noise(self, point: Point) -> float:
        """Return how far the outputs move when every parameter moves by a few units in its last place."""
        source = generator(self.seed + 1)
        moved = {
            name: value * (1 + self.unit * torch.randn(value.shape, generator=source, dtype=torch.float64).to(value))
            for name, value in point.items()
        }
        try:
            return _distance(*(self.function.outputs(p, BARE, self.part) for p in (moved, point)))
        except NonFiniteError:
            return float("inf")

    def reference(self, number: int, setting: Setting) -> Tensor:
        """Return the outputs at a point (the user's is number -1), computed once."""
        if (number, setting) not in self._reference:
            self._reference[number, setting] = self.function.outputs(self.point(number), setting, self.part)
        return self._reference[number, setting]

    def movement(self, families: Sequence[Family], number: int, sign: float, setting: Setting) -> float:
        """Return how far the outputs move, relative to their largest entry; infinite if they stop being finite."""
        try:
            after = self.function.outputs(self._change(families, sign, self.point(number)), setting, self.part)
            return _distance(after, self.reference(number, setting))
        except NonFiniteError:
            return float("inf")

    def _change(self, families: Sequence[Family], sign: float, point: Point) -> Point:
        """Make a random change of all families at once: powers of two for scales, far enough to show a small eps."""
        source, result = generator(self.seed + 2), dict(point)
        for family in families:
            if isinstance(family, MatrixFamily):
                result = family.act_randomly(result, source)
            elif family.scaling:
                exponents = torch.randint(8, 13, (len(family),), generator=source).double()
                signs = torch.randint(0, 2, (len(family),), generator=source).double() * 2 - 1
                result = family.act(result, sign * signs * exponents)
            else:
                values = torch.randn(len(family), generator=source, dtype=torch.float64)
                far = 1.0 if sign > 0 else FAR_SHIFT  # a unit that is linear on this data only must not pass
                result = family.act(result, sign * far * values * _step(family, result))
        return result

    def worst(self, families: Sequence[Family], trials: Iterable[tuple[int, float, Setting]]) -> float:
        """Return the largest movement over trials (point, direction, setting); stops at the first that is too far."""
        most = 0.0
        for number, sign, setting in trials:
            most = max(most, self.movement(families, number, sign, setting))
            if not most <= self.tolerance:
                break
        return most

    # -- verdicts -----------------------------------------------------------------------------------------------

    def certify(self, families: Sequence[Family]) -> list[Family]:
        """Return the families that hold without eps at every point, each `exact`, and the undecided ones."""
        fresh = Setting(fresh=1)
        trials = [(0, 1.0, BARE), (0, -1.0, BARE), (1, 1.0, fresh), (2, -1.0, BARE)]
        verdicts = [verdict for group in _by_kind(families) for verdict in self._certify(group, trials)]
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
            half = len(families) // 2
            return self._certify(families[:half], trials) + self._certify(families[half:], trials)
        family = families[0]
        if not isinstance(family, MatrixFamily) and len(family) > 1 and family.certificate.get("depth", 0.0) < 3:
            half = len(family) // 2
            deeper = {"depth": family.certificate.get("depth", 0.0) + 1}
            parts = [family.subset(range(half)), family.subset(range(half, len(family)))]
            return [done for part in parts for done in self._certify([replace(part, certificate=deeper)], trials)]
        null = max(family.residuals, default=1.0) <= 10 * self.precision
        return [replace(family, status="undecided", certificate=note)] if null or moved < NEARLY else []

    def tell_eps(self, families: Sequence[Family], gradient: Point) -> list[Family]:
        """Mark what holds without eps only; `gradient` is that of a random combination with eps, at the first point."""
        setting = Setting(eps=True)
        moved = self.eps_effect()
        sure = [f for f in families if f.status == "exact"]
        if moved == 0.0:  # nothing was removed, or it cannot be seen
            suspects: list[Family] = []
        else:
            suspects = [f for f in sure if self._departs(f, gradient, 30 * self.precision)]
        rest = [f for f in sure if not _among(f, suspects)]
        far = [(0, 1.0, setting), (0, -1.0, setting)]
        failing = [*suspects, *(f for group in _by_kind(rest) for f in self._failing(group, far))]
        # what the redrawn points allow must hold at the user's values too, with eps where it does there, else without
        strict = [f for f in rest if not _among(f, failing)]
        failing += [f for group in _by_kind(strict) for f in self._failing(group, [(-1, 1.0, setting)])]
        here = [f for group in _by_kind(failing) for f in self._failing(group, [(-1, 1.0, BARE)])]
        doubtful = [] if not self._quiet_here() else here
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
        return self._measure_noise(self.point(-1)) < self.tolerance / 10

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

    def tell_batch_statistics(self, families: Sequence[Family], gradient: Point) -> list[Family]:
        """Mark what fails in eval mode; `gradient` is that of a random combination there, without eps."""
        certified = [f for f in families if f.status not in ("undecided", "exact_here")]
        plain = [f for f in certified if f.kind != "dead" and not isinstance(f, MatrixFamily)]
        suspects = [f for f in plain if self._departs(f, gradient, HOPELESS)]
        rest = [f for f in certified if not _among(f, suspects)]
        trials = [(0, 1.0, Setting(mode="eval"))]
        lost = [*suspects, *(f for group in _by_kind(rest) for f in self._failing(group, trials))]
        return [replace(f, status="batch_statistics_only") if _among(f, lost) else f for f in families]

    def _departs(self, family: Family, gradient: Point, limit: float) -> bool:
        """Tell whether a family's generators are no symmetries to first order, by a gradient at the first point."""
        if isinstance(family, MatrixFamily) or family.kind == "dead":
            return False
        size = family.magnitude(self.point(0), gradient)
        ratio = family.gather(self.point(0), gradient).abs() / size.clamp_min(1e-300)
        loud = size > 1e-3 * size.max()
        return float(size.max()) > 0 and float(ratio[loud].max()) > limit

    def _failing(self, families: list[Family], trials: list[tuple[int, float, Setting]]) -> list[Family]:
        if not families or self.worst(families, trials) <= self.tolerance:
            return []
        if len(families) == 1:
            return families
        half = len(families) // 2
        return self._failing(families[:half], trials) + self._failing(families[half:], trials)

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


def _by_kind(families: Sequence[Family]) -> list[list[Family]]:
    """Group by kind: families of one kind stand or fall together."""
    kinds: dict[str, list[Family]] = {}
    for family in families:
        kinds.setdefault(family.kind, []).append(family)
    return list(kinds.values())


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


def _step(family: Family, point: Point) -> float:
    """Return a length comparable with the entries that are shifted."""
    sizes = [float(point[name].square().mean().sqrt()) for name in family.parameters]
    return min(1.0, max(0.1, *sizes))
