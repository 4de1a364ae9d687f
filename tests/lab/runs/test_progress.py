"""One bar over many studies: it moves with their weights, and ends at the end whatever was skipped."""

import io
import json

import pytest
from rich.console import Console
from rich.file_proxy import FileProxy

from normgauge.lab import Study
from normgauge.lab.runs.progress import StudiesBar, note_session
from normgauge.lab.runs.sweep import sweep
from normgauge.measure.curvature.products import show_residuals
from normgauge.papers.studies import experiments
from normgauge.records import Run
from normgauge.store import Store


def at_once(spec):
    return Run(dict(spec))


def test_the_bar_moves_with_weights_and_counts_what_was_there(tmp_path):
    seen = []

    def watched(spec):
        seen.append(round(bar.fraction, 6))
        return Run(dict(spec))

    specs = [{"n": n, "seed": 0} for n in range(4)]
    with Store(tmp_path / "runs.sqlite") as store, StudiesBar({"short": 1.0, "long": 3.0}, shown=False) as bar:
        sweep(specs[:1], store, executor=1, task=at_once, progress=False)
        with bar.study("short", runs=4):
            sweep(specs, store, executor=1, task=watched, progress=bar)
        assert seen == [0.0625, 0.125, 0.1875] and bar.fraction == 0.25
        with bar.study("long", runs=4):
            sweep(specs, store, executor=1, task=watched, progress=bar)  # nothing left to run
            assert bar.fraction == 1.0
    assert len(seen) == 3


def test_a_session_over_all_studies_is_noted_beside_the_earlier_ones(tmp_path):
    with StudiesBar({"a": 1.0}, shown=False) as bar, bar.study("a", runs=3), bar.runs("runs", 3, 1) as advance:
        advance()
        advance()
    for _ in range(2):
        path = note_session(tmp_path / "new", "small", 1, bar, 2)
    sessions = json.loads(path.read_text())
    assert (
        [session["runs"] for session in sessions] == [2, 2] and sessions[0]["studies"] == 1 and sessions[1]["jobs"] == 2
    )
    assert sessions[0]["minutes"] >= 0 and sessions[0]["machine"]["processor"]


def test_the_time_left_does_not_count_what_was_there():
    with StudiesBar({"a": 1.0, "b": 1.0}, shown=False) as bar:
        with bar.study("a", runs=100), bar.runs("runs", 100, 100):
            assert bar.seconds_left is None
        with bar.study("b", runs=4), bar.runs("runs", 4, 0) as advance:
            bar._begin -= 60  # a minute for the first run
            advance()
            assert bar.seconds_left == pytest.approx(180, rel=0.01)


def test_skipped_runs_and_more_runs_than_expected_do_not_move_the_end():
    with StudiesBar({"a": 1.0, "b": 1.0}, shown=False) as bar:
        with bar.study("a", runs=10):
            pass
        assert bar.fraction == 0.5
        with bar.study("b", runs=1), bar.runs("runs", 3, 0) as advance:
            for _ in range(3):
                advance()
        assert bar.fraction == 1.0


def test_without_a_terminal_there_is_a_line_per_study(capsys):
    with StudiesBar({"valley": 1.0, "margin": 1.0}) as bar:
        with bar.study("valley", runs=3):
            pass
        with bar.study("margin", runs=0):
            bar.note("[not markup]")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("1 of 2: valley (3 runs; ") and lines[1].startswith("2 of 2: margin")
    assert lines[2] == "[not markup]"


@pytest.mark.parametrize(("tuning_seeds", "runs"), [(None, 24), (1, 36), (2, 42), (4, 54)])
def test_a_study_knows_how_many_runs_it_has(tuning_seeds, runs):
    knobs = {"scientific": {"norm": ["none", "batch"], "depth": [2, 3, 4]}, "nuisance": {"lr": [0.1, 1.0]}}
    seeds = 2 if tuning_seeds is None else 5
    study = Study("s", "?", **knobs, seeds=seeds, tuning_seeds=tuning_seeds)
    chosen = [{"norm": n, "depth": d, "lr": 0.1} for n in ("none", "batch") for d in (2, 3, 4)]
    assert study.runs == len(study.plan()) + len(study.confirmation(chosen))
    assert study.runs == runs


def test_every_study_says_how_long_its_small_size_takes():
    assert all(item.minutes.get("small", 0) > 0 for item in experiments().values())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_measurement_does_not_draw_over_a_bar(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    with show_residuals("spectrum", None) as alone:
        assert alone is not None
    monkeypatch.setattr("sys.stderr", FileProxy(Console(), Terminal()))
    with show_residuals("spectrum", None) as under_a_bar:
        assert under_a_bar is None
