"""A race of arms: seeds are added where they decide, and the error of the answer holds over all looks and arms."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from normgauge import stats
from normgauge.errors import InputError
from normgauge.stats import LEAST_SEEDS, Bounds, Interval

#: An arm and a seed.
Pair = tuple[str, int]
#: Runs some pairs and returns the score of each: nan where a run gave none; a pair that was not run is left out.
Measure = Callable[[Sequence[Pair]], Mapping[Pair, float]]
#: An arm, a setting of it and a seed.
Trial = tuple[str, float, int]
#: Looks at which the error is spent in equal parts, all but a twentieth of it; later ones share that by halves.
EARLY = 9
#: Differences that are equal on this many seeds count as equal; fewer say nothing about other seeds.
EQUAL_SEEDS = 8


def looks() -> Iterator[int]:
    """Yield the numbers of seeds at which a race is judged: 4, 6, 8, 12, 16, 24, 32, 48, ... without end."""
    for power in itertools.count(2):
        yield 2**power
        yield 3 * 2 ** (power - 1)


def look_confidence(seeds: int, arms: int) -> float:
    r"""Return the confidence of the interval of one pair of arms at one look.

    $1 - 0.05\, w_k / (m - 1)$ for m arms, with $w_k$ the k-th look's share and $\sum_k w_k \le 1$: intervals of the
    $m - 1$ pairs of the truly best arm with others hold at all looks at once with 95 %, whatever their dependence
    (Bonferroni), so that a race may stop at any look, and go on later, without a correction.

    Examples:
        >>> round(look_confidence(4, 2), 4), round(look_confidence(8, 3), 4)
        (0.9947, 0.9974)
    """
    place = next(number for number, look in enumerate(looks()) if look >= seeds)
    share = 0.95 / EARLY if place < EARLY else 0.05 * 0.5 ** (place - EARLY + 1)
    return 1 - (1 - stats.CONFIDENCE) * share / max(arms - 1, 1)


@dataclass(frozen=True)
class Race:
    """How a race ended.

    Attributes:
        best: the arm that leads; `None` where no run finished.
        decided: whether no other arm is better than `best` by more than the margin, at 95 % over looks and arms.
        leads: other arm -> how far `best` is ahead of it, positive where it is better, with an interval that holds for
            all looks and arms at once.
        beaten: arms that are worse than another one, in the order in which they left.
        seeds: how many seeds every arm that is still in the race was judged on.
        stopped: "decided", "seeds" (all that were allowed) or "budget".
        seconds: how long it took.
        more_seeds: seeds more for each arm still in the race that would decide with probability 0.8, if lead and spread
            stay as they are; 0 where it is decided, `None` where no number up to 10,000 would or none is known.
        more_seconds: about how long they would take.
        scores: arm -> seed -> score, of the seeds that were judged.
    """

    best: str | None
    seeds: int
    scores: Mapping[str, Mapping[int, float]]
    beaten: tuple[str, ...] = ()
    decided: bool = False
    leads: Mapping[str, Interval] = field(default_factory=dict)
    stopped: str = "seeds"
    seconds: float = 0.0
    more_seeds: int | None = None
    more_seconds: float = 0.0

    def cost_of_deciding(self) -> str:
        """Say what a decision would cost, as `12 more seeds, about 4 minutes`; empty where there is one."""
        if self.decided:
            return ""
        if self.more_seeds is None:
            return f"no number of seeds up to {stats.MOST_SEEDS:,}"
        return f"{self.more_seeds:,} more seeds, about {in_words(self.more_seconds)}"


def race(
    measure: Measure,
    arms: Sequence[str],
    *,
    higher: bool = True,
    margin: float = 0.0,
    least: float = 0.0,
    bounds: Bounds = stats.FREE,
    seeds: int = 64,
    first_seed: int = 0,
    budget: float = math.inf,
    price: Callable[[Sequence[Pair]], float] | None = None,
    on_look: Callable[[Race], object] | None = None,
) -> Race:
    r"""Find the best of several arms with as few runs as the answer needs: a group-sequential paired t design.

    At looks of 4, 6, 8, 12, 16, ... seeds, shared by all arms, the leader b is compared with every other arm j by the
    t interval of the differences seed by seed, at `look_confidence`. An arm whose interval lies above 0 has lost and
    gets no more seeds. The race ends when for all others the lower end is above -margin: then no arm is better than b
    by more than the margin. The probability that a decision is wrong, b worse than the truly best arm by more than the
    margin, is at most 5 %; with margin 0 that includes naming a winner among equals. (To name a wrong one, the best arm
    must lose to another at some look; of two equally good ones, one must.)

    Kind: estimate. Cost: at most arms x seeds runs. Arms whose t interval does not hold (few seeds of a skewed
    score) are not covered.

    Args:
        measure: runs `(arm, seed)` pairs and returns their scores; nan for a run that is no measurement. A pair that is
            left out was not run, which ends the race as a spent budget does.
        arms: their names.
        higher: whether larger scores are better.
        margin: the largest difference that does not matter.
        least: a lead smaller than this beats nobody: one test sample, for instance.
        bounds: lowest and highest possible score.
        seeds: at most this many, up to the next look.
        first_seed: of the seeds; choose it beyond those on which anything was tuned.
        budget: seconds; the race ends before a look whose price is higher than what is left.
        price: seconds some pairs would take; from the race's own pace if left out.
        on_look: called after every look with the race as it stands.

    Raises:
        InputError: for fewer than two arms, names that repeat, or no seeds.

    Examples:
        >>> true = {"batch": 3.0, "none": 1.0, "rms": 0.9}
        >>> ended = race(lambda pairs: {(arm, seed): true[arm] + 0.1 * (seed % 3) * len(arm) for arm, seed in pairs},
        ...              list(true))
        >>> ended.best, ended.decided, ended.seeds, ended.beaten
        ('batch', True, 4, ('none', 'rms'))
    """
    if len(arms) < 2 or len(set(arms)) < len(arms) or seeds < 1 or not (margin >= 0 and budget >= 0):
        rule = "two arms or more of different names, at least one seed, margin and budget not negative"
        raise InputError("race", rule, f"{list(arms)}, {seeds=}, {margin=}, {budget=}", "Correct it")
    begin = time.monotonic()
    track = _Track(measure, tuple(arms), higher, margin, least, bounds=bounds, first_seed=first_seed)
    estimate = price or track.pace
    sizes = [*itertools.takewhile(lambda look: look < seeds, looks())]
    sizes.append(next(look for look in looks() if look >= seeds) if seeds >= 4 else seeds)
    state = track.judge(0, "budget", begin, estimate)
    for size in sizes:
        wanted = track.missing(size)
        if wanted and estimate(wanted) > budget - (time.monotonic() - begin):
            return track.judge(state.seeds, "budget", begin, estimate)
        if not track.run(wanted):
            return track.judge(state.seeds, "budget", begin, estimate)
        state = track.judge(size, "decided", begin, estimate if on_look else None)
        if on_look is not None:
            on_look(state)
        if state.decided or len(track.running) < 2:
            return state
    return track.judge(state.seeds, "seeds", begin, estimate)


def halve(
    measure: Callable[[Sequence[Trial]], Mapping[Trial, float]],
    settings: Mapping[str, Sequence[float]],
    *,
    higher: bool = True,
    first_seed: int = 0,
    extend: bool = False,
) -> dict[str, float]:
    """Search every arm's setting, such as its rate, by halving: all on one seed, the better half on another, and so on.

    A setting that finished more seeds comes first, then the better mean, as `stats.choose` has it.

    Kind: estimate. Cost: about 2 runs for each setting of each arm.

    Args:
        measure: as in `race`, for triples (arm, setting, seed); scores on validation data.
        settings: arm -> what is tried, positive numbers; one alone costs no run.
        higher: whether larger scores are better.
        first_seed: of the seeds; those of the race must be others.
        extend: whether to try one setting more, and another, beyond the end of three or more where the best is the end.

    Returns:
        Arm -> the chosen setting; without arms of which no run finished, or which were not run.

    Examples:
        >>> def runs(trials):
        ...     return {trial: -abs(trial[1] - 0.3) for trial in trials}
        >>> halve(runs, {"batch": [0.03, 0.1, 0.3, 1.0, 3.0], "none": [0.1]})
        {'batch': 0.3, 'none': 0.1}
    """
    kept = {arm: sorted(some) for arm, some in settings.items() if len(some) > 1}
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in kept}

    def run(trials: list[Trial]) -> None:
        for (arm, setting, seed), score in (measure(trials) if trials else {}).items():
            rows[arm].append({"setting": setting, "seed": seed, "score": float(score)})

    def best(arm: str, among: Sequence[float]) -> float | None:
        tried = [row for row in rows[arm] if row["setting"] in among]
        choices = stats.choose(tried, by="score", over=["setting"], higher=higher)
        return float(choices[0].setting["setting"]) if choices else None

    for seed in itertools.count(first_seed):
        run([(arm, setting, seed) for arm, some in kept.items() if len(some) > 1 for setting in some])
        for _ in range(2 if extend and seed == first_seed else 0):
            further = {arm: setting_beyond(some, best(arm, some)) for arm, some in kept.items()}
            new = [(arm, setting, seed) for arm, setting in further.items() if setting is not None]
            run(new)
            for arm, setting, _ in new:
                kept[arm] = sorted([*kept[arm], setting])
        for arm, some in kept.items():
            order = [best(arm, some)]
            while order[-1] is not None:
                order.append(best(arm, [s for s in some if s not in order]))
            kept[arm] = [setting for setting in order[: len(some) // 2] if setting is not None]
        if all(len(some) < 2 for some in kept.values()):
            break
    alone = {arm: some[0] for arm, some in settings.items() if len(some) == 1}
    chosen = {arm: alone.get(arm) or best(arm, [row["setting"] for row in rows[arm]]) for arm in settings}
    return {arm: setting for arm, setting in chosen.items() if setting is not None}


def setting_beyond(tried: Sequence[float], best: float | None) -> float | None:
    """Return the setting after the end at which the best of three or more is, in the rhythm of the last steps.

    Examples:
        >>> setting_beyond([0.3, 1.0, 3.0], 3.0), setting_beyond([0.3, 1.0, 3.0], 0.3), setting_beyond([0.3, 1, 3], 1)
        (10.0, 0.1, None)
    """
    if len(tried) < 3 or best not in (tried[0], tried[-1]):
        return None
    a, b, c = tried[:3] if best == tried[0] else (tried[-1], tried[-2], tried[-3])
    return float(f"{b * a / c:.2g}")


@dataclass
class _Track:
    """Who still runs, and every score so far."""

    measure: Measure
    arms: tuple[str, ...]
    higher: bool
    margin: float
    least: float
    bounds: Bounds
    first_seed: int
    spent: float = 0.0
    ran: int = 0

    def __post_init__(self) -> None:
        self.running, self.beaten = list(self.arms), list[str]()
        self.scores: dict[str, dict[int, float]] = {arm: {} for arm in self.arms}

    def missing(self, size: int) -> list[Pair]:
        seeds = range(self.first_seed, self.first_seed + size)
        return [(arm, seed) for seed in seeds for arm in self.running if seed not in self.scores[arm]]

    def pace(self, pairs: Sequence[Pair]) -> float:
        return len(pairs) * self.spent / self.ran if self.ran else 0.0

    def run(self, pairs: Sequence[Pair]) -> bool:
        """Run pairs and say whether all of them were run."""
        begin = time.monotonic()
        scores = self.measure(pairs) if pairs else {}
        self.spent, self.ran = self.spent + time.monotonic() - begin, self.ran + len(scores)
        for (arm, seed), score in scores.items():
            self.scores[arm][seed] = float(score)
        return all(pair in scores for pair in pairs)

    def judge(self, size: int, stopped: str, begin: float, estimate: Callable[[Sequence[Pair]], float] | None) -> Race:
        """Look at the first seeds of the arms: drop who is beaten, and say how things stand, the price if asked."""
        seen = range(self.first_seed, self.first_seed + size)
        judged: dict[str, dict[int, float]] = {}
        for arm, scores in self.scores.items():
            judged[arm] = {seed: value for seed, value in scores.items() if seed in seen and math.isfinite(value)}
        finishers = [arm for arm in self.running if judged[arm]]
        if not finishers:
            return Race(None, size, judged, stopped=stopped, seconds=time.monotonic() - begin)
        sign = 1 if self.higher else -1
        best = max(finishers, key=lambda arm: (len(judged[arm]), sign * fmean(judged[arm].values())))
        leads = {}
        for other in self.arms:
            if other != best:
                pair = (judged[best], judged[other]) if self.higher else (judged[other], judged[best])
                common = max(len(judged[best].keys() & judged[other].keys()), 2)
                level = look_confidence(size if other in self.running else common, len(self.arms))
                leads[other] = stats.paired_difference(*pair, bounds=self.bounds, confidence=level)
        for other in [arm for arm in self.running if arm != best]:
            if not judged[other] or self._beats(leads[other]):
                self.running.remove(other)
                self.beaten.append(other)
        open_leads = [leads[other] for other in self.running if other != best]
        decided = len(judged[best]) >= LEAST_SEEDS and all(self._settles(lead) for lead in open_leads)
        more = 0 if decided or estimate is None else self._more_seeds(judged, best, size)
        price = estimate(self.missing(size + more)) if more and estimate else 0.0
        stopped = "decided" if decided else "seeds" if stopped == "decided" else stopped
        how: dict[str, Any] = {"stopped": stopped, "seconds": time.monotonic() - begin, "more_seeds": more}
        return Race(best, size, judged, tuple(self.beaten), decided, leads, more_seconds=price, **how)

    def _beats(self, lead: Interval) -> bool:
        return lead.n >= LEAST_SEEDS and lead.has_width and lead.low > 0 and lead.mean >= self.least * (1 - 1e-9)

    def _settles(self, lead: Interval) -> bool:
        """Say whether nothing more need be known about an arm: it is not better by more than the margin."""
        enough = lead.n >= (LEAST_SEEDS if lead.has_width else EQUAL_SEEDS)
        return enough and self.margin > 0 and lead.low > -self.margin

    def _more_seeds(self, judged: Mapping[str, Mapping[int, float]], best: str, size: int) -> int | None:
        """Return how many seeds after this look decide about every open arm with probability 0.8."""
        if size < 2:
            return None
        gaps: list[tuple[float, float]] = []
        for other in (arm for arm in self.running if arm != best):
            common = sorted(judged[best].keys() & judged[other].keys())
            differences = [judged[best][seed] - judged[other][seed] for seed in common]
            if len(differences) < 2:
                return None
            gap = abs(fmean(differences)) + self.margin
            if gap <= 0 or abs(fmean(differences)) < self.least > self.margin:
                return None
            gaps.append((gap, stdev(differences)))
        for look in itertools.takewhile(lambda look: look <= stats.MOST_SEEDS, looks()):
            least = EQUAL_SEEDS if any(spread == 0 for _, spread in gaps) else size + 1
            if look > size and look >= least and all(self._power(look, *gap) >= stats.POWER for gap in gaps):
                return look - size
        return None

    def _power(self, seeds: int, gap: float, spread: float) -> float:
        from scipy.stats import nct

        if spread == 0:
            return 1.0 if self.margin > 0 else 0.0
        quantile = stats.student_quantile(look_confidence(seeds, len(self.arms)), seeds)
        return float(nct.sf(quantile, seeds - 1, math.sqrt(seeds) * gap / spread))


def in_words(seconds: float) -> str:
    """Write a duration for people.

    Examples:
        >>> in_words(3), in_words(100), in_words(239), in_words(9000)
        ('3 seconds', '1.7 minutes', '4 minutes', '2.5 hours')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} second{'' if round(seconds) <= 1 else 's'}"
    unit, value = ("minutes", seconds / 60) if seconds < 5400 else ("hours", seconds / 3600)
    return f"{value:.2g} {unit}"
