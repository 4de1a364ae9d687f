"""The question `compare` puts to runs: its arms, their recipe and rates, checked before the first run."""

import itertools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from normgauge.errors import InputError, unknown_name
from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.imports import name_of
from normgauge.lab.runs.digests import own_digests
from normgauge.lab.runs.recipe import KNOBS, RATES, Recipe, check_recipe, equip
from normgauge.lab.runs.replicas import STATISTICS
from normgauge.lab.runs.run import build_arm, run_climate
from normgauge.lab.sentence import constant_score
from normgauge.lab.study import Study
from normgauge.store import canonical

USUAL_DATA = {"dln": "gaussian", "gpt": "text"}
DEFAULT_NORMS = ("none", "batch", "layer", "group", "instance", "weight")
#: The most seeds of a race.
MOST_RACED = {"smoke": 4, "small": 64}
# What each size fixes: smoke proves that everything works, small gives an answer in under three minutes.
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"seeds": 2, "tuning_seeds": 1, "steps": 12, "measured": 2},
    "small": {"seeds": 8, "tuning_seeds": 2, "steps": 80, "measured": 4},
}


def comparison_study(
    *,
    model: str | Callable[..., Any] = "vgg",
    data: str | Callable[..., Any] | None = None,
    norms: Sequence[str] | None = None,
    rates: Sequence[float] | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    size: str = "small",
    ddp: int = 1,
    statistics: str = "replica",
    recipe: Recipe | None = None,
    arms: Mapping[str, Sequence[Any]] | None = None,
    raced: bool = False,
) -> Study:
    """Return the study `compare` runs, after checking every name and number in it; see there for the arguments.

    Raises:
        InputError: for unknown names, numbers out of range, and a factory that ignores the normalizer.
    """
    if size not in SIZES:
        raise unknown_name("size", size, SIZES)
    if statistics not in STATISTICS:
        raise unknown_name("statistics", statistics, STATISTICS)
    model = name_of(model) if callable(model) else model
    data = name_of(data) if callable(data) else data
    preset = SIZES[size]
    knobs = (recipe or Recipe()).knobs()
    dataset = equip(datasets.load(data or USUAL_DATA.get(model, "digits")), knobs)
    asked = _asked_knobs(model, norms, arms or {})
    factory_knobs = [knob for knob in asked if knob not in KNOBS | {"norm", "batch", "steps"}]
    combinations = [dict(zip(asked, values, strict=True)) for values in itertools.product(*asked.values())]
    for knob in combinations:
        check_recipe({**knobs, **knob})
    count = preset["steps"] if steps is None else steps
    own_rates = [tuple(map(float, rates)) if rates else usual_rates({**knobs, **some}, size) for some in combinations]
    chosen = tuple(dict.fromkeys(rate for some in own_rates for rate in some))
    repeats = (MOST_RACED[size] if raced else preset["seeds"]) if seeds is None else seeds
    _check_numbers(chosen, asked.get("steps", [count]), asked.get("batch", [batch or 2]), repeats if raced else 4)
    samples = len(dataset.train[1])
    whole = batch or (samples if dataset.name == "gaussian" else min(128, samples))
    if ddp > 1 and (whole < ddp or whole % ddp):
        rule = "the batch is a multiple of the number of processes that share it"
        raise InputError("compare", rule, f"batch={whole}, ddp={ddp}", f"Pass --batch {ddp * (whole // ddp or 1)}")
    if ddp > 1 and {"clip", "augment", "train_step"} & {*knobs, *asked}:
        rule = "runs split over processes take plain steps"
        raise InputError("compare", rule, "clip, augment or train_step", "Leave it out, or --ddp")
    measured = sorted({s for n in asked.get("steps", [count]) for s in measuring_steps(n, preset["measured"])})
    fixed: dict[str, Any] = {"model": model, "data": dataset.name, **knobs, "steps": count, "batch": whole}
    fixed |= {"measure_at": measured, "measure_batch": min(64, samples), "target_loss": _target_loss(dataset)}
    fixed |= {"ddp": ddp, "statistics": statistics} if ddp > 1 else {}
    fixed |= {"factory_knobs": factory_knobs} if factory_knobs else {}
    fixed = {knob: value for knob, value in fixed.items() if knob not in asked}
    _build_all([{**fixed, **some} for some in combinations], dataset)  # fail before the first run, by name
    tuning = (max(map(len, own_rates)) + 2).bit_length() - 1 if raced else min(preset["tuning_seeds"], repeats)
    what = " and ".join(asked) if len(asked) > 1 else "normalizer"
    on = f"{model} on {dataset.name}"
    depends = f"How do training, curvature and landscape of {on} depend on {'' if len(asked) > 1 else 'the '}{what}?"
    fixed |= own_digests([{**fixed, **some} for some in combinations], dataset)
    seeding: dict[str, Any] = {"seeds": repeats, "tuning_seeds": tuning, "held_out": raced}
    about: dict[str, Any] = {"title": f"Which {what} for {on}?", "cite": ("santurkar2018", "ioffe2015")}
    return Study("compare", depends, asked, {"lr": list(chosen)}, fixed, **seeding, **about)


def _asked_knobs(model: str, norms: Sequence[str] | None, arms: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return knob -> values that are compared, the normalizers first."""
    existing = models.is_own(model) and not models.takes_norm(model, arms)
    usual: Sequence[str] = (models.AS_BUILT,) if existing and arms else DEFAULT_NORMS
    if existing and not arms:
        usual = (models.AS_BUILT, *(norm for norm in DEFAULT_NORMS if norm != "weight"))
    asked = {"norm": list(dict.fromkeys(usual if norms is None else norms))}
    for knob, values in arms.items():
        if knob in ("lr", "seed", "model", "data", "norm"):
            rule = "arms are knobs of the recipe or of the factory"
            step = {"norm": "Use norms=...", "lr": "It is tuned for each arm: use rates=..."}.get(knob, "Leave it out")
            raise InputError(f"arm {knob!r}", rule, knob, step)
        asked[knob] = [name_of(value) if callable(value) else value for value in values]
    return asked


def usual_rates(knobs: Mapping[str, Any], size: str) -> tuple[float, ...]:
    """Return the rates that are tried where none are given: those of the optimizer; the smoke size takes two."""
    optimizer = str(knobs.get("optimizer", "sgd"))
    if optimizer not in RATES:
        raise InputError(f"optimizer {optimizer!r}", "its rates are given", "none", "Pass --rates 0.001,0.01,0.1")
    return RATES[optimizer] if size == "small" else RATES[optimizer][1::2]


def _check_numbers(rates: Sequence[float], steps: Sequence[int], batches: Sequence[int], raced: int) -> None:
    if not all(0 < rate < math.inf for rate in rates) or min(steps) < 1 or min(batches) < 2 or raced < 4:
        rule = "rates are positive and finite, steps at least 1, the batch at least 2, a race has 4 seeds or more"
        got = f"rates={list(rates)}, steps={list(steps)}, batch={list(batches)}, seeds={raced}"
        raise InputError("compare", rule, got, "Correct the option")


def _target_loss(dataset: datasets.Dataset) -> float | None:
    """Return the training loss that is worth a column: how long it takes to get there."""
    if dataset.is_plain or dataset.name == "gaussian":
        return 1.0 if dataset.task == "regression" else 0.5
    constant = constant_score(replace(dataset, metric=None))  # half of what the same answer to every input gets
    return None if math.isnan(constant) else float(f"{constant / 2:.3g}")


def _build_all(specs: Sequence[dict[str, Any]], dataset: datasets.Dataset) -> None:
    """Build every arm once, and refuse a user's factory that ignores the normalizer it is asked for."""
    networks: dict[str, set[str]] = {}
    for spec in specs:
        with run_climate({**spec, "seed": 0}):
            network = build_arm({**spec, "seed": 0}, dataset)
            try:
                outputs = str(network(dataset.train[0][:8]).sum().item())
            except Exception:  # noqa: BLE001 (its runs will say why)
                outputs = str(spec["norm"])
        others = canonical({knob: spec[knob] for knob in spec.get("factory_knobs", ())})
        networks.setdefault(others, set()).add(f"{network} {outputs}")
    norms = {spec["norm"] for spec in specs}
    if len(norms) > 1 and models.is_own(specs[0]["model"]) and all(len(kinds) == 1 for kinds in networks.values()):
        rule, step = "the factory must build another network for each normalizer", "Use its argument in the network"
        raise InputError(f"model {specs[0]['model']!r}", rule, f"the same one for {', '.join(sorted(norms))}", step)


def measuring_steps(steps: int, count: int) -> list[int]:
    """Return `count` steps at which to measure: the start, the end, and more of them early, when most happens.

    Examples:
        >>> measuring_steps(80, 5)
        [0, 5, 20, 45, 80]
    """
    return sorted({round(steps * (index / (count - 1)) ** 2) for index in range(count)})


def first_round(study: Study) -> list[dict[str, Any]]:
    """Return the specs of the first round: every arm at every rate of its optimizer's grid, or of those given."""
    return [spec for spec in study.plan() if spec["lr"] in arm_rates(study, spec)]


def arm_rates(study: Study, spec: Mapping[str, Any]) -> list[float]:
    """Return the rates of an arm: of the study's those of its optimizer's grid, all where they are a user's own."""
    rates = study.nuisance["lr"]
    if "optimizer" not in study.scientific or ":" in str(spec["optimizer"]):
        return list(rates)
    grid = usual_rates(spec, size_of(study))
    return list(grid) if set(grid) <= set(rates) else list(rates)


def is_own_grid(study: Study, rates: Sequence[float], spec: Mapping[str, Any]) -> bool:
    """Say whether an arm's rates are the optimizer's own, which may be extended; those of a user are as they are."""
    return str(spec["optimizer"]) in RATES and tuple(rates) == usual_rates(spec, size_of(study))


def size_of(study: Study) -> str:
    """Return the size whose presets the study has where no option says otherwise: measured steps and tuning seeds."""
    steps, measured = study.fixed.get("steps"), list(study.fixed["measure_at"])
    for size, preset in SIZES.items() if isinstance(steps, int) else ():
        tuned = study.held_out or min(preset["tuning_seeds"], study.seeds) == study.tried
        if tuned and measuring_steps(int(steps or 0), preset["measured"]) == measured:
            return size
    return "small"  # steps that are arms are measured at those of all


def command_of(study: Study, minutes: float | None = None, margin: float | None = None) -> str:
    """Return the command that runs this comparison again, from any machine that has the model and the data."""
    fixed, asked = study.fixed, study.scientific
    words = {"--model": fixed["model"], "--data": fixed["data"], "--norms": ",".join(asked["norm"])}
    words |= {"--rates": ",".join(f"{rate:g}" for rate in study.nuisance["lr"]), "--seeds": str(study.seeds)}
    words |= {f"--{knob}": str(fixed.get(knob, "")) for knob in ("steps", "batch")} | {"--size": size_of(study)}
    words |= {f"--{knob}": str(fixed.get(knob, "")) for knob in ("ddp", "statistics")}
    words |= {f"--{knob.replace('_', '-')}": str(fixed[knob]) for knob in sorted(KNOBS) if knob in fixed}
    raced = {"--minutes": minutes, "--margin": margin}
    words |= {option: f"{value:g}" for option, value in raced.items() if value is not None}
    if "optimizer" in asked and all(is_own_grid(study, arm_rates(study, s), s) for s in first_round(study)):
        del words["--rates"]
    if words["--optimizer" if "--optimizer" in words else "--model"] == "sgd":
        del words["--optimizer"]
    told = [f"{option} {shlex.quote(value)}" for option, value in words.items() if value and value != "True"]
    told += [option for option, value in words.items() if value == "True"]
    others = [f"{knob}={','.join(map(str, values))}" for knob, values in asked.items() if knob != "norm"]
    return " ".join(["normgauge compare", *told, *(f"--arm {shlex.quote(other)}" for other in others)])
