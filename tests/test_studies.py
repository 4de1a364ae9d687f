"""Every experiment of the papers runs at smoke size, is judged, and writes its page; none needs data from outside."""

import math
import re
import sqlite3
from pathlib import Path

import pytest

from golden.lab import LAB, STUDIES, study_values
from normgauge.errors import InputError, UnknownNameError
from normgauge.lab import merge
from normgauge.lab.study import Study
from normgauge.papers.court import ledger, shipped_tables
from normgauge.papers.experiment import SIZES, Experiment
from normgauge.papers.reproduce import reproduce, reproduce_shard
from normgauge.papers.studies import execute, experiments, find
from normgauge.papers.table import choose, tabulate
from normgauge.report import Picture, study_markdown, write_study
from normgauge.store import Store

NAMES = list(experiments())
PAGES = Path(__file__).parents[1] / "docs" / "papers" / "studies"


@pytest.mark.parametrize("name", NAMES)
def test_smoke_size_runs_is_judged_and_written(name, tmp_path):
    result = reproduce(name, size="smoke", out=tmp_path, executor=1, progress=False)
    errors = [row["sentence"] for row in result.table.trials if row["status"] == "error"]
    assert not errors, errors[0]
    assert result.table.rows, "no run answers"
    assert result.verdict.outcome in ("confirmed", "not_confirmed", "inconclusive")
    assert all(verdict.status == "judged" for verdict in result.claims.values()), result.claims
    told = LAB.departures(f"study, {name}", study_values(result))
    assert not told, "\n".join(told)
    pictures = [Picture(*entry) for entry in result.pictures()]
    assert pictures, "a page needs a figure"
    page = write_study(result.document(), pictures, tmp_path / "page")
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text and "http-equiv" in text and result.experiment.question.split()[0] in text
    markdown = study_markdown(result.document(), pictures, "figures")
    assert "## Verdict" in markdown and "## What the paper found" in markdown and "## Proxy against paper" in markdown


def test_every_study_has_golden_values():
    assert set(STUDIES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_small_size_promises_seeds_and_intervals(name):
    for part in find(name).parts("small"):
        assert part.seeds >= 3
        assert part.name == name or part.name.startswith(name)


def test_runs_of_several_revisions_are_named(tmp_path, monkeypatch):
    first = reproduce("trajectories", size="smoke", out=tmp_path, executor=1, progress=False)
    assert len(first.origins) == 1 and "revisions of normgauge" not in str(first)
    path = tmp_path / "trajectories-smoke" / "runs.sqlite"
    with Store(path) as store:
        kept = store.runs()
    lost = kept[0]["id"]
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM readings WHERE run = ?", [lost])
        connection.execute("DELETE FROM runs WHERE id = ?", [lost])
    other = {**kept[0]["provenance"], "revision": "0123456789ab"}
    monkeypatch.setattr("normgauge.lab.runs.run.provenance", lambda: other)
    mixed = reproduce("trajectories", size="smoke", out=tmp_path, executor=1, progress=False)
    assert [origin["revision"] for origin in mixed.origins][-1] == "0123456789ab" and len(mixed.origins) == 2
    assert any("made by 2 revisions of normgauge" in line for line in mixed.document()["remarks"])
    assert mixed.document()["provenance"]["revision"] == "0123456789ab"


# What a paper's first run is cut down to here: one step on a few samples, measured once.
CUT = {
    "steps": 1,
    "batch": 4,
    "measures": 1,
    "samples": 64,
    "attacked": 8,
    "attack_steps": 2,
    "passes": 1,
    "measured": 16,
}
CUT |= {"partitions": "1,4", "sparsities": [50], "width": 16, "floor_steps": 2, "points": 5, "rates": [0.01]}


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
def test_paper_size_runs_for_one_step(name):
    for part in find(name).parts("paper"):
        spec = {**part.plan()[0], "study": name}
        spec |= {key: value for key, value in CUT.items() if key in spec and isinstance(spec[key], type(value))}
        if spec.get("data") == "cifar10":
            spec["data"] = "reference.tiny_images:images"
        outcome = execute(spec)
        assert outcome.status in ("ok", "diverged"), f"{part.name}: {outcome.sentence}"
        assert outcome.readings or outcome.status == "diverged"


def test_every_study_a_claim_names_exists():
    named = {claim.study for claim in ledger() if claim.kind == "empirical"}
    assert named <= set(NAMES), f"no such study: {sorted(named - set(NAMES))}"


@pytest.mark.parametrize("name", NAMES)
def test_results_at_small_size_are_committed(name):
    shipped = shipped_tables()
    assert name in shipped, "run `normgauge reproduce` and tools/ship_tables.py"
    assert shipped[name]["size"] == "small" and shipped[name]["rows"]
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    pictures = re.findall(r"\]\((figures/[^)]+\.svg)\)", text)
    assert pictures and all((PAGES / picture).is_file() for picture in pictures)
    assert find(name).question in text


def test_a_second_call_runs_nothing(tmp_path):
    first = reproduce("trajectories", size="smoke", out=tmp_path, executor=1, progress=False)
    again = reproduce("trajectories", size="smoke", out=tmp_path, executor=1, progress=False)
    assert first.seconds == again.seconds and first.table.rows == again.table.rows


def test_shards_join_to_the_same_answer(tmp_path):
    whole = reproduce("trajectories", size="smoke", out=tmp_path / "whole", executor=1, progress=False)
    shards = [
        reproduce_shard("trajectories", (i, 2), size="smoke", out=tmp_path, executor=1, progress=False)
        for i in range(2)
    ]
    joined = merge(shards, tmp_path / "joined" / "trajectories-smoke")
    assert joined.added == len(whole.table.trials) and joined.known == 0
    again = reproduce("trajectories", size="smoke", out=tmp_path / "joined", executor=1, progress=False)
    assert again.verdict.outcome == whole.verdict.outcome
    assert again.table.paired("norm_change", "none", "batch", start="small") == whole.table.paired(
        "norm_change", "none", "batch", start="small"
    )


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="trajectories"):
        reproduce("trajectorys", out=tmp_path)
    with pytest.raises(UnknownNameError, match="smoke"):
        reproduce("trajectories", size="smokey", out=tmp_path)


def test_an_experiment_without_a_size_is_refused():
    study = Study("x", "?", scientific={"norm": ["none"]})
    blank = {"papers": ("S0",), "place": "", "question": "", "finding": "", "proxy": "", "run": print}
    with pytest.raises(InputError, match="paper"):
        Experiment("x", sizes={"smoke": study, "small": study}, contrasts=dict, figures=list, **blank)
    tuned = Study("x", "?", scientific={"norm": ["none"]}, nuisance={"lr": [1.0]})
    with pytest.raises(InputError, match="choose_by"):
        Experiment("x", sizes=dict.fromkeys(SIZES, tuned), contrasts=dict, figures=list, **blank)


def run_of(norm, lr, seed, status="ok"):
    spec = {"norm": norm, "lr": lr, "seed": seed}
    return {"id": f"{norm}{lr}{seed}", "spec": spec, "status": status, "sentence": "", "seconds": 1.0}


def test_choose_takes_the_best_mean_and_counts_failures_as_worst():
    study = Study("s", "?", scientific={"norm": ["a"]}, nuisance={"lr": [1, 2]}, seeds=2)
    runs = [run_of("a", 1, 0), run_of("a", 1, 1), run_of("a", 2, 0), run_of("a", 2, 1, "diverged")]
    values = {"a10": 0.5, "a11": 0.6, "a20": 0.9, "a21": 0.9}
    assert choose(study, runs, values.get, True) == [{"norm": "a", "lr": 1}]
    assert choose(study, runs[:3], values.get, True) == [{"norm": "a", "lr": 2}]
    assert choose(study, runs[:3], values.get, False) == [{"norm": "a", "lr": 1}]


def test_table_keeps_last_values_and_curves():
    runs = [run_of("a", 1, 0), run_of("b", 1, 0)]
    readings = [
        {"run": "a10", "step": s, "name": "loss", "layer": None, "value": v} for s, v in ((0, 2.0), (5, 1.0))
    ] + [{"run": "b10", "step": 5, "name": "loss", "layer": None, "value": 4.0}]
    table = tabulate(runs, readings, {"a10", "b10"})
    assert table.by_seed("loss", norm="a") == {0: 1.0}
    assert table.paired("loss", "b", "a") == [3.0]
    assert [row["value"] for row in table.curve("loss", norm="a")] == [2.0, 1.0]
    assert math.isnan(table.mean("loss", norm="a").low)
    band = table.band("loss", "norm")
    assert {"series": "a", "step": 0, "mean": 2.0, "low": 2.0, "high": 2.0} in band
