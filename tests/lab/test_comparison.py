"""The comparison: rates chosen on validation data, intervals that are possible, an answer that follows from them."""

import inspect
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

import normgauge as ng
from normgauge.documents import ComparisonDocument
from normgauge.lab import Comparison, compare_shard
from normgauge.lab.compare import comparison_study, conclude
from normgauge.lab.comparison import METRICS, judge
from normgauge.lab.data import Dataset
from normgauge.lab.sentence import Exam
from normgauge.records import Run
from normgauge.report import page_of_store
from normgauge.stats import interval, leads, paired_difference
from normgauge.store import Store, spec_id

FIXED = {"model": "mlp", "data": "digits", "steps": 5}


@pytest.fixture(autouse=True)
def single_precision(double_precision):
    torch.set_default_dtype(torch.float32)


def test_interval_against_scipy():
    from scipy import stats

    values = [0.3, 0.1, 0.7, 0.4]
    ours = interval(values)
    low, high = stats.t.interval(0.95, 3, loc=ours.mean, scale=stats.sem(values))
    assert (ours.low, ours.high) == pytest.approx((low, high))
    assert math.isnan(interval([1.0]).low) and interval([]).n == 0


def test_pairing_removes_what_seeds_share():
    noisy = {seed: 10.0 * seed for seed in range(4)}
    better = {seed: value + 1.0 + 0.01 * (-1) ** seed for seed, value in noisy.items()}
    assert paired_difference(better, noisy).excludes_zero
    assert leads({"a": better, "b": noisy}, "a", higher=True)["b"].mean == pytest.approx(1.0)


def made(accuracies, failed=()):
    """Runs from arm -> rate -> accuracies by seed; failed names (arm, rate) or (arm, rate, seed)."""
    runs = []
    for norm, rates in accuracies.items():
        for lr, values in rates.items():
            for seed, value in enumerate(values):
                run = Run({"norm": norm, "lr": lr, "seed": seed, **FIXED})
                if {(norm, lr), (norm, lr, seed)} & set(failed):
                    run.status = "diverged"
                for name in ("test_accuracy", "validation_accuracy"):
                    run.record(5, name, value)
                run.record(5, "test_loss", 1 - value)
                runs.append(run)
    return runs


def compared(runs, tuning_seeds, exam=None):
    """The comparison of runs that no store holds."""
    study = comparison_study(model="mlp", norms=["none"], seeds=3, size="smoke")
    found = judge(runs, tuning_seeds=tuning_seeds, exam=exam)
    document = ComparisonDocument(study.describe(), METRICS, found.arms, found.answer, found.decided, (), None, "", "")
    return Comparison(document, Path("runs.sqlite"), {})


def test_the_answer_names_a_winner_when_the_data_can_tell():
    runs = made({"none": {0.1: [0.80, 0.81, 0.82]}, "batch": {0.1: [0.5] * 3, 1.0: [0.90, 0.911, 0.92]}})
    result = compared(runs, 3)
    assert result.decided and result.chosen["batch"] == {"lr": 1.0}
    assert result.answer.startswith(
        "Use batch at learning rate 1 here (mlp, digits, 5 steps): 91.0 % test accuracy, 10.03 points"
    )
    assert "next best, none" in result.answer
    assert [row["norm"] for row in result.rows] == ["batch", "none"]


def test_the_answer_admits_a_tie_and_says_how_many_seeds_would_decide():
    runs = made({"none": {0.1: [0.80, 0.90, 0.85]}, "batch": {0.1: [0.91, 0.82, 0.85]}})
    result = compared(runs, 3)
    assert not result.decided and "The data cannot tell batch from none: " in result.answer
    assert result.answer.startswith("If you must choose, use batch at learning rate 0.1 (mlp, digits, 5 steps): 86.0 %")
    seeds = re.search(r"about ([\d,]+) seeds would tell batch from none\.$", result.answer)
    assert int(seeds[1].replace(",", "")) > 3
    equal = compared(made({"none": {0.1: [0.8, 0.9, 0.7]}, "batch": {0.1: [0.9, 0.8, 0.7]}}), 3)
    assert equal.answer.endswith("no number of seeds up to 10,000 would tell batch from none.")
    single = compared(made({"none": {0.1: [0.8]}, "batch": {0.1: [0.9]}}), 1)
    assert "no interval from n = 1" in single.answer and "at least 3 seeds" in single.answer


def test_the_lead_and_the_seeds_are_about_the_closest_arm_that_cannot_be_told():
    runs = made({"best": {0.1: [0.9, 0.9, 0.91]}, "sure": {0.1: [0.88, 0.881, 0.89]}, "wild": {0.1: [0.95, 0.4, 0.8]}})
    answer = compared(runs, 3).answer
    assert "cannot tell best from wild: " in answer and "best does beat sure." in answer
    assert answer.endswith("seeds would tell best from wild.")


def test_an_arm_far_behind_that_is_not_beaten_gets_its_reason():
    runs = made({"best": {0.1: [0.9, 0.9, 0.91]}, "close": {0.1: [0.9, 0.895, 0.91]}, "wild": {0.1: [0.95, 0.4, 0.8]}})
    answer = compared(runs, 3).answer
    assert "cannot tell best from close or wild: " in answer
    assert "Further behind, but with seeds so far apart that it may be luck: wild (by 18.67)." in answer


def test_the_answer_says_when_nothing_trained():
    result = compared(made({"none": {0.1: [0.1]}}, failed={("none", 0.1)}), 1)
    assert "No normalizer trained" in result.answer and not result.decided
    assert "none" in str(result) and result.chosen == {}
    assert result.rows[0]["lr"] is None and result.rows[0]["test_accuracy"] is None


def test_rates_are_chosen_on_tuning_seeds_and_stability_on_all():
    runs = made({"none": {0.1: [0.7, 0.7, 0.99], 0.3: [0.8, 0.8, 0.1], 1.0: [0.2] * 3}}, failed={("none", 1.0)})
    result = compared(runs, 2)
    assert result.chosen["none"] == {"lr": 0.3}
    assert result.rows[0]["stable_up_to"] == "0.3"


def test_runs_that_did_not_finish_are_never_counted():
    wild = {"none": {0.1: [0.8, 0.81, 0.82]}, "batch": {0.1: [0.99, 0.7, 0.72]}, "layer": {0.1: [1.0] * 3}}
    result = compared(made(wild, failed={("batch", 0.1, 0), ("layer", 0.1)}), 3)
    rows = {row["norm"]: row for row in result.rows}
    assert rows["batch"]["n"] == 2 and rows["batch"]["test_accuracy"] == pytest.approx(0.71)
    assert rows["layer"]["n"] == 0 and rows["layer"]["test_accuracy"] is None
    assert result.rows[0]["norm"] == "none" and result.answer.startswith("If you must choose, use none")
    assert result.answer.endswith("Of 3 runs of batch 1 diverged. Of 3 runs of layer 3 diverged.")
    assert "norm batch: only 2 of 3 tuning runs finished at the chosen lr 0.1." in str(result)


def test_where_no_rate_finished_every_seed_more_finished_seeds_come_first():
    rates = {0.1: [0.6, 0.6, 0.6], 0.3: [0.9, 0.9, 0.9], 1.0: [0.99, 0.99, 0.99]}
    failed = {("none", 0.1, 0), ("none", 0.3, 0), ("none", 0.3, 1), ("none", 1.0, 0), ("none", 1.0, 1)}
    result = compared(made({"none": rates}, failed), 3)
    assert result.chosen["none"] == {"lr": 0.1} and result.rows[0]["n"] == 2


def test_ties_and_the_edge_of_the_grid_are_reported():
    result = compared(made({"none": {0.1: [0.7], 0.3: [0.8], 1.0: [0.8]}, "batch": {0.1: [0.7], 1.0: [0.9]}}), 1)
    assert result.chosen == {"none": {"lr": 0.3}, "batch": {"lr": 1.0}}
    assert "norm none: lr 0.3 ties with lr 1; the first is taken." in str(result)
    assert "norm batch: the chosen lr 1 is at the edge of the grid (lr)." in str(result)


def test_no_recommendation_at_chance():
    runs = made({"none": {0.1: [0.10, 0.11, 0.12]}, "batch": {0.1: [0.14, 0.15, 0.162]}})
    assert compared(runs, 3, Exam(10_000, 0.1)).decided, "the same lead is news where samples are many"
    at_chance = compared(runs, 3, Exam(100, 0.1))
    assert not at_chance.decided
    assert at_chance.answer.startswith(
        "No recommendation on mlp, digits, 5 steps: nothing is above chance. batch leads"
    )
    assert "always giving the most frequent label gets 10.0 % of the 100 test samples" in at_chance.answer
    skewed = compared(made({"none": {0.1: [0.80, 0.81, 0.82]}, "batch": {0.1: [0.9, 0.91, 0.92]}}), 3, Exam(100, 0.9))
    assert "nothing is above chance" in skewed.answer, "guessing the frequent label of unbalanced data is no skill"


def test_the_exam_knows_the_most_frequent_label():
    labels = torch.tensor([0, 1, 1, 1])
    pair = torch.zeros(4, 2), labels
    exam = Exam.of(Dataset("d", "classification", pair, pair, pair, 2))
    assert (exam.samples, exam.majority) == (4, 0.75)
    reals = torch.zeros(4, 2), torch.zeros(4, 1)
    assert math.isnan(Exam.of(Dataset("d", "regression", reals, reals, reals, 1)).majority)


@pytest.mark.parametrize(
    "none, why",
    [
        ([0.801, 0.811], "which 2 seeds cannot decide (3 are the least)"),
        ([0.699, 0.711, 0.72], "less than one of the 200 test samples"),
        ([0.60, 0.61, 0.62], "the same on every seed, so that its interval has no width"),
        ([0.60, 0.95, 0.40], "an interval that contains 0"),
    ],
)
def test_the_sentence_says_why_a_lead_decides_nothing(none, why):
    batch = [0.70, 0.7125, 0.7225] if "sample" in why else [0.9, 0.91, 0.92]
    result = compared(made({"none": {0.1: none}, "batch": {0.1: batch[: len(none)]}}), 3, Exam(200, 0.1))
    assert not result.decided and why in result.answer, result.answer
    assert result.answer.startswith("If you must choose, use batch")


def test_a_lead_of_equal_halves_of_a_percent_is_no_width_even_through_rounding():
    spread = {"none": {0.1: [0.1 + 0.2, 0.4, 0.5]}, "batch": {0.1: [0.8, 0.9, 1.0]}}
    assert "no width" in compared(made(spread), 3, Exam(200, 0.1)).answer


def test_arms_that_are_one_network_are_named_and_do_not_compete():
    arms = {"none": {0.1: [0.80, 0.81, 0.82]}, "batch": {0.1: [0.9, 0.91, 0.925]}, "layer": {0.1: [0.80, 0.81, 0.82]}}
    result = compared(made(arms), 3)
    assert result.decided and "ahead of the next best, layer." in result.answer
    assert "none is the same network as layer: every reading is equal on every seed." in result.answer
    alone = compared(made(dict.fromkeys(("none", "layer"), arms["none"])), 3)
    assert not alone.decided and "there is one network only" in alone.answer
    lucky = made({"none": arms["none"], "layer": arms["none"]})
    lucky[-1].record(5, "weight_norm", 3.0)
    assert "same network" not in compared(lucky, 3).answer, "one reading differs"


def test_a_winner_that_lost_runs_is_no_winner():
    arms = {"none": {0.1: [0.80, 0.81, 0.82, 0.81]}, "batch": {0.1: [0.9, 0.91, 0.925, 0.1]}}
    result = compared(made(arms, failed={("batch", 0.1, 3)}), 3)
    assert not result.decided and result.answer.startswith("If you must choose, use batch")
    assert "Of 4 runs of batch 1 diverged and count for nothing" in result.answer
    loser = compared(made(arms, failed={("none", 0.1, 3), ("batch", 0.1, 3)}), 3)
    assert "Of 4 runs of none 1 diverged." in loser.answer
    sure = compared(made({**arms, "batch": {0.1: [0.9, 0.91, 0.925, 0.93]}}, failed={("none", 0.1, 3)}), 3)
    assert sure.decided and sure.answer.endswith("Of 4 runs of none 1 diverged.")


def test_arms_without_a_seed_in_common_and_arms_alone_decide_nothing():
    arms = {"none": {0.1: [0.9, 0.1, 0.1]}, "batch": {0.1: [0.1, 0.91, 0.95]}}
    apart = compared(made(arms, failed={("none", 0.1, 1), ("none", 0.1, 2), ("batch", 0.1, 0)}), 2)
    assert "no seed finished in both batch and none" in apart.answer and "nan" not in apart.answer
    alone = compared(made({"none": {0.1: [0.9, 0.91, 0.92]}}), 2)
    assert not alone.decided and alone.answer.startswith("Only none was tried on")
    left = made({**arms, "batch": {0.1: [0.9, 0.91, 0.95]}}, failed={("none", 0.1)})
    assert compared(left, 2).decided and "Only batch trained" in compared(left, 2).answer
    few = compared([run for run in left if run.spec["seed"] < 2], 2)
    assert not few.decided and "2 finished runs are few (3 are the least)." in few.answer


def test_one_seed_that_makes_the_interval_wide_is_named():
    steady = [0.98, 0.985, 0.982, 0.984, 0.986, 0.983]
    runs = made({"batch": {0.1: steady}, "weight": {0.1: [0.975, 0.98, 0.978, 0.49, 0.981, 0.977]}})
    answer = compared(runs, 3).answer
    assert "wide because of seed 3 alone (there batch 98.4 % test accuracy and weight 49.0 % test accuracy)" in answer


def test_errors_are_said_where_nothing_trained():
    runs = made({"none": {0.1: [0.1] * 2}}, failed={("none", 0.1)})
    assert "Try smaller rates" in compared(runs, 1).answer
    runs[1].status, runs[1].sentence = "error", "ValueError: no such thing"
    answer = compared(runs, 1).answer
    assert "(1 diverged, 1 error). The first error: ValueError: no such thing" in answer and "smaller" not in answer


def test_a_best_rate_at_the_edge_of_the_own_grid_is_followed_once(tmp_path, monkeypatch):
    """Accuracy rises with the rate, so that every choice is at the upper edge; the user's own grid is left alone."""

    def fake(spec):
        run = Run(dict(spec))
        for name in ("test_accuracy", "validation_accuracy"):
            run.record(5, name, 0.5 + spec["lr"] / 100 + spec["seed"] / 1000 + 0.1 * (spec["norm"] == "batch"))
        return run

    module = sys.modules[conclude.__module__]
    real = module.sweep
    monkeypatch.setattr(module, "sweep", lambda *a, **k: real(*a, **{**k, "task": fake, "executor": 1}))
    settings = {"model": "mlp", "norms": ["none", "batch"], "seeds": 3, "progress": False}
    result = ng.compare(**settings, out=tmp_path / "own")
    assert result.chosen == {"none": {"lr": 10.0}, "batch": {"lr": 10.0}}
    assert sum(result.counts.values()) == 2 * (2 * 6 + 1)
    assert "norm batch: lr 10 was tried too: the best was the edge of the grid." in str(result)
    again = ng.compare(**settings, out=tmp_path / "own", rates=[0.03, 0.1, 0.3, 1.0, 3.0])
    assert again.document.runs == result.document.runs, "the command on the page names the grid, and means the same"
    fixed = ng.compare(**settings, out=tmp_path / "fixed", rates=[0.1, 1.0, 3.0])
    assert fixed.chosen["batch"] == {"lr": 3.0} and "is at the edge of the grid" in str(fixed)
    del settings["progress"]
    study = comparison_study(**settings)
    shards = [compare_shard((0, 1), study, out=tmp_path / "shard", progress=False) for _ in range(3)]
    assert [(shard.round, shard.ran) for shard in shards] == [(1, 20), (2, 4), (3, 2)]


def extreme():
    """Few seeds that differ by much, near the ends of what is possible."""
    runs = made({"none": {0.1: [0.02, 0.3]}, "batch": {0.1: [0.999, 0.7]}})
    for run in runs:
        run.record(5, "train_loss", 1e-3 if run.spec["seed"] else 2.0)
        run.record(5, "shift_cosine", 1.0 if run.spec["seed"] else 0.2)
        run.record(5, "weight_norm", 0.1 if run.spec["seed"] else 20.0)
    return runs


def test_no_interval_is_impossible():
    result = compared(extreme(), 2)
    bounds = {metric.name: metric.bounds for metric in METRICS}
    for arm in result.document.arms:
        for name, value in arm.values.items():
            low, high = bounds[name]
            assert (-math.inf if low is None else low) <= value.low <= value.mean <= value.high
            assert value.high <= (math.inf if high is None else high), name
    assert "no interval from n = 2" in result.answer, "it would be as wide as the scale"
    three = compared(made({"none": {0.1: [0.02, 0.3, 0.1]}, "batch": {0.1: [0.999, 0.7, 0.9]}}), 3)
    lead = re.search(r"95 % interval (-?[\d.]+) to (-?[\d.]+), paired", three.answer)
    assert -100 <= float(lead[1]) <= float(lead[2]) <= 100
    shown = [float(end) for ends in re.findall(r"\((\S+)\.\.(\S+)\)", str(result)) for end in ends]
    assert shown and min(shown) >= 0, "the table shows no quantity that can be negative"


@pytest.fixture
def stored(tmp_path):
    """A store with the runs of a comparison, and its conclusion."""
    study = comparison_study(model="mlp", norms=["none", "batch"], rates=[0.1], seeds=2, steps=3, size="small")
    with Store(tmp_path / "runs.sqlite") as store:
        readings = {(run.spec["norm"], run.spec["seed"]): run.readings for run in extreme()}
        for spec in study.plan():
            store.put(Run(spec, readings=readings[spec["norm"], spec["seed"]]))
        return conclude(study, store, study.plan())


def test_no_interval_on_the_page_is_impossible(stored, tmp_path):
    html = page_of_store(stored.store, tmp_path / "page.html").read_text(encoding="utf-8")
    shown = [tuple(map(float, ends)) for ends in re.findall(r"<small>(\S+) &ndash; (\S+)</small>", html)]
    possible = [
        tuple(math.inf if end is None else metric.factor * end for end in metric.bounds)
        for arm in stored.document.arms
        for metric in METRICS
        if metric.name in arm.values
    ]
    assert len(shown) == len(possible) == 2 * 5
    for (low, high), (lowest, highest) in zip(shown, possible, strict=True):
        assert lowest <= low <= high <= highest
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', html).group(1))
    for row in data["charts"]["intervals"]["spec"]["datasets"]["rows"]:
        assert 0 <= row["low"] <= row["x"] <= row["high"] <= 100


def test_a_store_keeps_the_comparison_as_one_document(stored):
    with Store(stored.store) as store:
        document = store.document(ComparisonDocument)
    assert document.arms == stored.document.arms and document.question == stored.document.question
    assert (document.answer, document.decided) == (stored.answer, stored.decided)
    assert set(document.runs) == {spec_id(run.spec) for run in Store(stored.store).runs()}
    keys = [f"{metric.name}{end}" for metric in METRICS for end in ("", "_low", "_high")]
    for row in stored.rows:
        assert list(row) == ["norm", "lr", "n", "stable_up_to", *keys]
    json.dumps(stored.rows, allow_nan=False)


def test_the_settings_are_in_the_signature():
    parameters = inspect.signature(ng.compare).parameters
    settings = ["model", "data", "norms", "rates", "seeds", "steps", "batch", "size", "ddp", "statistics"]
    settings += ["recipe", "arms", "minutes", "margin", "out", "executor", "progress"]
    assert list(parameters) == settings
    for name in settings:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].annotation not in (inspect.Parameter.empty, "Any")


def test_compare_takes_the_users_own_factory(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def factory(norm):\n"
        "    layers = [nn.Flatten(), nn.Linear(64, 8)]\n"
        "    layers += [nn.BatchNorm1d(8)] if norm == 'batch' else []\n"
        "    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    result = ng.compare(
        model="mine:factory", norms=["none", "batch"], rates=[0.1], seeds=1, steps=3, size="smoke", executor=1, out="o"
    )
    assert result.counts == {"ok": 2}, result
    document = Store(result.store).document(ComparisonDocument)
    assert document.command.startswith(
        "normgauge compare --model mine:factory --data digits --norms none,batch --rates 0.1"
    )
    assert document.question == result.document.question and document.arms and document.answer == result.answer
    assert result.frame().shape[0] == 2
    assert result.chart().to_dict()


def test_a_comparison_is_a_result_with_readings_and_a_meaning():
    runs = made({"none": {0.1: [0.80, 0.81, 0.82]}, "batch": {0.1: [0.90, 0.911, 0.92]}})
    comparison = compared(runs, tuning_seeds=2)
    first, second = comparison.readings()
    assert first.name.endswith("batch") and first.value > second.value and first.uncertainty > 0
    assert comparison.meaning() == comparison.answer and comparison.answer in comparison._repr_html_()
    assert "batch" in repr(comparison)
