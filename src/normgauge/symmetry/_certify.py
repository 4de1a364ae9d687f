"""Certificates: finite changes tried on the model, families at once, bisected where they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.objective import Mode
from normgauge.rng import generator
from normgauge.symmetry._family import Family
from normgauge.symmetry._matrix import MatrixFamily
from normgauge.symmetry._values import Function, Point

Change = Callable[[Point], Point]
LAW = (
    0.15,
    0.62,
)  # doubling a weight divides an effect of eps by 4 (eps beside the variance) or 2 (beside the deviation)
LARGEST_EPS_EFFECT = 0.25
FAR_SHIFT = 30.0
HOPELESS = 0.05  # relative derivative above which no finite change needs to be tried


class Certifier:
    """Tries finite changes at the user's and at a jittered point, in train and in eval mode.

    Args:
        function: the function of the parameters.
        jittered: the point the symmetries were found at.
        seed: of the random changes.
        narrow: whether the model rounds to a narrower type inside, which sets the tolerance.
    """

    def __init__(self, function: Function, jittered: Point, seed: int, *, narrow: bool = False) -> None:
        self.function, self.seed = function, seed
        self.points = {"jittered": jittered, "user": function.user}
        self.mode = function.objective.mode
        self.double = function.dtype == torch.float64 and not narrow
        self.far = (20.0, 25.0) if self.double else (10.0, 15.0)
        self.part = function.part(max(8, -(-function.samples[0] // 4)), generator(seed + 3))
        self._reference: dict[tuple[str, Mode], Tensor] = {}
        self.noise = max(self._measure_noise(where) for where in self.points)
        self.tolerance = max(300 * self.noise, 1e-10 if self.double else 1e-5)

    @property
    def precision(self) -> float:
        """The relative size below which a derivative counts as zero."""
        return max(100 * self.noise, 1e-9 if self.double else 1e-4)

    def _outputs(self, point: Point, mode: Mode) -> Tensor:
        """Return the outputs on a part of the batch: finite changes need fewer samples than derivatives."""
        return self.function.outputs(point, mode=mode, part=self.part)

    def reference(self, where: str, mode: Mode) -> Tensor:
        """Return the outputs at a point, computed once."""
        if (where, mode) not in self._reference:
            self._reference[where, mode] = self._outputs(self.points[where], mode)
        return self._reference[where, mode]

    def _measure_noise(self, where: str) -> float:
        """Return how far the outputs move when every parameter moves by a few units in its last place."""
        unit = 2.0**-51 if self.double else 2.0**-23
        source = generator(self.seed + 1)
        point = {
            name: value * (1 + unit * torch.randn(value.shape, generator=source, dtype=torch.float64).to(value))
            for name, value in self.points[where].items()
        }
        return _distance(self._outputs(point, self.mode), self.reference(where, self.mode))

    def movement(self, change: Change, where: str, mode: Mode) -> float:
        """Return how far the outputs move, relative to their largest entry; infinite if they stop being finite."""
        try:
            after = self._outputs(change(self.points[where]), mode)
        except NonFiniteError:
            return float("inf")
        return _distance(after, self.reference(where, mode))

    # -- exact --------------------------------------------------------------------------------------------------

    def changes(self, families: Sequence[Family]) -> list[Change]:
        """Return two opposite random changes that all families make at once."""
        return [partial(self._change, families, sign) for sign in (1.0, -1.0)]

    def _change(self, families: Sequence[Family], sign: float, point: Point) -> Point:
        source, result = generator(self.seed + 2), dict(point)
        for family in families:
            if isinstance(family, MatrixFamily):
                result = family.act_randomly(result, source)
            elif family.scaling:
                # far enough below 1 to show the smallest eps
                exponents = torch.randint(8, 13, (len(family),), generator=source).double()
                signs = torch.randint(0, 2, (len(family),), generator=source).double() * 2 - 1
                result = family.act(result, sign * signs * exponents)
            else:
                values = torch.randn(len(family), generator=source, dtype=torch.float64)
                far = 1.0 if sign > 0 else FAR_SHIFT  # a unit that is linear on this data only must not pass
                result = family.act(result, sign * far * values * _step(family, result))
        return result

    def largest_movement(self, families: Sequence[Family], places: Iterable[tuple[str, Mode]]) -> float:
        """Return the largest movement over two opposite changes and the given points and modes."""
        worst = 0.0
        for where, mode in places:
            for change in self.changes(families)[: 1 if where == "user" else 2]:
                worst = max(worst, self.movement(change, where, mode))
                if not worst <= self.tolerance:
                    return worst
        return worst

    # -- exact without eps --------------------------------------------------------------------------------------

    def compare_without_eps(self, families: Sequence[Family], where: str, mode: Mode) -> tuple[float, float, bool]:
        """Compare the outputs far out, where eps no longer counts.

        Returns:
            The movement between two far points, the effect of eps here (distance from the far point), and
            whether both are as eps alone would make them: the effect shrinks by 4 or 2 when weights double.
        """
        best = (float("inf"), float("inf"), False)
        for sign in (1.0, -1.0):
            runs, source = {}, generator(self.seed + 4)
            try:
                for t in (*self.far, 1.0):
                    point = self.points[where]
                    for family in families:
                        amounts = torch.full((len(family),), t, dtype=torch.float64)
                        if t != 1.0:  # every index by another power: a common factor alone would hide false ones
                            amounts += torch.randint(0, 5, amounts.shape, generator=source)
                        point = family.act(point, sign * amounts)
                    runs[t] = self._outputs(point, mode)
            except NonFiniteError:
                continue
            limit = runs[self.far[0]]
            moved = _distance(runs[self.far[1]], limit)
            effect = _distance(self.reference(where, mode), limit)
            doubled = _distance(runs[1.0], limit)
            lawful = effect <= self.tolerance or LAW[0] <= doubled / effect <= LAW[1]
            if moved <= self.tolerance and effect <= LARGEST_EPS_EFFECT and lawful:
                return moved, effect, True
            best = min(best, (moved, effect, False))
        return best

    # -- verdicts -----------------------------------------------------------------------------------------------

    def certify(self, families: Sequence[Family]) -> list[Family]:
        """Return the families that hold, each with status and certificate; what fails is bisected, then dropped."""
        here = [("jittered", self.mode), ("user", self.mode)]
        limit = max(1e3 * self.precision, 1e-6) if not self.double else self.precision
        clean = [f for f in families if max(f.residuals, default=0.0) <= limit]
        coarse = [f for f in families if max(f.residuals, default=0.0) > limit]
        done: list[Family] = []
        for group in _groups(clean):
            done.extend(self._certify_exact(group, here))
        for group in _groups(coarse):
            done.extend(self._certify_eps(group))
        return done

    def _certify_exact(self, families: list[Family], places: list[tuple[str, Mode]]) -> list[Family]:
        if not families:
            return []
        moved = self.largest_movement(families, places)
        if moved <= self.tolerance:
            note = {"moved": moved, "tolerance": self.tolerance, "noise": self.noise}
            return [replace(family, status="exact", certificate=note) for family in families]
        if len(families) == 1 or all(family.kind == "scale" for family in families):
            held = self._hold_without_eps(families)
            if held:
                return held
        if len(families) > 1:
            half = len(families) // 2
            first, second = families[:half], families[half:]
            return self._certify_exact(first, places) + self._certify_exact(second, places)
        family = families[0]
        return self._bisect_indices(family, lambda part: self._certify_exact([part], places))

    def _hold_without_eps(self, families: Sequence[Family]) -> list[Family]:
        """Return the families with their certificate if all of them hold far out, else nothing."""
        if not all(family.scaling and not isinstance(family, MatrixFamily) for family in families):
            return []
        first = self.compare_without_eps(families, "jittered", self.mode)
        second = self.compare_without_eps(families, "user", self.mode) if first[2] else first
        if not (first[2] and second[2]):
            return []
        note = {
            "moved": max(first[0], second[0]),
            "eps_effect": second[1],
            "eps_effect_jittered": first[1],
            "tolerance": self.tolerance,
            "noise": self.noise,
        }
        return [replace(family, status="exact_without_eps", certificate=note) for family in families]

    def _certify_eps(self, families: list[Family]) -> list[Family]:
        if not families:
            return []
        scaling = [f for f in families if f.scaling and not isinstance(f, MatrixFamily)]
        if len(scaling) < len(families):  # a shift has no eps of its own: exact or nothing
            rest = [f for f in families if f not in scaling]
            here = [("jittered", self.mode), ("user", self.mode)]
            exact = self._certify_exact(rest, here) if max(r for f in rest for r in f.residuals) < HOPELESS else []
            return exact + self._certify_eps(scaling)
        held = self._hold_without_eps(families)
        if held:
            return held
        if len(families) > 1:
            half = len(families) // 2
            return self._certify_eps(families[:half]) + self._certify_eps(families[half:])
        return self._bisect_indices(families[0], lambda part: self._certify_eps([part]))

    def mark_batch_statistics_only(self, families: Sequence[Family], gradient: Point) -> list[Family]:
        """Mark what holds in train mode but not in eval mode as `batch_statistics_only`.

        Args:
            families: certified in train mode.
            gradient: of a random combination of the outputs in eval mode, at the jittered point.
        """
        point = self.points["jittered"]
        hopeless: list[Family] = []
        open_: list[Family] = []
        for family in families:
            if isinstance(family, MatrixFamily) or family.status == "undecided":
                open_.append(family)
                continue
            size = family.magnitude(point, gradient)
            ratio = family.gather(point, gradient).abs() / size.clamp_min(1e-300)
            worst = float(ratio[size > 1e-12 * size.max()].max()) if float(size.max()) > 0 else 0.0
            marked = replace(family, certificate={**family.certificate, "residual_eval": worst})
            (hopeless if worst > HOPELESS and float(size.max()) > 0 else open_).append(marked)
        failed = [f for group in _groups(open_) for f in self._find_failures_in_eval(group)]
        lost = [id(f) for f in (*hopeless, *failed)]
        return [
            replace(f, status="batch_statistics_only") if id(f) in lost and f.status != "undecided" else f
            for f in (*hopeless, *open_)
        ]

    def _find_failures_in_eval(self, families: list[Family]) -> list[Family]:
        exact = [f for f in families if f.status == "exact"]
        loose = [f for f in families if f.status == "exact_without_eps"]
        failed: list[Family] = []
        if exact and self.largest_movement(exact, [("jittered", "eval")]) > self.tolerance:
            half = len(exact) // 2
            failed += (
                exact
                if len(exact) == 1
                else self._find_failures_in_eval(exact[:half]) + self._find_failures_in_eval(exact[half:])
            )
        if loose and not self.compare_without_eps(loose, "jittered", "eval")[2]:
            half = len(loose) // 2
            failed += (
                loose
                if len(loose) == 1
                else self._find_failures_in_eval(loose[:half]) + self._find_failures_in_eval(loose[half:])
            )
        return failed

    def _bisect_indices(self, family: Family, certify: Callable[[Family], list[Family]]) -> list[Family]:
        """Try halves of a family's indices, a few levels deep; derivative-null rests are kept as undecided."""
        if isinstance(family, MatrixFamily):
            return []
        if len(family) > 1 and family.certificate.get("depth", 0.0) < 3:
            half = len(family) // 2
            deeper = {"depth": family.certificate.get("depth", 0.0) + 1}
            parts = [family.subset(range(half)), family.subset(range(half, len(family)))]
            return [done for part in parts for done in certify(replace(part, certificate=deeper))]
        if max(family.residuals, default=1.0) <= self.precision:
            return [replace(family, status="undecided", certificate={"tolerance": self.tolerance})]
        return []


def _groups(families: Sequence[Family]) -> list[list[Family]]:
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
