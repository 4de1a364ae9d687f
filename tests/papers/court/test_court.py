"""The court of experiments: which runs decide, what a table answers, and that every verdict says what it rests on."""

import json
import math
import re
import sqlite3
import statistics
from dataclasses import replace

import pytest

from normgauge.documents import StudyDocument
from normgauge.errors import DataError
from normgauge.papers.court import EACH, LARGEST, Claim, Contrast, StudyTable, each_but, ledger, poll, registry, sources
from normgauge.papers.court.sources import Source, choose_source, own_runs
from normgauge.papers.court.table import tabulate
from normgauge.records import Provenance, Run
from normgauge.store import STORE_NAME, Store, spec_id

GAIN = "gain of BN"


def document(size, gains, study="race", **more):
    """Return a study of two arms in which BN is ahead by these gains, one per seed."""
    rows = [
        {"norm": norm, "seed": seed, "status": "ok", "accuracy": 0.5 + gain * (norm == "batch")}
        for seed, gain in enumerate(gains)
        for norm in ("none", "batch")
    ]
    fields = {
        "study": study,
        "size": size,
        "rows": tuple(rows),
        "criteria": (),
        "remarks": (),
        "failed": (),
        "runs": len(rows),
        "seconds": 1.0,
        "seeds": len(gains),
        "fixed": ({},),
        "provenance": Provenance(versions={"normgauge": "0.1.0"}, revision=f"code-{size}"),
        "finished": "2025-01-02T03:04:05",
    }
    return StudyDocument(**{**fields, **more})


FOR, AGAINST = (0.10, 0.11, 0.12), (-0.10, -0.11, -0.12)


WIN = Contrast("accuracy", {"norm": "batch"}, {"norm": "none"}, least=0.01)
RACE = Claim("S1-race", "p", "BN wins", "empirical", study="race", contrasts=(WIN,), control="without BN")


@pytest.fixture
def given(monkeypatch):
    """Let a race of small size, in which BN wins, be what ships with the package."""
    source = Source(document("small", FOR))
    monkeypatch.setattr(sources, "shipped", lambda: {"race": source})
    return source


def put(folder, conclusion):
    """Leave a store as `normgauge reproduce` does; without a document it was interrupted."""
    with Store(folder / STORE_NAME) as store:
        store.put(Run({"norm": "none", "seed": 0}))
        if conclusion is not None:
            store.put_document(conclusion)
    return folder / STORE_NAME


# Which runs decide


def test_own_runs_of_which_none_finished_supersede_nothing(given):
    broken = Source(document("paper", FOR, rows=({"norm": "batch", "seed": 0, "status": "error"},)), "mine")
    chosen, others = choose_source("race", [broken])
    assert chosen is given and others == [(broken, "none of these runs finished")]
    assert choose_source("other", [broken]) == (None, [(broken, "none of these runs finished")])


@pytest.mark.parametrize(
    ("size", "supersedes"), [("smoke", False), ("small", True), ("paper", True)], ids=["below", "equal", "larger"]
)
def test_own_runs_supersede_at_equal_or_larger_size_and_both_are_shown(given, tmp_path, size, supersedes):
    put(tmp_path / f"race-{size}", document(size, AGAINST))
    readable, trouble = own_runs(tmp_path)
    assert not trouble
    verdict = replace(RACE, runs=tuple(readable["race"])).result
    (beside,) = verdict.beside
    assert verdict.outcome == ("contradicted" if supersedes else "reproduced")
    assert beside.outcome == ("reproduced" if supersedes else "contradicted")
    mine, theirs = (verdict, beside) if supersedes else (beside, verdict)
    assert f"your runs in {tmp_path / f'race-{size}'}: size {size}, 6 runs, 3 seeds, code-{size}" in mine.rests_on
    assert "runs shipped with normgauge: size small, 6 runs, 3 seeds, code-small, 2025-01-02" in theirs.rests_on
    why = f"superseded by your runs of size {size}" if supersedes else "does not supersede the runs shipped"
    assert why in beside.rests_on and why not in verdict.rests_on


def test_of_several_own_runs_the_largest_counts_and_all_others_say_why_not(given, tmp_path):
    for size in ("smoke", "paper", "small"):
        put(tmp_path / f"race-{size}", document(size, FOR))
    chosen, others = choose_source("race", own_runs(tmp_path)[0]["race"])
    assert chosen.document.size == "paper" and chosen.place
    assert [(source.document.size, bool(source.place)) for source, _ in others] == [
        ("small", True),
        ("smoke", True),
        ("small", False),
    ]
    assert {why for _, why in others} == {"superseded by your runs of size paper"}


def test_without_own_runs_those_shipped_decide_alone(given):
    assert choose_source("race", []) == (given, [])
    assert RACE.result.rests_on == str(given) and RACE.result.beside == ()


def test_a_study_nobody_ships_is_judged_from_own_runs_or_not_run(given):
    claim = replace(RACE, study="walk")
    assert claim.result.word == "not_run" and "normgauge reproduce walk" in claim.result.sentence
    assert "accuracy: norm batch minus norm none is above 0.01" in claim.result.sentence
    own_runs = Source(document("smoke", FOR, study="walk"), "here")
    judged = replace(claim, runs=(own_runs,)).result
    assert (judged.outcome, judged.rests_on, judged.beside) == ("reproduced", str(own_runs), ())


def test_the_ledger_shows_both_and_what_could_not_be_read(given, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_open_files", lambda: None)
    monkeypatch.setattr(registry, "_CLAIMS", {RACE.id: RACE})
    put(tmp_path / "race-paper", document("paper", AGAINST))
    put(tmp_path / "walk-small", None)
    book = ledger(ids=[RACE.id], runs=tmp_path)
    text = book.explain(RACE.id)
    assert re.search(r"^rests on: +your runs in .*size paper", text, re.MULTILINE)
    assert re.search(r"^beside it: +reproduced: .*shipped with normgauge.*superseded", text, re.MULTILINE)
    (entry,) = json.loads(book.json())
    assert "size paper" in entry["rests_on"] and entry["beside"][0]["outcome"] == "reproduced"
    assert len(book.trouble) == 1 and "walk-small" in book.trouble[0]


# Stores that cannot be read


def newer(path):
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")


def other_version(path):
    body = json.dumps({"version": 99})
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE documents SET body = ?", [body])


def no_json(path):
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE documents SET body = 'half a docu'")


def other_rows(path):
    with sqlite3.connect(path) as connection:
        (body,) = connection.execute("SELECT body FROM documents").fetchone()
        connection.execute("UPDATE documents SET body = ?", [json.dumps({**json.loads(body), "rows": [[1, 2]]})])


def other_size(path):
    with sqlite3.connect(path) as connection:
        connection.execute('UPDATE documents SET body = replace(body, \'"size": "small"\', \'"size": "huge"\')')


def truncated(path):
    path.write_bytes(path.read_bytes()[:-4096])


def scribbled(path):
    """Leave the first page, which says what kind of file it is, and spoil the others."""
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * (path.stat().st_size - 4096))


def text(path):
    path.write_text("these are my runs")


def folder(path):
    path.unlink()
    path.mkdir()


def unfinished(path):
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM documents")


SPOILS = [newer, other_version, no_json, other_rows, other_size, truncated, scribbled, text, folder, unfinished]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_store_that_cannot_be_read_is_named_in_a_sentence_and_the_others_count(given, tmp_path, spoil):
    put(tmp_path / "race-paper", document("paper", AGAINST))
    spoil(put(tmp_path / "race-small", document("small", AGAINST)))
    readable, trouble = own_runs(tmp_path)
    assert [source.document.size for source in readable["race"]] == ["paper"]
    (sentence,) = trouble
    assert str(tmp_path / "race-small") in sentence and sentence.endswith(".") and "Traceback" not in sentence


def test_an_interrupted_study_says_how_to_go_on(tmp_path):
    put(tmp_path / "race-small", None)
    assert own_runs(tmp_path) == (
        {},
        [f"{tmp_path / 'race-small'}: not finished; the same `normgauge reproduce` command goes on with it."],
    )


def test_a_folder_without_stores_has_nothing_to_say(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("no runs here")
    assert own_runs(tmp_path) == ({}, [])


# From a table to a word


@pytest.mark.parametrize(
    ("least", "outcome", "told"),
    [
        (0.5, "reproduced", "beyond"),
        (0.7, "premise_absent", "did not come about"),
        (0.6105, "too_small_to_tell", "cannot be told"),
    ],
)
def test_a_premise_holds_or_is_absent_or_cannot_be_told(given, least, outcome, told):
    verdict = replace(RACE, premise=(Contrast("accuracy", {"norm": "batch"}, least=least),)).result
    assert (verdict.verdict, verdict.outcome, verdict.status) == ("empirical", outcome, "judged")
    assert told in verdict.sentence and verdict.rests_on == str(given)


def test_a_premise_about_a_setting_has_no_spread():
    rows = [
        {"norm": n, "seed": s, "accuracy": s + (n == "batch"), "lr": 2} for n in ("none", "batch") for s in range(4)
    ]
    rows = [{**row, "accuracy": row["accuracy"] + 0.01 * row["seed"] * (row["norm"] == "batch")} for row in rows]
    for least, outcome in ((1, "reproduced"), (3, "premise_absent")):
        claim = replace(RACE, premise=(Contrast("lr", {"norm": "batch"}, least=least),))
        assert claim.judge_table(StudyTable(tuple(rows))).outcome == outcome


def test_a_table_of_an_older_design_is_not_run_and_an_arm_that_failed_is_too_small(given):
    speed = replace(RACE, contrasts=(replace(WIN, reading="speed"),)).result
    assert (speed.outcome, speed.status) == ("not_run", "not_run") and "no run recorded speed" in speed.sentence
    layer = replace(RACE, contrasts=(replace(WIN, more={"norm": "layer"}),))
    assert "no run of norm layer" in layer.result.sentence and layer.result.outcome == "not_run"
    failed = replace(given.table, failed=("norm layer, lr 0.1, seed 0",))
    assert layer.judge_table(failed).outcome == "too_small_to_tell"


def test_a_table_that_cannot_be_read_is_an_error_in_a_sentence(given):
    verdict = replace(RACE, contrasts=(replace(WIN, of=lambda row: row["norm"] - 1),)).result
    assert (verdict.outcome, verdict.status) == (None, "error")
    assert "study 'race'" in verdict.sentence and verdict.rests_on == str(given)


def test_failed_runs_are_no_measurements():
    good = document("small", FOR)
    rows = [{**row, "status": "diverged", "accuracy": 0.0} if row["seed"] == 2 else row for row in good.rows]
    table = Source(replace(good, rows=tuple(rows))).table
    assert {row["seed"] for row in table.rows} == {0, 1}
    assert RACE.judge_table(table).outcome == "too_small_to_tell"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "no margin could be computed: 0 seeds cannot tell, 3 are the least"),
        ({GAIN: []}, "0 seeds cannot tell, 3 are the least"),
        ({GAIN: [1.0]}, "1 seed cannot tell, 3 are the least"),
        ({GAIN: [1.0, 1.0]}, "2 seeds cannot tell, 3 are the least"),
        ({GAIN: [1.0, 1.1, 0.9], "loss": [1.0, 1.1]}, "2 seeds cannot tell, 3 are the least"),
        ({GAIN: [1.0, 1.0, 1.0]}, "equal values on every seed have an interval without width"),
    ],
)
def test_too_few_or_too_equal_seeds_say_so(values, words):
    verdict = poll(values)
    assert verdict.outcome == "too_small_to_tell"
    assert words in verdict.sentence


def test_too_small_to_tell_names_the_number_of_seeds_that_would():
    close, far = [0.5, 1.5, -0.5, 0.9], [0.2, 1.5, -0.8, 0.4]
    seeds = [int(re.search(r"about (\d+) seeds would", poll({GAIN: v}).sentence)[1]) for v in (close, far)]
    assert 4 < seeds[0] < seeds[1]
    both = poll({GAIN: close, "loss": far, "clear": [1.0, 1.1, 1.2]})
    assert both.outcome == "too_small_to_tell" and f"about {seeds[1]} seeds would" in both.sentence


def test_arms_that_are_equal_on_average_need_more_seeds_than_anyone_has():
    assert "no number of seeds up to 10,000 would" in poll({GAIN: [1.0, -1.0, 0.0]}).sentence


def test_one_margin_against_decides_and_all_for_are_needed():
    assert poll({GAIN: [1.0, 1.1, 0.9], "loss": [-1.0, -1.1, -0.9]}).outcome == "contradicted"
    assert poll({GAIN: [1.0, 1.1, 0.9], "loss": [1.0, 1.1, 0.9]}).outcome == "reproduced"
    assert poll({GAIN: [0.0, 0.0, 0.0]}).outcome == "too_small_to_tell"  # no width: as if nothing was measured
    (item,) = poll({GAIN: [1.0, 1.1, 0.9]}).evidence
    assert (item.name, item.role, item.value, item.instances) == (GAIN, "margin", pytest.approx(1.0), 3)
    assert item.tolerance == pytest.approx(4.302653 * 0.1 / math.sqrt(3))  # Student's quantile of two degrees


# What a table answers


def test_two_answers_for_one_seed_are_refused():
    rows = tuple({"norm": "none", "lr": rate, "seed": 0, "loss": rate} for rate in (0.1, 0.2))
    with pytest.raises(DataError, match="Name more knobs"):
        Contrast("loss", {"norm": "none"}).effects(StudyTable(rows))
    assert Contrast("loss", {"lr": 0.2}).effects(StudyTable(rows)) == [0.2]


def test_arms_are_paired_on_the_seeds_both_have():
    rows = [{"norm": "none", "seed": seed, "loss": 10.0} for seed in (2, 1, 0)]
    rows += [{"norm": "batch", "seed": 1, "loss": 1.0}, {"norm": "batch", "seed": 2, "loss": None}]
    table = StudyTable(tuple(rows))
    less = Contrast("loss", {"norm": "none"}, {"norm": "batch"})
    assert less.effects(table) == [9.0] and replace(less, log=True).effects(table) == [1.0]


FACTORIAL = StudyTable(
    tuple(
        {
            "norm": norm,
            "batch": batch,
            "seed": seed,
            "fit": 10 * (norm == "bn") + batch * (2 if norm == "bn" else 1) + seed,
        }
        for norm in ("bn", "none")
        for batch in (1, 2, 4)
        for seed in range(3)
    )
)


def test_a_contrast_is_a_sum_of_arms():
    """Means over knobs, spreads, controls and picks against hand-made numbers."""
    gain = Contrast("fit", {"norm": "bn", "batch": 4}, {"norm": "bn", "batch": 1})
    assert gain.effects(FACTORIAL) == [6, 6, 6]
    assert (
        replace(gain, control=({"norm": "none", "batch": 4}, {"norm": "none", "batch": 1})).effects(FACTORIAL)
        == [3] * 3
    )
    mean = Contrast("fit", {"norm": "bn"}, {"norm": "none"}, over=("batch",))
    assert mean.effects(FACTORIAL) == pytest.approx([10 + 7 / 3] * 3)
    some = replace(mean, at={"batch": (1, 2)})
    assert some.effects(FACTORIAL) == pytest.approx([11.5] * 3)
    spread = replace(mean, over=(), spread="batch").effects(FACTORIAL)
    assert spread == pytest.approx([statistics.pstdev((2, 4, 8)) - statistics.pstdev((1, 2, 4))] * 3)
    assert [c.at for c in replace(gain, more={"norm": "bn"}, at={"batch": EACH}).resolve(FACTORIAL)] == [
        {"batch": 1},
        {"batch": 2},
        {"batch": 4},
    ]
    assert [c.at for c in replace(gain, at={"batch": each_but(2)}).resolve(FACTORIAL)] == [{"batch": 1}, {"batch": 4}]
    (largest,) = Contrast("fit", {"norm": "bn"}, {"norm": "none"}, at={"batch": LARGEST}).resolve(FACTORIAL)
    assert largest.effects(FACTORIAL) == [14, 14, 14] and largest.title == "fit: norm bn minus norm none (batch 4)"
    with pytest.raises(DataError, match="Name more knobs"):
        Contrast("fit", {"norm": "bn"}, {"norm": "none"}).effects(FACTORIAL)


def test_a_seed_that_lacks_a_cell_is_left_out_of_a_mean():
    table = replace(FACTORIAL, rows=FACTORIAL.rows[1:])
    assert len(Contrast("fit", {"norm": "bn"}, {"norm": "none"}, over=("batch",)).effects(table)) == 2


def test_a_number_that_must_not_be_exceeded_is_said_so():
    bound = Contrast("fit", less={"norm": "none", "batch": 1}, least=-5)
    assert bound.effects(FACTORIAL) == [-1, -2, -3]
    assert bound.rule == "fit: norm none, batch 1 is below 5" and bound.title.startswith("minus fit")


def test_one_of_many_intervals_below_zero_is_no_contradiction_by_luck():
    barely = [-0.9, -1.0, -1.1, 0.1]
    alone = poll({"a": [-0.8, -1.0, -1.3, -0.2]})
    assert alone.outcome == "contradicted"
    crowd = {f"x{k}": [1.0, 1.1, 0.9, 1.0] for k in range(12)}
    assert poll({**crowd, "a": [-0.8, -1.0, -1.3, -0.2]}).outcome == "too_small_to_tell"
    assert "seeds would" in poll({**crowd, "a": barely}).sentence


def test_tabulate_keeps_failed_and_unchosen_runs_as_trials_only():
    def made(rate, seed, status="ok"):
        run = Run({"study": "race", "lr": rate, "seed": seed}, status)
        for step in (0, 5):
            run.record(step, "loss", rate + step)
        return run

    runs = [made(0.1, 0), made(0.1, 1, "diverged"), made(1.0, 0)]
    table = tabulate(runs, {spec_id(run.spec) for run in runs[:2]})
    assert [(row["lr"], row["seed"], row["loss"]) for row in table.rows] == [(0.1, 0, 5.1)]
    assert [row["status"] for row in table.trials] == ["ok", "diverged", "ok"]
    assert "loss" not in table.trials[1]
    assert [row["value"] for row in table.curve("loss", seed=0)] == [0.1, 5.1]
    assert {row["lr"] for row in table.readings} == {0.1}
