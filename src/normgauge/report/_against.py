"""Two stored comparisons side by side: what changed in the settings, and which differences of the arms are real."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from normgauge.documents import Arm, ComparisonDocument, Metric
from normgauge.errors import StoreError
from normgauge.records import Run, format_number
from normgauge.stats import LEAST_SEEDS, Interval, interval, joint_confidence, paired_difference, welch_difference
from normgauge.store import Store


@dataclass(frozen=True)
class Changes:
    """What is different between two stores: settings in words, a line per arm, and the sentence that sums them up."""

    settings: tuple[str, ...]
    arms: tuple[str, ...]
    sentence: str

    def __str__(self) -> str:
        settings = ["What changed: " + "; ".join(self.settings) + "."] if self.settings else ["No setting changed."]
        return "\n".join([*settings, *self.arms, self.sentence])


def changes_between(store: Path, before: Path) -> Changes:
    """Compare the comparison in a store with an earlier one, arm by arm at each one's chosen setting.

    A difference is taken seed by seed where both have at least three seeds in common, else between the means (Welch);
    intervals hold for all arms at once with 95 %, and a change is called real where 0 is not in its interval.

    Raises:
        StoreError: when one of the stores holds no answer.
    """
    (new, runs), (old, earlier) = _read(store), _read(before)
    olds = {arm.title: arm for arm in old.arms}
    shared = [arm for arm in new.arms if arm.title in olds]
    both = {name for arm in shared for name in arm.values if name in olds[arm.title].values}
    metrics = [metric for metric in new.metrics if metric.name in both]
    lines, real = [], []
    for arm in shared if metrics else ():
        pair = _scores(runs, arm, metrics[0], new), _scores(earlier, olds[arm.title], metrics[0], old)
        line, is_real = _line(arm.title, *pair, metrics[0], joint_confidence(len(shared)))
        lines.append(line)
        real += [arm.title] if is_real else []
    names = {arm.title for arm in new.arms}
    lines += [f"{name}: new here." for name in names if name not in olds]
    lines += [f"{name}: no longer here." for name in olds if name not in names]
    what = metrics[0].title if metrics else "nothing both have measured"
    told = f"Changed for real, in {what}: {len(real)} of {len(shared)} arms{': ' * bool(real)}{', '.join(real)}."
    return Changes(tuple(_settings(new, old)), tuple(lines), told)


def _read(path: Path) -> tuple[ComparisonDocument, list[Run]]:
    with Store(path, write=False) as store:
        document = store.document(ComparisonDocument)
        if document is None or not document.arms:
            raise StoreError(str(path), "it holds the answer of a comparison", "none", "Run normgauge compare there")
        return document, store.runs(document.runs)


def _scores(runs: list[Run], arm: Arm, metric: Metric, document: ComparisonDocument) -> dict[int, float]:
    """Return seed -> value of the runs behind an arm's mean; a race does not judge the seeds that tuned."""
    wanted = {**arm.knobs, **arm.setting}
    tuned = document.question.tuning_seeds if document.question.held_out else 0
    own = [run for run in runs if run.ok and all(run.spec.get(knob) == value for knob, value in wanted.items())]
    values = {run.spec["seed"]: run.last(metric.name) for run in own if run.spec["seed"] >= tuned}
    return {seed: value for seed, value in values.items() if value is not None}


def _line(
    name: str, new: Mapping[int, float], old: Mapping[int, float], metric: Metric, confidence: float
) -> tuple[str, bool]:
    factor, unit = metric.factor, " points" if metric.unit == "%" else ""
    common = new.keys() & old.keys()
    means = [f"{format_number(interval(side.values()).mean * factor)}" for side in (old, new) if side]
    if len(means) < 2:
        return f"{name}: no run finished in {'the earlier store' if not old else 'this store'}.", False
    moved = f"{name}: {means[0]} -> {means[1]}"
    if new == old:
        return f"{moved}, the same to the last digit.", False
    if len(common) >= LEAST_SEEDS:
        lead, how = paired_difference(new, old, confidence=confidence), f"paired over n = {len(common)} seeds"
    else:
        lead = welch_difference(list(new.values()), list(old.values()), confidence=confidence)
        how = f"Welch, n = {len(new)} and {len(old)} seeds"
    if not lead.has_width or lead.n < LEAST_SEEDS:
        return f"{moved}; {lead.n} seeds, or differences without spread, tell nothing.", False
    shown = lead.times(factor)
    ends = f"{format_number(shown.low, 3)} to {format_number(shown.high, 3)}{unit}, {how}"
    return f"{moved}, by {format_number(shown.mean, 3)}{unit} ({ends}): {_word(lead, metric)}.", lead.excludes_zero


def _word(lead: Interval, metric: Metric) -> str:
    if not lead.excludes_zero:
        return "not told from no change"
    if metric.better is None:
        return "real"
    return "really better" if (lead.mean > 0) == (metric.better == "higher") else "really worse"


def _settings(new: ComparisonDocument, old: ComparisonDocument) -> Iterator[str]:
    """Yield what is set otherwise, versions included."""
    sides = [
        {**doc.question.fixed, "rates": list(doc.question.nuisance.get("lr", ())), "seeds": doc.question.seeds}
        | {f"version of {name}": version for name, version in doc.provenance.versions.items()}
        for doc in (old, new)
    ]
    for knob in dict.fromkeys([*sides[0], *sides[1]]):
        before, after = (side.get(knob) for side in sides)
        if before != after and knob == "code":
            modules = sorted({*(before or {}), *(after or {})})
            changed = [m for m in modules if (before or {}).get(m) != (after or {}).get(m)]
            yield f"the code of {', '.join(changed)}"
        elif before != after:
            sides_shown = " -> ".join("-" if value is None else str(value) for value in (before, after))
            yield f"{knob.replace('_', ' ')} {sides_shown}"
