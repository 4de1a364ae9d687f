"""The protocol every study is held to, and (heavy) what its procedures do when the truth is known.

No choice among cells can hide in a contrast: it is a sum of arms by construction (`test_court.py`). What is left to
hold is that every criterion declares its smallest effect, its control and arms that are run; that no seed both tunes
and judges;
that tuning never reads test data; and that the words come out right as often as they should.
"""

import functools
import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest

from normgauge.lab.study import Study
from normgauge.papers.court import StudyTable, criteria, poll, shipped
from normgauge.papers.court.contrast import Contrast, NotRun, Pick
from normgauge.papers.reproduce import _answering_specs
from normgauge.papers.studies import experiments, find
from normgauge.records import format_number
from normgauge.stats import CONFIDENCE, POWER, choose, student_quantile

NAMES = list(experiments())
CLAIMS = [claim for name in NAMES for claim in criteria(name)]
IDS = [claim.id for claim in CLAIMS]


@pytest.mark.parametrize("claim", CLAIMS, ids=IDS)
def test_a_criterion_declares_effects_and_a_control(claim):
    assert claim.contrasts and claim.printed and len(claim.control.split()) >= 3
    for contrast in (*claim.contrasts, *claim.premise):
        assert math.isfinite(contrast.least), contrast.title
        assert contrast.more is not None or contrast.less is not None, contrast.title
        bounded = contrast.more is not None or contrast.log or contrast.least < 0
        assert bounded, "a bound from above is a positive number"
        assert len(contrast.rule) < 400, contrast.rule
    arms = {str(arm) for c in claim.contrasts for arm in (c.more, c.less) if arm is not None}
    assert len(arms) > 1 or "none is needed" in claim.control or claim.premise, "what stands against the mechanism?"


@pytest.mark.parametrize("claim", CLAIMS, ids=IDS)
def test_every_arm_of_a_criterion_is_run_at_small_size(claim):
    """A knob a contrast names exists in the plan, with the value it names."""
    knobs = {}
    for part in find(claim.study).parts("small"):
        for name, values in {**part.scientific, **part.nuisance, **{k: [v] for k, v in part.fixed.items()}}.items():
            knobs.setdefault(name, set()).update(map(str, values))
    for contrast in (*claim.contrasts, *claim.premise):
        arms = [contrast.at, contrast.more, contrast.less, *(contrast.control or ())]
        for knob, value in ((k, v) for arm in arms if arm for k, v in arm.items() if k != "reading"):
            assert knob in knobs, f"{contrast.title}: no knob {knob}"
            wanted = value if isinstance(value, tuple) else () if isinstance(value, Pick) else (value,)
            assert {str(item) for item in wanted} <= knobs[knob], f"{contrast.title}: {knob} {value}"


@pytest.mark.parametrize("name", NAMES)
def test_no_seed_tunes_and_judges_and_no_test_data_choose(name):
    experiment = find(name)
    for size in experiment.sizes:
        for part in experiment.parts(size):
            settings = math.prod(len(list(values)) for values in part.nuisance.values())
            if settings > 1:
                tuning = {spec["seed"] for spec in part.plan()}
                judged = {spec["seed"] for spec in _answering_specs(part, [{}])}
                assert not tuning & judged and len(judged) == part.seeds
                assert "test" not in experiment.choose_by
    table = shipped()[name].table
    for part in experiment.parts("small"):
        if part.held_out:
            knobs = {k: tuple(v) for k, v in part.scientific.items()}
            knobs |= {k: v for k, v in part.fixed.items() if k == "part"}
            seeds = {row["seed"] for row in table.where(**knobs)}
            assert not seeds & set(range(part.tried)), "a shipped verdict rests on seeds that tuned"


def test_a_study_numbers_judged_seeds_after_tuning_seeds():
    study = Study("s", "?", {"norm": ["a"]}, {"lr": [1, 2]}, seeds=4, tuning_seeds=2, held_out=True)
    assert list(study.judged) == [2, 3, 4, 5] and {spec["seed"] for spec in study.plan()} == {0, 1}
    again = study.confirmation([{"norm": "a", "lr": 2}])
    assert [spec["seed"] for spec in again] == [2, 3, 4, 5] and study.runs == len(study.plan()) + len(again)


@pytest.mark.parametrize("claim", CLAIMS, ids=IDS)
def test_failed_runs_change_nothing(claim):
    table = shipped()[claim.study].table
    broken = [{**row, "status": "diverged", **dict.fromkeys(_readings(claim), 1e9)} for row in table.rows[:3]]
    assert claim.judge_table(replace(table, trials=tuple(broken))) == claim.judge_table(table)


PARTS = ("Verdict", "What the paper found", "Numbers", "Figures", "Protocol", "Sensitivity", "Two sizes", "Arms")
PARTS += ("Proxy against paper", "What would change our mind", "How it was run", "Raw runs")
PAGES = Path(__file__).parents[3] / "docs" / "_generated" / "studies"


@pytest.mark.parametrize("name", NAMES)
def test_every_verdict_carries_its_controls_smallest_effect_and_power(name):
    document, text = shipped()[name].document, (PAGES / f"{name}.md").read_text(encoding="utf-8")
    finite = [m for item in document.criteria for m in item.margins if math.isfinite(m.half_width)]
    for part in PARTS:
        absent = not finite if part == "Numbers" else part == "Two sizes" and not document.other_sizes
        assert f"\n## {part}\n" in text or absent, part
    assert not finite or f"figures/{name}-decides.svg" in text
    for claim, item in zip(criteria(name), document.criteria, strict=True):
        assert claim.id == item.id and f"{item.id}, control: {claim.control}" in text
        assert f"**{item.outcome.replace('_', ' ').upper()}** {item.id}: " in text
        assert item.margins or item.outcome == "not_run", "a verdict without a number"
        for margin in item.margins:
            title = re.sub(r"([|$_*])", r"\\\1", margin.name)
            cells = next(line for line in text.splitlines() if line.startswith(f"| {item.id} | {title} | ")).split(
                " | "
            )
            half, least, seeds, _, power = cells[-5:]
            assert least == format_number(margin.least) and int(seeds) == margin.seeds
            if math.isfinite(margin.half_width):
                assert float(half) > 0 and float(power.rstrip(" |")) >= margin.least - 1e-3 * abs(margin.least)
            else:  # no interval, no power: then nothing is confirmed by it
                assert item.outcome != "reproduced" and power.startswith("-")


def _readings(claim):
    return {name for contrast in claim.contrasts for name in contrast.readings if name}


# What the procedures do where the truth is known: effects drawn around it with the spread seen in the shipped runs

DRAWS = 1000


def spreads(claim):
    """Return, per contrast, seeds and spread of the shipped runs; the declared seeds where nothing was run yet."""
    seeds = max(part.seeds for part in find(claim.study).parts("small"))
    try:
        margins = claim.margins(shipped()[claim.study].table)
    except NotRun:
        return {contrast.title: (seeds, 1.0) for contrast in claim.contrasts}
    told = {name: (len(v), stdev(v)) for name, v in margins.items() if len(v) > 2 and stdev(v) > 0}
    return told or {contrast.title: (max(3, seeds), 1.0) for contrast in claim.contrasts}


@pytest.fixture
def quick(monkeypatch):
    """Leave out how many seeds would tell, which is most of the time of a verdict and no part of the word."""
    judge = sys.modules[poll.__module__]  # the package has a function of that name
    monkeypatch.setattr(judge, "seeds_to_decide", lambda *values, **more: 1)
    monkeypatch.setattr("normgauge.stats.student_quantile", functools.cache(student_quantile))


def rate(spread, outcome, truths, share=0.5):
    """Return how often the outcome falls; contrasts share part of their noise, as arms of one seed do."""
    drawn, hits = random.Random(7), 0
    for _ in range(DRAWS):
        common = [drawn.gauss(0, 1) for _ in range(max(n for n, _ in spread.values()))]
        margins = {
            name: [truths[name] + s * (share**0.5 * c + (1 - share) ** 0.5 * drawn.gauss(0, 1)) for c in common[:n]]
            for name, (n, s) in spread.items()
        }
        hits += poll(margins).outcome == outcome
    return hits / DRAWS


SLACK = 3 * math.sqrt(0.05 * 0.95 / DRAWS)  # three standard errors of the simulation


@pytest.mark.parametrize("claim", CLAIMS, ids=IDS)
def test_the_criteria_tell_hope_from_fear(claim, quick):
    """All parts far beyond their smallest effect, one far below it, and too few seeds to say either."""
    hoped = {name: [20 * s + s * (k % 2) for k in range(max(n, 3))] for name, (n, s) in spreads(claim).items()}
    feared = {**hoped, next(iter(hoped)): [-value for value in next(iter(hoped.values()))]}
    few = {name: values[:2] for name, values in hoped.items()}
    assert [poll(m).outcome for m in (hoped, feared, few)] == ["reproduced", "contradicted", "too_small_to_tell"]


@pytest.mark.heavy
@pytest.mark.parametrize("claim", CLAIMS, ids=IDS)
def test_with_the_null_true_a_procedure_is_wrong_at_most_5_percent(claim, quick):
    """One part has only the smallest effect, the others plenty: confirmed in error. All have it: contradicted so."""
    spread = spreads(claim)
    weakest = next(iter(spread))
    plenty = {name: 0.0 if name == weakest else 20 * s for name, (_, s) in spread.items()}
    assert rate(spread, "reproduced", plenty) <= 0.05 + SLACK
    assert rate(spread, "contradicted", dict.fromkeys(spread, 0.0)) <= 0.05 + SLACK


@pytest.mark.heavy
@pytest.mark.parametrize("claim", CLAIMS, ids=IDS)
def test_with_the_stated_effect_true_a_part_is_confirmed_with_the_stated_power(claim, quick):
    """The page states the effect that so many seeds confirm with power 0.8: least + half width (1 + t.8 / t.975)."""
    for name, (n, s) in spreads(claim).items():
        quantiles = student_quantile(CONFIDENCE, n), student_quantile(2 * POWER - 1, n)
        effect = s / math.sqrt(n) * sum(quantiles)
        assert rate({name: (n, s)}, "reproduced", {name: effect}) >= POWER - (0.12 if n < 5 else 0.06), (name, n)
    far = {name: 20 * s for name, (_, s) in spreads(claim).items()}
    assert rate(spreads(claim), "reproduced", far) >= 0.95


@pytest.mark.heavy
def test_tuning_on_other_seeds_leaves_equal_arms_equal(quick):
    """The whole way from tuning to the word, with settings that differ by luck alone."""
    drawn, wrong, rounds = random.Random(3), 0, 1500
    study = Study("s", "?", {"norm": ["a", "b"]}, {"lr": [1, 2, 3, 4]}, seeds=6, tuning_seeds=2, held_out=True)
    for _ in range(rounds):
        score = {}

        def measure(spec, score=score):
            return score.setdefault(tuple(sorted(spec.items())), drawn.gauss(0, 1))

        tuned = [{**spec, "fit": measure(spec)} for spec in study.plan()]
        chosen = [{**c.arm, **c.setting} for c in choose(tuned, by="fit", over=["lr"], within=["norm"])]
        rows = [{**spec, "fit": measure(spec)} for spec in _answering_specs(study, chosen)]
        effects = Contrast("fit", {"norm": "a"}, {"norm": "b"}).effects(StudyTable(tuple(rows)))
        wrong += poll({"a minus b": effects}).outcome != "too_small_to_tell"
    assert wrong / rounds <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / rounds)


def test_the_words_of_the_rule_say_what_counts():
    for claim in CLAIMS:
        assert re.search(r"is (above|below) -?[\d.e+-]+", claim.criterion), claim.id
    assert fmean(len(claim.criterion) for claim in CLAIMS) < 400
