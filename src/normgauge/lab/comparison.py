"""From stored runs to one table and one sentence: which normalizer, here, at what learning rate, by what margin."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from normgauge.documents import Arm, ComparisonDocument, Metric
from normgauge.lab.data import Dataset
from normgauge.lab.sentence import Exam, RaceEnd, write_answer
from normgauge.records import Chart, Reading, Run, Spec, format_number, format_table, plain
from normgauge.results import Result
from normgauge.stats import Bounds, Choice, Interval, choose, interval

SHARE: Bounds = (0.0, 1.0)
SIZE: Bounds = (0.0, None)
ACCURACY = Metric(
    "test_accuracy", "test accuracy", "Share of test samples classified right.", "%", "higher", bounds=SHARE
)
LOSS = Metric("test_loss", "test loss", "Loss on the test split, stored statistics.", better="lower", bounds=SIZE)
LOW: dict[str, Any] = {"better": "lower", "bounds": SIZE}
SIDE: dict[str, Any] = {"unit": "%", "better": "higher", "brief": False, "bounds": SHARE}
METRICS = (
    ACCURACY,
    LOSS,
    Metric("train_loss", "training loss", "Loss of the measuring batch at the end, batch statistics.", **LOW),
    Metric("steps_to_target", "steps to target", "Steps until the training loss fell below the target.", **LOW),
    Metric("effective_beta", "effective beta", "Largest |change of gradient| / |step|, mean.", when="mean", **LOW),
    Metric("gradient_distance", "gradient change", "Change of the gradient along itself, mean.", when="mean", **LOW),
    Metric("top_eigenvalue", "top eigenvalue", "Largest Hessian eigenvalue, mean over training.", when="mean"),
    Metric("shift_cosine", "shift cosine", "Cosine of gradients before and after lower layers move.", better="higher",
           brief=False, when="mean", bounds=(-1.0, 1.0)),
    Metric("gradient_growth", "gradient growth", "Factor per layer of the squared gradient at the start.", brief=False,
           when="first", bounds=SIZE),
    Metric("margin", "margin", "Median test margin over the norm of the last layer.", better="higher", brief=False),
    Metric("fgsm_accuracy", "accuracy under FGSM", "Test accuracy under FGSM of radius 0.2.", **SIDE),
    Metric("noise_accuracy", "under weight noise", "Test accuracy with 20 % noise on filters.", **SIDE),
    Metric("weight_norm", "weight norm", "Norm of all weight tensors at the end.", bounds=SIZE),
    Metric("step_time", "step time", "Milliseconds of one step, one thread, arms taking turns.", "ms", **LOW),
    Metric("memory", "memory", "Held for a step: weights, gradients, optimizer, activations.", "MB", **LOW),
    Metric("seconds_to_target", "seconds to target", "Steps to the target times the step time.", "s", **LOW),
)  # fmt: skip
_NOTHING = Interval(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True, slots=True)
class Comparison(Result):
    """One row per arm at its own best learning rate, and the sentence that answers the question.

    Attributes:
        document: what was found, as the store and the page have it.
        store: where the runs are.
        counts: runs by status.
    """

    document: ComparisonDocument
    store: Path
    counts: Mapping[str, int]

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """One per arm, best first: norm, lr, n, stable_up_to, then mean, low and high of every metric."""
        return tuple(self._rows())

    @property
    def answer(self) -> str:
        """The sentence."""
        return self.document.answer

    @property
    def decided(self) -> bool:
        """Whether the data can tell the best arm from all others."""
        return self.document.decided

    @property
    def chosen(self) -> dict[str, dict[str, float]]:
        """Arm -> the tuned setting; without those of which no run finished."""
        return {arm.title: dict(arm.setting) for arm in self.document.arms if arm.setting}

    def _title(self) -> str:
        return "Each arm at its own best learning rate: mean (95 % interval over seeds)"

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for arm in self.document.arms:
            row = {**arm.knobs, "lr": arm.setting.get("lr"), "n": arm.n, "stable_up_to": arm.stable_up_to}
            for metric in self.document.metrics:
                value = plain(arm.values.get(metric.name, _NOTHING))
                row |= {metric.name: value["mean"], **{f"{metric.name}_{end}": value[end] for end in ("low", "high")}}
            rows.append(row)
        return rows

    def readings(self) -> tuple[Reading, ...]:
        """Return the primary metric of every arm, the best first, with half the width of its interval."""
        metric, readings = self._primary(), []
        for arm in self.document.arms:
            value = arm.values.get(metric.name, _NOTHING)
            half, name = (value.high - value.low) / 2, f"{metric.title}, {arm.title}"
            readings.append(Reading.measured(name, value.mean, "estimate", uncertainty=half, why="no run finished"))
        return tuple(readings)

    def _meaning(self) -> str:
        return self.answer

    def _primary(self) -> Metric:
        there = [m for m in self.document.metrics if any(m.name in arm.values for arm in self.document.arms)]
        return there[0] if there else LOSS

    def __str__(self) -> str:
        """Return the table with intervals, what to know about the chosen rates, then the answer."""
        remarks = [f"\n{remark}" for arm in self.document.arms for remark in arm.remarks]
        return format_table(self.readable_rows(), title=self._title(), footer="".join([*remarks, f"\n\n{self.answer}"]))

    def readable_rows(self) -> list[dict[str, str]]:
        """Return the rows as text, each metric as `mean (low..high)`."""
        arms = self.document.arms
        shown = [m for m in self.document.metrics if m.brief and any(m.name in arm.values for arm in arms)]
        if shown and shown[0] != LOSS:
            shown = [metric for metric in shown if metric != LOSS]
        table = []
        for arm in arms:
            cells = {**arm.knobs, "rate": format_number(arm.setting.get("lr")), "n": str(arm.n)}
            for metric in shown:
                value = arm.values.get(metric.name)
                told = "-" if value is None else str(value.times(metric.factor))
                cells[f"{metric.title} {metric.unit}".strip()] = told
            table.append({**cells, "stable up to": arm.stable_up_to})
        return table

    def chart(self) -> Chart:
        """Return the primary metric with its interval per arm."""
        from normgauge.charts import intervals

        arms, metric = self.document.arms, self._primary()
        rows = [{"arm": arm.title, **plain(arm.values[metric.name])} for arm in arms if metric.name in arm.values]
        return intervals(rows, value="mean", series="arm", title=metric.title)


@dataclass(frozen=True)
class Verdict:
    """What stored runs come to: the arms, best first, the sentence, and whether they decide."""

    arms: tuple[Arm, ...]
    answer: str
    decided: bool


def primary_metric(data: Dataset, spec: Spec) -> Metric:
    """Return what arms are compared by: a user's own metric, accuracy where samples have a label each, or the loss."""
    if data.metric is not None:
        name = str(spec["metric"]).rpartition(":")[2].replace("_", " ")
        words = "A user's own metric on the test split."
        return Metric("test_metric", f"test {name}", words, better=spec.get("better", "higher"))
    return ACCURACY if data.task == "classification" and data.is_plain else LOSS


def judge(
    runs: Sequence[Run],
    *,
    tuning_seeds: int,
    exam: Exam | None = None,
    rates: Collection[float] | None = None,
    asked: Mapping[str, Sequence[Any]] | None = None,
    primary: Metric | None = None,
    ended: RaceEnd | None = None,
    costs: Mapping[str, Mapping[str, Interval]] | None = None,
) -> Verdict:
    """Judge stored runs: tune the learning rate of each arm on validation data, compare on test data.

    Each arm's rate is chosen by `normgauge.stats.choose` from runs with seeds below `tuning_seeds`; differences between
    arms are paired by seed. A run that did not finish is no measurement. After a race, only its own seeds are judged.

    `exam` says what the test split can show, `rates` is the grid, `asked` holds knob -> values, whose combinations are
    the arms (the normalizers of the runs if left out), `primary` what arms are compared by (accuracy where runs have
    it, else the test loss), `ended` how a race ended, `costs` the `step_time` and `memory` of arms.
    """
    accuracy = any(reading.name == ACCURACY.name for run in runs for reading in run.readings)
    primary = primary or (ACCURACY if accuracy else LOSS)
    higher = primary.better == "higher"
    asked = asked or {"norm": list(dict.fromkeys(run.spec["norm"] for run in runs))}
    knobs = tuple(asked)
    owners: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        owners.setdefault(tuple(run.spec[knob] for knob in knobs), []).append(run)
    rows: list[Any] = []
    for own in owners.values():  # an arm of a race with one rate has no runs that tune
        rows += [run.row() for run in [run for run in own if run.spec["seed"] < tuning_seeds] or own]
    by = primary.name.replace("test", "validation")
    choices = choose(rows, by=by, over=("lr",), within=knobs, higher=higher)
    chosen = {tuple(choice.arm.values()): choice for choice in choices}
    every = [dict(zip(knobs, values, strict=True)) for values in itertools.product(*asked.values())]
    judged = [run for run in runs if ended is None or ended.covers(run.spec["seed"])]
    arms = []
    for some, name in zip(every, name_arms(every), strict=True):
        values = tuple(some.values())
        if values not in owners:
            continue
        arm = _arm(some, owners[values], chosen.get(values), rates=rates, judged=judged, primary=primary)
        priced = dict((costs or {}).get(name, {}))
        if priced and "steps_to_target" in arm.values:
            priced["seconds_to_target"] = arm.values["steps_to_target"].times(priced["step_time"].mean / 1000)
        arms.append(replace(arm, name=name, values={**arm.values, **priced}))

    def place(arm: Arm) -> tuple[bool, bool, float, str]:
        mean = arm.values.get(primary.name, _NOTHING).mean
        leads = ended is not None and ended.race is not None and arm.name == ended.race.best
        return not leads, math.isnan(mean), -mean if higher else mean, arm.name

    arms.sort(key=place)
    return Verdict(tuple(arms), *write_answer(arms, runs, primary, exam, ended))


def name_arms(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each arm: the values of the knobs in which they differ, or of the first knob.

    Examples:
        >>> name_arms([{"norm": "batch", "optimizer": "sgd"}, {"norm": "layer", "optimizer": "sgd"}])
        ['batch', 'layer']
        >>> name_arms([{"norm": "batch", "clip": 1.0}, {"norm": "batch", "clip": None}])
        ['clip 1', 'clip none']
    """
    differing = [knob for knob in (arms[0] if arms else ()) if len({repr(arm[knob]) for arm in arms}) > 1]
    return [" ".join(_knob_words(knob, arm[knob]) for knob in differing or list(arm)[:1]) for arm in arms]


def _knob_words(knob: str, value: Any) -> str:
    told = "none" if value is None else format_number(value)
    return told if isinstance(value, str) else f"{knob} {told}"


def _arm(
    knobs: Mapping[str, Any],
    own: Sequence[Run],
    choice: Choice | None,
    *,
    rates: Collection[float] | None,
    judged: Sequence[Run],
    primary: Metric,
) -> Arm:
    stable = _stable_up_to(own)
    if choice is None:
        return Arm(knobs, {}, 0, {}, stable)
    wanted = {**choice.arm, **choice.setting}
    finished = [run for run in judged if run.ok and all(run.spec[knob] == value for knob, value in wanted.items())]
    columns = dict.fromkeys((primary, *METRICS))
    values = {metric.name: interval(_values(metric, finished), bounds=metric.bounds) for metric in columns}
    measured = {name: value for name, value in values.items() if value.n}
    beyond = sorted({run.spec["lr"] for run in own} - set(rates)) if rates else []
    where = ", ".join(f"{knob} {value}" for knob, value in knobs.items())
    words = "was tried too: the best was the edge of the grid."
    remarks = [f"{where}: lr {format_number(rate)} {words}" for rate in beyond]
    return Arm(choice.arm, choice.setting, len(finished), measured, stable, (*remarks, *choice.remarks()))


def _values(metric: Metric, runs: Sequence[Run]) -> list[float]:
    pick = {"first": lambda series: series[0], "last": lambda series: series[-1], "mean": fmean}[metric.when]
    return [pick(series) for run in runs if (series := run.series(metric.name))]


def _stable_up_to(runs: Sequence[Run]) -> str:
    """Name the largest rate below which no seed diverged; the grid's end is a lower bound."""
    stable = None
    for rate in sorted({run.spec["lr"] for run in runs}):
        if any(not run.ok for run in runs if run.spec["lr"] == rate):
            return format_number(stable)
        stable = rate
    return f">= {format_number(stable)}"
