"""From stored runs to one table and one sentence: which normalizer, here, at what learning rate, by what margin."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normgauge.records import Result, format_number
from normgauge.stats import Interval, interval, leads

if TYPE_CHECKING:
    import altair

Run = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One metric of the comparison: where it is read, how it is written, what it means."""

    name: str
    title: str
    unit: str
    better: str | None
    help: str
    brief: bool = True  # shown in the terminal; the page and the frame have all of them
    when: str = "last"  # "first" or "last" measured step of a run, or the "mean" over them

    @property
    def factor(self) -> float:
        """What a stored value is multiplied by for reading: shares are stored as fractions."""
        return 100.0 if self.unit == "%" else 1.0


COLUMNS = (
    Column("test_accuracy", "test accuracy", "%", "higher", "Share of test samples classified right."),
    Column("test_loss", "test loss", "", "lower", "Loss on the test split, stored statistics."),
    Column("train_loss", "training loss", "", "lower", "Loss of the measuring batch at the end, batch statistics."),
    Column("steps_to_target", "steps to target", "", "lower", "Steps until the training loss fell below the target."),
    Column(
        "effective_beta", "effective beta", "", "lower", "Largest |change of gradient| / |step|, mean.", when="mean"
    ),
    Column(
        "gradient_distance", "gradient change", "", "lower", "Change of the gradient along itself, mean.", when="mean"
    ),
    Column(
        "top_eigenvalue", "top eigenvalue", "", None, "Largest Hessian eigenvalue, mean over training.", when="mean"
    ),
    Column(
        "shift_cosine",
        "shift cosine",
        "",
        "higher",
        "Cosine of gradients before and after lower layers move.",
        False,
        "mean",
    ),
    Column(
        "gradient_growth",
        "gradient growth",
        "",
        None,
        "Factor per layer of the squared gradient at the start.",
        False,
        "first",
    ),
    Column("margin", "margin", "", "higher", "Median test margin over the norm of the last layer.", False),
    Column("fgsm_accuracy", "accuracy under FGSM", "%", "higher", "Test accuracy under FGSM of radius 0.2.", False),
    Column("noise_accuracy", "under weight noise", "%", "higher", "Test accuracy with 20 % noise on filters.", False),
    Column("weight_norm", "weight norm", "", None, "Norm of all weight tensors at the end."),
)


@dataclass(frozen=True, slots=True)
class Comparison(Result):
    """One row per arm at its own best learning rate, and the sentence that answers the question.

    Attributes:
        rows: arm, chosen rate, n, then mean, low and high of every metric.
        answer: the sentence.
        decided: whether the data can tell the best arm from all others.
        chosen: arm -> the tuned setting.
        store: where the runs are.
        counts: runs by status.
    """

    rows: tuple[dict[str, Any], ...]
    answer: str
    decided: bool
    chosen: dict[str, dict[str, float]]
    store: Path
    counts: dict[str, int]

    def _title(self) -> str:
        return "Each normalizer at its own best learning rate: mean (95 % interval over seeds)"

    def _rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.rows]

    def __str__(self) -> str:
        """Return the table with intervals, then the answer."""
        from normgauge.records import format_table

        return format_table(self.readable_rows(), title=self._title(), footer=f"\n{self.answer}")

    def readable_rows(self) -> list[dict[str, str]]:
        """Return the rows as text, each metric as `mean (low..high)`."""
        shown = [c for c in COLUMNS if c.brief and any(row.get(c.name) is not None for row in self.rows)]
        if any(row.get("test_accuracy") is not None for row in self.rows):
            shown = [column for column in shown if column.name != "test_loss"]
        table = []
        for row in self.rows:
            cells = {"norm": str(row["norm"]), "rate": format_number(row["lr"]), "n": str(row["n"])}
            for column in shown:
                title = f"{column.title} {column.unit}".strip()
                cells[title] = _cell(row, column)
            cells["stable up to"] = str(row["stable_up_to"])
            table.append(cells)
        return table

    def chart(self) -> altair.TopLevelMixin:
        """Return the primary metric with its interval per arm."""
        from normgauge.charts import intervals

        metric = "test_accuracy" if any(row.get("test_accuracy") is not None for row in self.rows) else "test_loss"
        rows = [
            {"norm": r["norm"], "value": r[metric], "low": r[f"{metric}_low"], "high": r[f"{metric}_high"]}
            for r in self.rows
            if r.get(metric) is not None
        ]
        return intervals(rows, value="value", series="norm", low="low", high="high", title=metric.replace("_", " "))


def _cell(row: Mapping[str, Any], column: Column) -> str:
    values = [row.get(f"{column.name}{edge}") for edge in ("", "_low", "_high")]
    mean, low, high = (None if v is None else format_number(column.factor * v, 3) for v in values)
    if mean is None:
        return "-"
    return mean if low is None or high is None else f"{mean} ({low}..{high})"


def compare_runs(
    runs: Sequence[Run], readings: Sequence[Mapping[str, Any]], store: Path, *, tuning_seeds: int
) -> Comparison:
    """Judge stored runs: tune the learning rate of each arm on validation data, compare on test data.

    An arm's rate is the one with the best mean validation metric over the tuning seeds, among those at which
    every tuning seed finished (if there is none, among those at which some did). Differences between arms are
    paired by seed.

    Args:
        runs: runs of a `Store`, with norm, lr and seed in their spec.
        readings: their readings.
        store: where they are, for the record.
        tuning_seeds: rates are chosen on seeds below this one, so that later seeds cannot change the choice.
    """
    curves = _curves(readings)
    arms: dict[str, dict[float, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        arms[run["spec"]["norm"]][run["spec"]["lr"]].append(run)
    accuracy = any("test_accuracy" in metrics for metrics in curves.values())
    primary, sign = ("accuracy", 1.0) if accuracy else ("loss", -1.0)
    rows, chosen, scores = [], {}, {}
    for norm, by_rate in arms.items():
        tried = {r: [run for run in group if run["spec"]["seed"] < tuning_seeds] for r, group in by_rate.items()}
        rate = _best_rate(tried, curves, f"validation_{primary}", sign)
        row: dict[str, Any] = {"norm": norm, "lr": rate, "n": 0, "stable_up_to": _stable_up_to(by_rate)}
        if rate is not None:
            chosen[norm] = {"lr": rate}
            good = [run for run in by_rate[rate] if run["status"] == "ok"]
            row["n"] = len(good)
            for column in COLUMNS:
                row.update(_metric(column, good, curves))
            scores[norm] = {run["spec"]["seed"]: _last(curves[run["id"]], f"test_{primary}") for run in good}
        rows.append(row)
    sentence, decided = _answer(scores, chosen, runs, accuracy=accuracy)
    order = sorted(rows, key=lambda row: -sign * _or(row.get(f"test_{primary}"), -sign * math.inf))
    counts: dict[str, int] = defaultdict(int)
    for run in runs:
        counts[run["status"]] += 1
    return Comparison(tuple(order), sentence, decided, chosen, store, dict(counts))


def _curves(readings: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return run -> metric -> its values in the order of the steps (holes left out)."""
    curves: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for reading in sorted(readings, key=lambda row: row["step"]):
        if reading["value"] is not None:
            curves[reading["run"]][reading["name"]].append(reading["value"])
    return curves


def _last(metrics: Mapping[str, Sequence[float]], name: str) -> float:
    return metrics[name][-1] if metrics.get(name) else math.nan


def _best_rate(
    by_rate: Mapping[float, Sequence[Run]], curves: Mapping[str, Any], metric: str, sign: float
) -> float | None:
    finished = {rate: [run for run in group if run["status"] == "ok"] for rate, group in by_rate.items()}
    whole = [rate for rate, group in by_rate.items() if len(finished[rate]) == len(group)]
    candidates = whole or [rate for rate, good in finished.items() if good]
    if not candidates:
        return None

    def score(rate: float) -> float:
        values = [_last(curves[run["id"]], metric) for run in finished[rate]]
        mean = sum(values) / len(values)
        return sign * mean if math.isfinite(mean) else -math.inf

    return max(sorted(candidates), key=score)  # of equal rates the smallest


def _stable_up_to(by_rate: Mapping[float, Sequence[Run]]) -> str:
    """Name the largest rate below which no seed diverged; the grid's end is a lower bound."""
    stable = None
    for rate in sorted(by_rate):
        if any(run["status"] != "ok" for run in by_rate[rate]):
            return "-" if stable is None else format_number(stable)
        stable = rate
    return f">= {format_number(stable)}"


def _metric(column: Column, runs: Sequence[Run], curves: Mapping[str, Any]) -> dict[str, Any]:
    values = []
    for run in runs:
        series = curves[run["id"]].get(column.name, [])
        if series:
            values.append({"first": series[0], "last": series[-1], "mean": sum(series) / len(series)}[column.when])
    if not values:
        return {column.name: None, f"{column.name}_low": None, f"{column.name}_high": None}
    found = interval(values)
    low, high = (None, None) if math.isnan(found.low) else (found.low, found.high)
    if column.unit == "%" and low is not None and high is not None:
        low, high = max(low, 0.0), min(high, 1.0)
    return {column.name: found.mean, f"{column.name}_low": low, f"{column.name}_high": high}


def _or(value: float | None, default: float) -> float:
    return default if value is None or math.isnan(value) else value


def _answer(
    scores: Mapping[str, Mapping[int, float]], chosen: Mapping[str, Any], runs: Sequence[Run], *, accuracy: bool
) -> tuple[str, bool]:
    """Write the sentence: use this one, at this rate, by this margin; or that the data cannot tell."""
    scores = {norm: values for norm, values in scores.items() if values and not any(map(math.isnan, values.values()))}
    where = _setting(runs)
    if not scores:
        return f"No normalizer trained on {where}: every run diverged or failed. Try smaller rates (--rates).", False
    unit, factor = (" points", 100.0) if accuracy else ("", 1.0)
    means = {norm: factor * sum(values.values()) / len(values) for norm, values in scores.items()}
    best = (max if accuracy else min)(means, key=lambda norm: means[norm])
    result = f"{means[best]:.1f} % test accuracy" if accuracy else f"test loss {means[best]:.3g}"
    if len(scores) == 1:
        return f"Only {best} trained on {where}: {result} at learning rate {chosen[best]['lr']:g}.", True
    ahead = leads(scores, best, higher=accuracy)
    rivals = [norm for norm, lead in ahead.items() if not lead.excludes_zero]
    second = min(ahead, key=lambda norm: ahead[norm].mean)
    if not rivals:
        lead = _lead(ahead[second], factor, unit)
        rate = f"learning rate {chosen[best]['lr']:g}"
        return f"Use {best} at {rate} here ({where}): {result}, {lead} ahead of the next best, {second}.", True
    rivals.sort(key=lambda norm: ahead[norm].mean)
    beaten = [norm for norm in ahead if norm not in rivals]
    also = f"; {best} does beat {_listed(beaten)}" if beaten else ""
    sentence = (
        f"The data cannot tell {_listed([best, *rivals])} apart on {where}: {best} leads with {result} at "
        f"learning rate {chosen[best]['lr']:g}, {_lead(ahead[second], factor, unit)} ahead of {second}{also}."
    )
    return sentence, False


def _lead(lead: Interval, factor: float, unit: str) -> str:
    mean, low, high = (_plain(factor * value) for value in (lead.mean, lead.low, lead.high))
    if math.isnan(lead.low):
        return f"{mean}{unit} (no interval from n = {lead.n})"
    return f"{mean}{unit} (95 % interval {low} to {high}, paired over n = {lead.n} seeds)"


def _plain(value: float) -> str:
    """Write a difference without an exponent where two decimals can show it."""
    return f"{value:.2f}" if abs(value) >= 0.005 or value == 0 else f"{value:.1g}"


def _setting(runs: Sequence[Run]) -> str:
    spec = runs[0]["spec"] if runs else {}
    return f"{spec.get('model', '?')}, {spec.get('data', '?')}, {spec.get('steps', '?')} steps"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
