"""S0 sec. 9.1: normalizer x optimizer x schedule x decay, the rate tuned in every cell, and the advice of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from normgauge.charts import against, intervals
from normgauge.errors import NonFiniteError
from normgauge.lab import data, models
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.papers.court import Margins, StudyTable, differences, empirical
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Row, Spec
from normgauge.stats import Interval, choose, leads

CITE = ("akbar2025",)
PICKED = (
    "Not in the list the ledger started from. Knobs are tuned by mean validation accuracy; the first version took the "
    "decay best on the test data per seed."
)
NORMS = ("none", "batch", "layer")
OPTIMIZERS = ("sgd", "adam")
DECAYS = (0.0, 1e-4, 1e-3, 1e-2)
SCHEDULES = ("constant", "step", "cosine")
#: A cell's rate is its optimizer's usual rate times the tuned factor.
USUAL = {"sgd": 0.01, "adam": 1e-3}
VALIDATION, TEST = "validation_accuracy", "test_accuracy"
KNOBS = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "decay": DECAYS}
FLOOR = 1e-6  # a decay of zero, on a logarithmic axis


def run(spec: Spec, record: Record) -> None:
    """Train the cell's network and record its accuracies."""
    dataset = data.load(spec["data"])
    seed, steps = int(spec["seed"]), int(spec["steps"])
    network = models.build("mlp", spec["norm"], dataset.shape, dataset.classes, seed)
    result = train(
        network,
        dataset,
        _optimizer(network, spec),
        steps=steps,
        batch=int(spec["batch"]),
        seed=seed,
        schedule=partial(_factor, str(spec["schedule"]), steps),
    )
    record(steps, "train_accuracy", evaluate(network, dataset, "train").accuracy)
    record(steps, "validation_accuracy", evaluate(network, dataset, "validation").accuracy)
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
    record(steps, "weight_norm", math.sqrt(sum(float(p.detach().square().sum()) for p in network.parameters())))
    if result.diverged:
        raise NonFiniteError(f"recipe: training diverged at step {result.diverged_at}")


def _factor(schedule: str, steps: int, step: int) -> float:
    """Return what the rate is multiplied by: 1; 1, 0.1 from half and 0.01 from three quarters on; half a cosine."""
    if schedule == "constant":
        return 1.0
    if schedule == "step":
        return float(0.1 ** ((2 * step >= steps) + (4 * step >= 3 * steps)))
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def _optimizer(network: nn.Module, spec: Spec) -> torch.optim.Optimizer:
    rate, decay = USUAL[spec["optimizer"]] * float(spec["factor"]), float(spec["decay"])
    if spec["optimizer"] == "sgd":
        return torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9, weight_decay=decay, fused=True)
    return torch.optim.Adam(network.parameters(), lr=rate, weight_decay=decay, fused=True)


@empirical(
    "S0-decay",
    place="sec 9.1 (Regularization and BN)",
    printed="typically a smaller weight decay is used with BN networks, because part of generalization is "
    "handled by BN",
    study="recipe",
    criterion="the decay with the best validation accuracy, everything else tuned by the same, is smaller with BN "
    "(log10, floor 1e-6)",
    cite=CITE,
    note=f"{PICKED} The sentence is also about habit; tested is whether the smaller decay suffices. "
    "On scale-invariant weights the decay sets the effective rate, so 'smaller' depends on the learning rate it is "
    "tuned with.",
)
def _smaller_decay(table: StudyTable) -> Margins:
    tuned = _select_best_schedule(table).at_best("optimizer", by=VALIDATION, within=("norm", "decay"))
    logs = {
        norm: {
            seed: math.log10(max(decay, FLOOR))
            for seed, decay in tuned.best_by_seed("decay", by=VALIDATION, norm=norm).items()
        }
        for norm in ("none", "batch")
    }
    return {"log10 of the best decay, none minus batch": differences(logs["none"], logs["batch"])}


@empirical(
    "S0-sgd",
    place="sec 9.1",
    printed="BN + SGD might suffice where without BN one needed Adam",
    study="recipe",
    criterion="everything else tuned: with BN SGD's test accuracy is at most 0.01 below Adam's, and what Adam gains "
    "over SGD is larger without BN",
    cite=CITE,
    note=f"{PICKED} The premise is that without BN one needed Adam: where Adam gains nothing there, nothing is said.",
)
def _plain_sgd(table: StudyTable) -> Margins:
    tuned = _select_best_schedule(table).at_best("decay", by=VALIDATION, within=("norm", "optimizer"))
    gain = {}
    for norm in ("none", "batch"):
        adam, sgd = (tuned.by_seed(TEST, norm=norm, optimizer=name) for name in ("adam", "sgd"))
        gain[norm] = {seed: adam[seed] - sgd[seed] for seed in sorted(adam.keys() & sgd.keys())}
    return {
        "0.01 - Adam's gain with BN": [0.01 - value for value in gain["batch"].values()],
        "Adam's gain, none minus batch": differences(gain["none"], gain["batch"]),
    }


def _select_best_schedule(table: StudyTable) -> StudyTable:
    """Return the runs with the schedule tuned, on validation data: more schedules are not more luck."""
    return table.at_best("schedule", by=VALIDATION, within=("norm", "optimizer", "decay"))


def figures(table: StudyTable) -> list[Figure]:
    """Draw every cell, one picture per normalizer, and how far each optimizer and schedule is behind the best cell."""
    drawn = [
        Figure(
            norm,
            against(
                _cells(table, norm),
                x="decay",
                y="mean",
                low="low",
                high="high",
                x_scale="log",
                y_scale="linear",
                x_title="weight decay (0 drawn at 1e-6; cells side by side)",
                y_title="test accuracy",
            ),
            f"{norm}: test accuracy of every optimizer and schedule against weight decay, the rate tuned in every "
            "cell; 95 % intervals over seeds.",
        )
        for norm in NORMS
    ]
    rows = []
    for norm in NORMS:
        cells = _recipes(table, ("norm", "optimizer", "schedule"), norm=norm)
        arms = {f"{norm}, {cell['optimizer']}, {cell['schedule']}": cell for cell in cells}
        ahead = _leads_of_best(table, arms, norm=norm)
        for name in arms:
            lead = ahead.get(name, Interval(0.0, 0.0, 0.0, 0))
            rows.append({"series": name, "value": -lead.mean, "low": -lead.high, "high": -lead.low})
    caption = (
        "Test accuracy of each optimizer and schedule, its decay and rate tuned, minus that of the normalizer's best "
        "one by validation accuracy (drawn at 0); paired by seed, 95 % intervals for all five at once. Where the bar "
        "reaches 0 no preference can be told."
    )
    chart = intervals(rows, x_title="test accuracy minus the best recipe's", scale="linear", row_height=18)
    return [*drawn, Figure("behind", chart, caption)]


def _cells(table: StudyTable, norm: str) -> list[Row]:
    """Return mean and interval of every cell, with the cells of one decay a little apart."""
    rows: list[Row] = []
    for place, (optimizer, schedule) in enumerate(product(OPTIMIZERS, SCHEDULES)):
        for decay in _values_compared(table, "decay"):
            mean = table.mean(TEST, norm=norm, optimizer=optimizer, schedule=schedule, decay=decay)
            shown = max(decay, FLOOR) * 10 ** (0.08 * (place - 2.5))
            if mean.n:
                ends = {"mean": mean.mean, "low": mean.low, "high": mean.high}
                rows.append({"series": f"{optimizer}, {schedule}", "decay": shown, **ends})
    return rows


def _recipes(table: StudyTable, within: Sequence[str], **knobs: Any) -> list[Row]:
    """Return, for every combination of `within`, the cell of best mean validation accuracy, with its rate's factor."""
    over = [knob for knob in (*KNOBS, "factor") if knob not in within]
    chosen = choose(table.where(**knobs), by=VALIDATION, over=over, within=within)
    return [{**choice.arm, **choice.setting} for choice in chosen]


def _leads_of_best(table: StudyTable, arms: Mapping[str, Row], **knobs: Any) -> dict[str, Interval]:
    """Return how far the test accuracy of the best recipe with these knobs is ahead, by seed, in intervals for all."""
    (best,) = _recipes(table, ("norm",), **knobs)
    first = next(name for name, arm in arms.items() if arm == best)
    return leads({name: table.by_seed(TEST, **arm) for name, arm in arms.items()}, first, higher=True)


def remarks(table: StudyTable) -> list[str]:
    """Say which recipe each normalizer's cells support, and which of their differences can be told from zero."""
    lines = []
    for norm in NORMS:
        lines.append(f"{norm}: {_advice(table, KNOBS, norm=norm)} {_describe_cells_behind(table, norm)}")
        for optimizer in OPTIMIZERS:
            advice = _advice(table, ("schedule", "decay"), norm=norm, optimizer=optimizer)
            lines.append(f"{norm} with {optimizer}: {advice}")
    factors = [row["factor"] for row in table.trials]
    chosen = [row["factor"] for row in table.where(seed=0)]
    at_ends = (
        f"In {chosen.count(max(factors))} of {len(chosen)} cells the largest and in {chosen.count(min(factors))} the "
        f"smallest of {len(set(factors))} tried rates was chosen."
    )
    how = (
        "Read so: a recipe is the cell with the best mean validation accuracy; each value of a knob is taken at its "
        "own best other knobs, and compared on test data, paired by seed, in 95 % intervals that hold for all "
        "alternatives of one comparison at once."
    )
    return [*lines, at_ends, how] if len(set(factors)) > 1 else [*lines, how]


def _advice(table: StudyTable, knobs: Iterable[str], **where: Any) -> str:
    """Return the recipe of the cells with these knobs, and for each other knob whether its value can be preferred."""
    (best,) = _recipes(table, ("norm",), **where)
    mean = table.mean(TEST, **best).mean
    rate = USUAL[best["optimizer"]] * best["factor"]
    words = f"best {best['optimizer']}, {best['schedule']} schedule, decay {best['decay']:g}, rate {rate:g}"
    return f"{words}: test accuracy {mean:.3f}. " + " ".join(_preference(table, knob, best, where) for knob in knobs)


def _preference(table: StudyTable, knob: str, best: Row, where: Mapping[str, Any]) -> str:
    """Say whether the best recipe's value of a knob can be told from the other values, each at its own best."""
    arms = {_format_value(arm[knob]): arm for arm in _recipes(table, ("norm", knob), **where)}
    first = _format_value(best[knob])
    ahead = _leads_of_best(table, arms, **where)
    words = {name: f"{name} (ahead by {lead.mean:+.3f} {_ends(lead)})" for name, lead in ahead.items()}
    told = [words[name] for name, lead in ahead.items() if lead.low > 0]
    worse = [words[name] for name, lead in ahead.items() if lead.high < 0]
    unclear = [words[name] for name, lead in ahead.items() if not lead.excludes_zero]
    parts = [f"{first} is better than {', '.join(told)}"] if told else []
    parts += [f"{first}, chosen on validation data, is worse on test data than {', '.join(worse)}"] if worse else []
    parts += [f"no preference can be told between {first} and {', '.join(unclear)}"] if unclear else []
    return f"{knob.capitalize()}: {'; '.join(parts)}."


def _values_compared(table: StudyTable, knob: str) -> list[Any]:
    """Return the values of a knob that this size compares, in the order of the grid."""
    there = {row[knob] for row in table.rows}
    return [value for value in KNOBS[knob] if value in there]


def _ends(lead: Interval) -> str:
    return f"[{lead.low:+.3f}, {lead.high:+.3f}]" if lead.n > 1 else "on one seed"


def _format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_cells_behind(table: StudyTable, norm: str) -> str:
    """Count the normalizer's cells that can be told to be behind its best one."""
    cells = _recipes(table, ("norm", *KNOBS), norm=norm)
    arms = {", ".join(_format_value(cell[knob]) for knob in KNOBS): cell for cell in cells}
    ahead = _leads_of_best(table, arms, norm=norm)
    behind = {name: lead for name, lead in ahead.items() if lead.low > 0}
    if not behind:
        return f"None of the {len(ahead)} other cells can be told to be behind it."
    names = "; ".join(f"{name} by {lead.mean:.3f}" for name, lead in behind.items())
    return f"{len(behind)} of the {len(ahead)} other cells can be told to be behind it: {names}."


def _study(factors: Sequence[float], decays: Sequence[float], seeds: int, tried: int, **fixed: object) -> Study:
    return Study(
        "recipe",
        "Which optimizer, schedule and decay does each normalizer want?",
        scientific={"norm": NORMS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "decay": list(decays)},
        nuisance={"factor": list(factors)},
        fixed=fixed,
        seeds=seeds,
        tuning_seeds=tried,
    )


register(
    Experiment(
        name="recipe",
        papers=("S0",),
        place="sec. 9.1",
        question="With BN, does SGD suffice where Adam was needed, and is a smaller weight decay enough?",
        finding="BN with SGD might suffice where without BN one needed Adam; typically a smaller weight decay is used "
        "with BN.",
        proxy="The paper gives advice and no experiment. Small size: an MLP with three hidden layers of 64 units on "
        "2000 images of CIFAR-10, 200 steps of batch 64; SGD with momentum 0.9 and Adam, both with decay in the "
        "gradient (l2); the schedule is constant, step (a tenth from half, a hundredth from three quarters of the "
        "steps on) or cosine; the rate (a factor of 1, 3 or 10 on 0.01 for SGD, 0.001 for Adam) is tuned in every cell "
        "of normalizer, optimizer, schedule and decay on validation accuracy of the first seed. For the claims the "
        "schedule, then the decay (asked for the best decay: the optimizer) is tuned too, by mean validation accuracy "
        "over the seeds; the best decay is each seed's by validation accuracy. The test data choose nothing; in the "
        "first version of the claims they chose the decay, and with it the optimizer. Paper size: the same grid on all "
        "of CIFAR-10.",
        sizes={
            "smoke": _study((1.0,), (0.0, 1e-2), 1, 1, data="digits", steps=4, batch=64),
            "small": _study((1.0, 3.0, 10.0), DECAYS, 5, 1, data="cifar10:2000/1000/2000", steps=200, batch=64),
            "paper": _study((1 / 3, 1.0, 3.0, 10.0), DECAYS, 5, 2, data="cifar10", steps=20000, batch=128),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("test_accuracy", "validation_accuracy", "train_accuracy", "weight_norm"),
        choose_by="validation_accuracy",
        data=("cifar10",),
        minutes={"small": 2.7},
        cite=CITE,
    )
)
