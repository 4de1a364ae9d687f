"""Every experiment of the papers runs at smoke size, is judged, and writes its page; none needs data from outside."""

import re
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from golden.lab import LAB, STUDIES, study_values
from normgauge.documents import SIZES
from normgauge.errors import InputError, UnknownNameError
from normgauge.lab import merge
from normgauge.lab.study import Study
from normgauge.papers import shelf
from normgauge.papers.court import EACH, Contrast, StudyTable, criteria, ledger, shipped
from normgauge.papers.court.table import tabulate
from normgauge.papers.experiment import Experiment
from normgauge.papers.figures import Figure
from normgauge.papers.reproduce import criterion_document, reproduce, reproduce_shard
from normgauge.papers.studies import execute, experiments, find
from normgauge.records import Run, plain
from normgauge.report import Picture, study_markdown, write_study
from normgauge.report._study import verdict_sentence
from normgauge.store import Store, spec_id

NAMES = list(experiments())
PAGES = Path(__file__).parents[2] / "docs" / "_generated" / "studies"


@pytest.mark.parametrize("name", NAMES)
def test_smoke_size_runs_is_judged_and_written(name, tmp_path):
    result = reproduce(name, size="smoke", out=tmp_path, executor=1, progress=False)
    errors = [row["sentence"] for row in result.table.trials if row["status"] == "error"]
    assert not errors, errors[0]
    assert result.table.rows, "no run answers"
    assert result.verdicts and set(result.verdicts) == {claim.id for claim in criteria(name)}
    assert all(verdict.status == "judged" for verdict in result.verdicts.values()), result.verdicts
    told = LAB.departures(f"study, {name}", study_values(result))
    assert not told, "\n".join(told)
    pictures = [Picture(*entry) for entry in result.pictures()]
    assert pictures, "a page needs a figure"
    page = write_study(result.about, result.document(), pictures, tmp_path / "page")
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text and "http-equiv" in text and result.experiment.question.split()[0] in text
    markdown = study_markdown(result.about, result.document(), pictures, "figures")
    for part in ("Verdict", "What the paper found", "Protocol", "Proxy against paper", "What would change our mind"):
        assert f"\n## {part}\n" in markdown


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
    lost = spec_id(kept[0].spec)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM readings WHERE run = ?", [lost])
        connection.execute("DELETE FROM runs WHERE id = ?", [lost])
    other = replace(kept[0].provenance, revision="0123456789ab")
    monkeypatch.setattr("normgauge.lab.runs.run.provenance", lambda: other)
    mixed = reproduce("trajectories", size="smoke", out=tmp_path, executor=1, progress=False)
    assert [origin.revision for origin in mixed.origins][-1] == "0123456789ab" and len(mixed.origins) == 2
    assert any("made by 2 revisions of normgauge" in line for line in mixed.document().remarks)
    assert mixed.document().provenance.revision == "0123456789ab"


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
    named = {claim.study for claim in ledger() if claim.kind == "empirical" and claim.study}
    assert named <= set(NAMES), f"no such study: {sorted(named - set(NAMES))}"


@pytest.mark.parametrize("name", NAMES)
def test_results_at_small_size_are_committed(name):
    assert name in shipped(), "run `normgauge reproduce` and tools/ship_tables.py"
    document = shipped()[name].document
    assert document.size in ("small", "medium") and document.rows
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
    assert again.verdicts == whole.verdicts
    change = Contrast("norm_change", {"norm": "none"}, at={"start": "small", "lr": 0.1})
    assert change.effects(again.table) == change.effects(whole.table) != []


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="trajectories"):
        reproduce("trajectorys", out=tmp_path)
    with pytest.raises(UnknownNameError, match="smoke"):
        reproduce("trajectories", size="smokey", out=tmp_path)


def test_an_experiment_without_a_size_is_refused():
    study = Study("x", "?", scientific={"norm": ["none"]})
    blank = {"papers": ("S0",), "place": "", "question": "", "finding": "", "proxy": "", "run": print}
    with pytest.raises(InputError, match="paper"):
        Experiment("x", sizes={"smoke": study, "small": study}, figures=(), **blank)
    tuned = Study("x", "?", scientific={"norm": ["none"]}, nuisance={"lr": [1.0]})
    with pytest.raises(InputError, match="choose_by"):
        Experiment("x", sizes=dict.fromkeys(SIZES, tuned), figures=(), **blank)


def run_of(norm, lr, seed, status="ok", **curves):
    run = Run({"norm": norm, "lr": lr, "seed": seed}, status)
    for name, values in curves.items():
        for step, value in enumerate(values):
            run.record(step, name, value)
    return run


def test_table_keeps_last_values_and_curves_of_finished_runs():
    runs = [
        run_of("a", 1, 0, loss=(2.0, 1.0)),
        run_of("b", 1, 0, loss=(4.0,)),
        run_of("c", 1, 0, "diverged", loss=(9.0,)),
    ]
    table = tabulate(runs, {spec_id(run.spec) for run in runs})
    assert [(row["seed"], row["loss"]) for row in table.where(norm="a")] == [(0, 1.0)]
    assert [row["value"] for row in table.curve("loss", norm="a")] == [2.0, 1.0]
    assert table.where(norm="c") == [], "a run that diverged is no measurement"
    assert [row["status"] for row in table.trials] == ["ok", "ok", "diverged"]


def _rounded(tree):
    """Numbers to ten digits: quantiles of another scipy differ in the last ones."""
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_rounded(value) for value in tree]
    return float(f"{tree:.9e}") if isinstance(tree, float) else tree


@pytest.mark.parametrize("name", NAMES)
def test_one_court(name):
    """The shipped table, the ledger, the list and the page of a study say what its criteria say of its rows."""
    source, text = shipped()[name], (PAGES / f"{name}.md").read_text(encoding="utf-8")
    judged = [criterion_document(claim, source.table) for claim in criteria(name)]
    stored, anew = (_rounded(plain(part)) for part in (source.document.criteria, judged))
    assert judged and stored == anew, "run python tools/ship_tables.py --rejudge"
    listed = {claim.id: claim.result.word for claim in ledger() if claim.study == name}
    assert listed == {item.id: item.outcome for item in judged if item.id in listed}
    for item in judged:
        assert verdict_sentence(item) in text, "run make generated"


def test_every_study_is_told_in_words_and_every_criterion_registered():
    assert list(shelf.study_words()) == NAMES and set(shelf.studies()) == set(NAMES)
    for name, told in shelf.study_words().items():
        assert set(told["criteria"]) == {claim.id for claim in criteria(name)}, name
        assert set(told["papers"]) <= set(shelf.PAPERS) and set(told["minutes"]) <= set(SIZES)


def test_reproducing_one_study_imports_no_other():
    code = (
        "import sys; from normgauge.papers.studies import find; find('valley');"
        "print([name for name in sys.modules if '.studies.' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['normgauge.papers.akbar2025.studies.valley']"


def test_the_list_imports_neither_studies_nor_torch():
    code = "import sys; from normgauge.papers import shelf; shelf.study_words(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["robustness", "gamma-sigma", "batch-size-width", "inference-statistics", "dropout"])
def test_a_network_that_diverged_is_no_measurement(name):
    run = execute({**find(name).parts("smoke")[0].plan()[0], "lr": 1e20, "study": name})
    assert not run.ok and "train_loss" not in run.row() and "test_accuracy" not in run.row()


def test_a_remark_on_several_arms_is_said_once():
    from normgauge.report._study import gather_remarks

    edge = "the chosen lr 1 is at the edge of the grid (lr)."
    assert gather_remarks([f"width 8: {edge}", "One.", f"width 16: {edge}"]) == [f"width 8; width 16: {edge}", "One."]


def test_a_name_has_one_colour_in_all_pictures_of_a_figure():
    runs = [{"norm": norm, "lr": lr, "loss": lr, "seed": 0} for lr, norm in ((0.1, "none"), (0.1, "batch"))]
    runs += [{"norm": norm, "lr": 0.3, "loss": 0.3, "seed": 0} for norm in ("batch", "none")]
    figure = Figure("loss", x="seed", where={"lr": EACH})
    domains = [
        chart.to_dict()["layer"][0]["encoding"]["color"]["scale"]["domain"]
        for _, chart, _ in figure.draw(StudyTable(tuple(runs)))
    ]
    assert domains == [["none", "batch"]] * 2
