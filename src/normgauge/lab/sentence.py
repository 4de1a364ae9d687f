"""The sentence a comparison ends with: the recommendation first, the statistics after, or why there is none."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from normgauge.documents import Arm, Metric
from normgauge.lab.data import Dataset
from normgauge.records import Run
from normgauge.stats import (
    LEAST_SEEDS,
    MOST_SEEDS,
    Interval,
    above_chance,
    interval,
    joint_confidence,
    leads,
    seeds_to_decide,
)

#: One seed is named as the cause where without it the interval is this many times narrower.
LONE_SEED = 2.0


@dataclass(frozen=True, slots=True)
class Exam:
    """What the test split can show at all.

    Attributes:
        samples: how many there are; differences of accuracies below one of them do not exist.
        majority: the share of the most frequent label, which a network that learned nothing gets too; nan where
            targets are no classes.
    """

    samples: int
    majority: float

    @classmethod
    def of(cls, data: Dataset) -> Self:
        """Return that of a dataset."""
        targets = data.test[1]
        if data.task != "classification":
            return cls(len(targets), math.nan)
        return cls(targets.numel(), int(torch.bincount(targets.reshape(-1)).max()) / targets.numel())


def write_answer(
    arms: Sequence[Arm], runs: Sequence[Run], metric: Metric, exam: Exam | None = None
) -> tuple[str, bool]:
    """Write the sentence and say whether the data decide.

    They do not where the best arm is not above chance (binomial test against the most frequent label) or lost runs, and
    where its lead over another arm rests on fewer than three seeds, is less than one test sample, has an interval
    without width, or an interval that contains 0. Arms whose readings are equal on every seed are one network.
    """
    spec = runs[0].spec if runs else {}
    where = f"{spec.get('model', '?')}, {spec.get('data', '?')}, {spec.get('steps', '?')} steps"
    trained = [arm for arm in arms if metric.name in arm.values]
    if not trained:
        return f"No normalizer trained on {where}: {_describe_failures(runs)}", False
    same = twins([arm.knobs["norm"] for arm in trained], runs)
    distinct = [arm for arm in trained if arm.knobs["norm"] not in same]
    notes = _notes(arms, runs, same)
    best, result = distinct[0].knobs["norm"], _result(distinct[0].values[metric.name].mean, metric)
    if metric.unit and exam is not None and not _above_chance(distinct[0], metric, exam, len(distinct)):
        guess = (
            f"always giving the most frequent label gets {100 * exam.majority:.1f} % of the {exam.samples} test samples"
        )
        sentence = f"No recommendation on {where}: nothing is above chance. {best} leads with {result}, and {guess}."
        return " ".join([sentence, "Train for more steps (--steps), or look at the data.", *notes]), False
    if same and len(distinct) == 1:
        advice = "See whether the factory uses its argument"
        return " ".join([f"No recommendation on {where}: there is one network only. {advice}.", *notes]), False
    use = f"se {best} at learning rate {distinct[0].setting['lr']:g}"
    lost = _lost_runs(distinct[0], runs)
    doubts = [f"{lost} and count for nothing: the mean is that of the others."] if lost else []
    if len(distinct) == 1:
        done = "trained" if len(arms) > 1 else "was tried"
        said = f"Only {best} {done} on {where}: {result} at learning rate {distinct[0].setting['lr']:g}."
        if distinct[0].n < LEAST_SEEDS:
            doubts.append(f"{distinct[0].n} finished runs are few ({LEAST_SEEDS} are the least).")
        return " ".join([said, *doubts, *notes]), not doubts and len(arms) > 1
    scores = {arm.knobs["norm"]: _scores(metric, _at_setting(arm, runs)) for arm in distinct}
    ahead = leads(scores, best, higher=metric.better == "higher", bounds=metric.bounds)
    order = sorted(ahead, key=lambda norm: (math.isnan(ahead[norm].mean), ahead[norm].mean))
    whys = {norm: _why_undecided(ahead[norm], metric, exam) for norm in order}
    rivals = [norm for norm in order if whys[norm]]
    closest = (rivals or order)[0]
    lead = _lead(ahead[closest], metric)
    if not rivals and not doubts:
        said = f"U{use} here ({where}): {result}, {lead} ahead of the next best, {closest}."
        return " ".join([said, *notes]), True
    parts = [f"If you must choose, u{use} ({where}): {result}.", *doubts]
    if rivals:
        narrow = _lone_seed(scores[best], scores[closest], metric, (best, closest))
        told = f"it is {lead} ahead of {closest}, {whys[closest]}{narrow}"
        if not ahead[closest].n:
            told = f"no seed finished in both {best} and {closest}"
        parts.append(f"The data cannot tell {best} from {_join_names(rivals, 'or')}: {told}.")
    beaten = [norm for norm in order if norm not in rivals]
    if beaten:
        parts.append(f"{best} does beat {_join_names(beaten)}.")
    if rivals:
        parts.append(_seeds_needed(ahead[closest], scores[best], scores[closest], len(ahead)))
        parts[-1] += f" tell {best} from {closest}."
    return " ".join([*parts, *notes]), False


def twins(norms: Sequence[str], runs: Sequence[Run]) -> dict[str, str]:
    """Return arm -> an earlier arm that is the same network: every reading is equal wherever both have run.

    A training is a function of network, rate and seed, so equal networks give equal numbers and other networks do not:
    losses and norms are compared to the last digit.
    """
    outcomes: dict[str, dict[tuple[Any, Any], Any]] = {norm: {} for norm in norms}
    for run in runs:
        if run.spec["norm"] in outcomes:
            values = tuple((r.name, r.step, r.layer, repr(r.value)) for r in run.readings)
            outcomes[run.spec["norm"]][run.spec["lr"], run.spec["seed"]] = (run.status, values)
    same: dict[str, str] = {}
    for place, norm in enumerate(norms):
        for other in (earlier for earlier in norms[:place] if earlier not in same):
            shared = outcomes[norm].keys() & outcomes[other].keys()
            if any(outcomes[norm][key][1] for key in shared) and all(
                outcomes[norm][key] == outcomes[other][key] for key in shared
            ):
                same[norm] = other
    return same


def _describe_failures(runs: Sequence[Run]) -> str:
    counts = Counter(run.status for run in runs)
    tally = ", ".join(f"{count} {status}" for status, count in counts.items())
    first = next((run for run in runs if run.status == "error"), None)
    if first is not None:
        return f"every run diverged or failed ({tally}). The first error: {first.sentence}"
    return f"every run diverged or failed ({tally}). Try smaller rates (--rates)."


def _above_chance(arm: Arm, metric: Metric, exam: Exam, arms: int) -> bool:
    """Test the best of several arms: the more of them, the better the luckiest guesser."""
    mean = arm.values[metric.name].mean
    return above_chance(mean, exam.samples, exam.majority, confidence=joint_confidence(arms))


def _notes(arms: Sequence[Arm], runs: Sequence[Run], same: Mapping[str, str]) -> list[str]:
    """Return what else a reader must know: arms that are one network, runs that arms after the first lost."""
    notes = [
        f"{norm} is the same network as {other}: every reading is equal on every seed." for norm, other in same.items()
    ]
    for arm in arms[1:]:
        lost = _lost_runs(arm, runs)
        if lost:
            notes.append(f"{lost}.")
    return notes


def _lost_runs(arm: Arm, runs: Sequence[Run]) -> str:
    """Say how many runs of an arm are no measurements, at its chosen rate or, where it has none, at all."""
    own = _at_setting(arm, runs, finished=False)
    counts = Counter(run.status for run in own if not run.ok)
    if not counts:
        return ""
    words = {"diverged": "diverged", "error": "failed", "nonconverged": "did not converge", "skipped": "were skipped"}
    parts = " and ".join(f"{count} {words[status]}" for status, count in counts.items())
    return f"Of {len(own)} runs of {arm.knobs['norm']} {parts}"


def _at_setting(arm: Arm, runs: Sequence[Run], *, finished: bool = True) -> list[Run]:
    wanted = {**arm.knobs, **arm.setting}
    own = [run for run in runs if all(run.spec[knob] == value for knob, value in wanted.items())]
    return [run for run in own if run.ok or not finished]


def _scores(metric: Metric, runs: Sequence[Run]) -> dict[int, float]:
    return {run.spec["seed"]: value for run in runs if (value := run.last(metric.name)) is not None}


def _why_undecided(lead: Interval, metric: Metric, exam: Exam | None) -> str:
    """Say why a lead decides nothing; empty where it does."""
    if lead.n < LEAST_SEEDS:
        return f"which {lead.n} seed{'' if lead.n == 1 else 's'} cannot decide ({LEAST_SEEDS} are the least)"
    if metric.unit and exam is not None and abs(lead.mean) * exam.samples < 1 - 1e-9:
        return f"less than one of the {exam.samples} test samples"
    if not lead.has_width:
        return "the same on every seed, so that its interval has no width and says nothing about others"
    return "" if lead.excludes_zero else "an interval that contains 0"


def _lone_seed(best: Mapping[int, float], rival: Mapping[int, float], metric: Metric, names: tuple[str, str]) -> str:
    """Name the seed that makes the interval wide, if it is one, and what each arm reached there."""
    differences = {seed: best[seed] - rival[seed] for seed in sorted(best.keys() & rival.keys())}
    if len(differences) <= LEAST_SEEDS:
        return ""
    whole = interval(differences.values())
    centre = sorted(differences.values())[len(differences) // 2]
    seed = max(differences, key=lambda key: abs(differences[key] - centre))
    rest = interval(value for key, value in differences.items() if key != seed)
    if whole.high - whole.low < LONE_SEED * (rest.high - rest.low):
        return ""
    reached = " and ".join(
        f"{name} {_result(scores[seed], metric)}" for name, scores in zip(names, (best, rival), strict=True)
    )
    return f", wide because of seed {seed} alone (there {reached})"


def _seeds_needed(lead: Interval, best: Mapping[int, float], rival: Mapping[int, float], others: int) -> str:
    """Say how many seeds would tell two arms apart, as the beginning of a sentence."""
    if lead.n < LEAST_SEEDS:
        return f"It takes at least {LEAST_SEEDS} seeds that finish in both to"
    differences = [best[seed] - rival[seed] for seed in sorted(best.keys() & rival.keys())]
    seeds = seeds_to_decide(differences, confidence=joint_confidence(others))
    if not lead.has_width or lead.excludes_zero:
        return "More test samples would"
    if seeds is None:
        return f"If lead and spread stay as they are, no number of seeds up to {MOST_SEEDS:,} would"
    return f"If lead and spread stay as they are, about {seeds:,} seeds would"


def _result(value: float, metric: Metric) -> str:
    return f"{metric.factor * value:.1f} % {metric.title}" if metric.unit else f"{metric.title} {value:.3g}"


def _lead(lead: Interval, metric: Metric) -> str:
    shown = lead.times(metric.factor)
    unit = " points" if metric.unit else ""
    if math.isnan(lead.low):
        return f"{_decimals(shown.mean)}{unit} (no interval from n = {lead.n})"
    ends = f"{_decimals(shown.low)} to {_decimals(shown.high)}"
    return f"{_decimals(shown.mean)}{unit} (95 % interval {ends}, paired over n = {lead.n} seeds)"


def _decimals(value: float) -> str:
    """Write a difference without an exponent where two decimals can show it."""
    return f"{value:.2f}" if abs(value) >= 0.005 or value == 0 else f"{value:.1g}"


def _join_names(names: Sequence[str], word: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"
