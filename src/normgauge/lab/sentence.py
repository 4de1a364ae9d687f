"""The sentence a comparison ends with: the recommendation first, the statistics after, or why there is none."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from normgauge import stats
from normgauge.documents import Arm, Metric
from normgauge.lab.data import Dataset
from normgauge.lab.race import Race
from normgauge.records import Run
from normgauge.stats import LEAST_SEEDS, Interval

#: One seed is named as the cause where without it the interval is this many times narrower.
LONE_SEED = 2.0


@dataclass(frozen=True, slots=True)
class Exam:
    """What the test split can show at all."""

    samples: int  # how many there are; differences of accuracies below one of them do not exist
    majority: float  # the share of the most frequent label, which guessing gets too; nan where targets are no classes
    constant: float = math.nan  # what the best answer gets that does not look at its input; nan where it is not known

    @classmethod
    def of(cls, data: Dataset) -> Self:
        """Return that of a dataset."""
        targets, constant = data.test[1], constant_score(data)
        if data.task != "classification":
            return cls(len(targets), math.nan, constant)
        return cls(targets.numel(), int(torch.bincount(targets.reshape(-1)).max()) / targets.numel(), constant)


def constant_score(data: Dataset) -> float:
    """Return what an answer that does not look at its input gets on the test split; nan where it cannot be had.

    Examples:
        >>> from normgauge.lab.data import load
        >>> round(constant_score(load("gaussian")) / float(load("gaussian").test[1].square().sum(1).mean()), 2)
        1.0
    """
    learnt, targets = data.train[1], data.test[1]
    if data.task == "classification":
        frequencies = torch.bincount(learnt.reshape(-1), minlength=data.classes) + 1
        output = frequencies.log().expand(*targets.shape, data.classes)
    else:
        output = learnt.mean(0).expand_as(targets)
    try:
        return float((data.metric or data.loss)(output, targets))
    except Exception:  # noqa: BLE001 (a user's own function may want outputs of another shape)
        return math.nan


@dataclass(frozen=True)
class RaceEnd:
    """How a race ended, and under which terms it was run."""

    race: Race | None  # `None` where the budget was spent before it began
    first_seed: int  # of its seeds
    margin: float  # the largest difference that does not matter
    note: str = ""  # what to do where there was no race

    def covers(self, seed: int) -> bool:
        """Whether the seed was judged."""
        return self.race is not None and 0 <= seed - self.first_seed < self.race.seeds


def write_answer(
    arms: Sequence[Arm], runs: Sequence[Run], metric: Metric, exam: Exam | None = None, ended: RaceEnd | None = None
) -> tuple[str, bool]:
    """Write the sentence and say whether the data decide.

    They do not where the best arm is not above chance (binomial test against the most frequent label; a constant
    answer's loss) or lost runs, and where its lead over another arm rests on fewer than three seeds, is less than one
    test sample, has an interval without width, or an interval that contains 0. Arms whose readings are equal on every
    seed are one network. After a race its own intervals count, and an arm that is not better than the best by more than
    the margin needs not be told from it.
    """
    spec = runs[0].spec if runs else {}
    where = f"{spec['model']}, {spec['data']}, {spec['steps']} steps" if spec else "nothing"
    race = None if ended is None else ended.race
    trained = [arm for arm in arms if metric.name in arm.values]
    if ended is not None and not (race and trained) and (not runs or any(run.ok for run in runs)):
        return f"No recommendation yet: {ended.note}", False
    if not trained:
        return f"No normalizer trained on {where}: {_describe_failures(runs)}", False
    same = twins(arms, runs)
    distinct = [arm for arm in trained if arm.title not in same]
    notes = _notes(arms, runs, same)
    best, result = distinct[0].title, _result(distinct[0].values[metric.name].mean, metric)
    guess = _guess(distinct[0], metric, exam, len(distinct))
    if guess:
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
    judged = [run for run in runs if ended is None or ended.covers(run.spec["seed"])]
    scores = {arm.title: _scores(metric, _at_setting(arm, judged)) for arm in distinct}
    higher = metric.better == "higher"
    ahead = dict(race.leads) if race else stats.leads(scores, best, higher=higher, bounds=metric.bounds)
    order = sorted(ahead, key=lambda norm: (math.isnan(ahead[norm].mean), ahead[norm].mean))
    if race:
        beaten = [norm for norm in order if norm in race.beaten and ahead[norm].n]
        order = [norm for norm in order if ahead[norm].n or norm not in race.beaten]
    else:
        beaten = [norm for norm in order if not _why_undecided(ahead[norm], metric, exam)]
    rivals = [norm for norm in order if norm not in beaten]
    if race and ended and not race.decided:  # of those not beaten, the ones that keep the race open
        within = [norm for norm in rivals if ended.margin > 0 and ahead[norm].low > -ended.margin]
        notes += [f"Not better than {best} by more than the margin: {_join_names(within)}."] if within else []
        rivals = [norm for norm in rivals if norm not in within] or rivals
    closest = (rivals or order)[0]
    lead = _lead(ahead[closest], metric)
    if not rivals and not doubts:
        said = f"U{use} here ({where}): {result}, {lead} ahead of the next best, {closest}."
        return " ".join([said, *notes]), True
    settled = race is not None and race.decided
    begin = "U" if settled and not doubts else "If you must choose, u"
    parts = [f"{begin}{use} ({where}): {result}.", *doubts]
    if rivals and settled and ended is not None:
        names = _join_names(rivals, "or")
        least = f"{_decimals(metric.factor * ended.margin)}{' points' if metric.unit else ''}"
        also = f"{names} may be as good: it is {lead} ahead of {closest}."
        parts.append(f"No other is better by more than {least}, though {also}")
        parts += _cheaper(distinct[0], [arm for arm in distinct if arm.title in rivals])
    elif rivals:
        why = _why_undecided(ahead[closest], metric, exam) or "less than what counts"
        narrow = _lone_seed(scores[best], scores[closest], metric, (best, closest))
        told = f"it is {lead} ahead of {closest}, {why}{narrow}"
        if not ahead[closest].n:
            told = f"no seed finished in both {best} and {closest}"
        parts.append(f"The data cannot tell {best} from {_join_names(rivals, 'or')}: {told}.")
        # a rival that looks worse than the closest one in the table, and is not beaten, needs its reason
        wide = [norm for norm in rivals if norm != closest and ahead[norm].mean > ahead[closest].high]
        if wide:
            far = _join_names([f"{norm} (by {_decimals(metric.factor * ahead[norm].mean)})" for norm in wide])
            parts.append(f"Further behind, but with seeds so far apart that it may be luck: {far}.")
    if beaten:
        parts.append(f"{best} does beat {_join_names(beaten)}.")
    if rivals and race is not None and not settled:
        parts.append(_cost_of_deciding(race))
    elif rivals and not settled:
        parts.append(_seeds_needed(ahead[closest], scores[best], scores[closest], len(ahead)))
        parts[-1] += f" tell {best} from {closest}."
    return " ".join([*parts, *notes]), settled and not doubts


def _cost_of_deciding(race: Race) -> str:
    if race.more_seeds is None:
        return f"If lead and spread stay as they are, {race.cost_of_deciding()} would decide: take the cheaper one."
    return f"To decide would take {race.cost_of_deciding()}: run the same command again with more --minutes or --seeds."


def _cheaper(best: Arm, rivals: Sequence[Arm]) -> list[str]:
    """Name the arm whose step takes the least time among those as good, where it is clearly less than the best's."""
    timed = [arm for arm in (best, *rivals) if "step_time" in arm.values]
    fastest = min(timed, key=lambda arm: arm.values["step_time"].mean, default=best)
    if fastest is best or best not in timed:
        return []
    own, other = best.values["step_time"], fastest.values["step_time"]
    if not other.high < own.low:
        return []
    return [f"A step of {fastest.title} takes {other.mean:.3g} ms, one of {best.title} {own.mean:.3g} ms."]


def _guess(arm: Arm, metric: Metric, exam: Exam | None, arms: int) -> str:
    """Say what guessing gets, where the best arm is not above it; empty where it is, or where nobody knows.

    The more arms, the better the luckiest guesser of labels: the test is for all of them.
    """
    if exam is None:
        return ""
    mean = arm.values[metric.name].mean
    if metric.unit == "%":
        if stats.above_chance(mean, exam.samples, exam.majority, confidence=stats.joint_confidence(arms)):
            return ""
        share = f"{100 * exam.majority:.1f} % of the {exam.samples} test samples"
        return f"always giving the most frequent label gets {share}"
    if math.isnan(exam.constant) or (mean > exam.constant if metric.better == "higher" else mean < exam.constant):
        return ""
    return f"the same answer to every input gets {exam.constant:.3g}"


def twins(arms: Sequence[Arm], runs: Sequence[Run]) -> dict[str, str]:
    """Return arm -> an earlier arm that is the same network: every reading is equal wherever both have run.

    A training is a function of network, rate and seed, so equal networks give equal numbers and other networks do not:
    losses and norms are compared to the last digit.
    """
    outcomes: dict[str, dict[tuple[Any, Any], Any]] = {arm.title: {} for arm in arms}
    for arm in arms:
        for run in (run for run in runs if all(run.spec[knob] == value for knob, value in arm.knobs.items())):
            numbers = tuple((r.name, r.step, r.layer, repr(r.value)) for r in run.readings)
            outcomes[arm.title][run.spec["lr"], run.spec["seed"]] = run.status, numbers
    same: dict[str, str] = {}
    for place, (name, own) in enumerate(outcomes.items()):
        for other, theirs in list(outcomes.items())[:place]:
            shared = own.keys() & theirs.keys()
            equal = any(own[key][1] for key in shared) and all(own[key] == theirs[key] for key in shared)
            if equal and other not in same:
                same[name] = other
    return same


def _describe_failures(runs: Sequence[Run]) -> str:
    tally = ", ".join(f"{count} {status}" for status, count in Counter(run.status for run in runs).items())
    errors = [f"The first error: {run.sentence}" for run in runs if run.status == "error"]
    return f"every run diverged or failed ({tally}). {next(iter(errors), 'Try smaller rates (--rates).')}"


def _notes(arms: Sequence[Arm], runs: Sequence[Run], same: Mapping[str, str]) -> list[str]:
    """Return what else a reader must know: arms that are one network, runs that arms after the first lost."""
    equal = "every reading is equal on every seed."
    notes = [f"{norm} is the same network as {other}: {equal}" for norm, other in same.items()]
    return notes + [f"{lost}." for arm in arms[1:] if (lost := _lost_runs(arm, runs))]


def _lost_runs(arm: Arm, runs: Sequence[Run]) -> str:
    """Say how many runs of an arm are no measurements, at its chosen rate or, where it has none, at all."""
    own = _at_setting(arm, runs, finished=False)
    counts = Counter(run.status for run in own if not run.ok)
    if not counts:
        return ""
    words = {"diverged": "diverged", "error": "failed", "nonconverged": "did not converge", "skipped": "were skipped"}
    parts = " and ".join(f"{count} {words[status]}" for status, count in counts.items())
    return f"Of {len(own)} runs of {arm.title} {parts}"


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
    whole = stats.interval(differences.values())
    centre = sorted(differences.values())[len(differences) // 2]
    seed = max(differences, key=lambda key: abs(differences[key] - centre))
    rest = stats.interval(value for key, value in differences.items() if key != seed)
    if whole.high - whole.low < LONE_SEED * (rest.high - rest.low):
        return ""
    there = zip(names, (best, rival), strict=True)
    reached = " and ".join(f"{name} {_result(scores[seed], metric)}" for name, scores in there)
    return f", wide because of seed {seed} alone (there {reached})"


def _seeds_needed(lead: Interval, best: Mapping[int, float], rival: Mapping[int, float], others: int) -> str:
    """Say how many seeds would tell two arms apart, as the beginning of a sentence."""
    if lead.n < LEAST_SEEDS:
        return f"It takes at least {LEAST_SEEDS} seeds that finish in both to"
    differences = [best[seed] - rival[seed] for seed in sorted(best.keys() & rival.keys())]
    seeds = stats.seeds_to_decide(differences, confidence=stats.joint_confidence(others))
    if not lead.has_width or lead.excludes_zero:
        return "More test samples would"
    if seeds is None:
        return f"If lead and spread stay as they are, no number of seeds up to {stats.MOST_SEEDS:,} would"
    return f"If lead and spread stay as they are, about {seeds:,} seeds would"


def _result(value: float, metric: Metric) -> str:
    return f"{metric.factor * value:.1f} % {metric.title}" if metric.unit else f"{metric.title} {value:.3g}"


def _lead(lead: Interval, metric: Metric) -> str:
    shown = lead.times(metric.factor)
    unit = " points" if metric.unit else ""
    if math.isnan(lead.low) or lead.n < LEAST_SEEDS:  # two seeds give one as wide as the scale
        return f"{_decimals(shown.mean)}{unit} (no interval from n = {lead.n})"
    ends = f"{_decimals(shown.low)} to {_decimals(shown.high)}"
    return f"{_decimals(shown.mean)}{unit} (95 % interval {ends}, paired over n = {lead.n} seeds)"


def _decimals(value: float) -> str:
    """Write a difference without an exponent where two decimals can show it."""
    return f"{value:.2f}" if abs(value) >= 0.005 or value == 0 else f"{value:.1g}"


def _join_names(names: Sequence[str], word: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"
