"""`normgauge reproduce --all`: goes on past missing data, resumes, and notes its sessions."""

import json

import pytest
import typer
from typer.testing import CliRunner

from normgauge.cli._reproduce import reproduce as command
from normgauge.errors import DataError
from normgauge.papers.reproduce import reproduce as run_study
from normgauge.papers.studies import experiments

APP = typer.Typer()
APP.command()(command)


@pytest.fixture
def two_studies(monkeypatch):
    """One study that runs in a moment, and one whose data are not here."""
    real = run_study

    def reproduce(name, **options):
        if name == "performance":
            raise DataError("cifar10: not on this machine. Get it with: normgauge data cifar10")
        return real(name, **options)

    chosen = {name: experiments()[name] for name in ("trajectories", "performance")}
    monkeypatch.setattr("normgauge.papers.studies.experiments", lambda: chosen)
    monkeypatch.setattr("normgauge.papers.reproduce.reproduce", reproduce)


def run(*arguments):
    return CliRunner().invoke(APP, ["--size", "smoke", "--jobs", "1", *arguments])


def test_all_goes_on_past_missing_data_and_resumes(two_studies, tmp_path):
    first = run("--all", "--out", str(tmp_path))
    assert first.exit_code == 0, first.output
    assert "performance: not run: no data" in first.stderr and "1 of 2 studies done" in first.stderr
    assert (tmp_path / "trajectories-smoke" / "index.html").exists()
    again = run("--all", "--out", str(tmp_path), "--json")
    documents = json.loads(again.stdout)
    assert [document["study"] for document in documents] == ["trajectories", "performance"]
    assert documents[1]["status"] == "not run: no data" and documents[0]["runs"] > 0
    sessions = json.loads((tmp_path / "all-smoke.json").read_text())
    assert [session["studies"] for session in sessions] == [1, 1]
    assert sessions[0]["runs"] == documents[0]["runs"] and sessions[1]["runs"] == 0 and sessions[0]["jobs"] == 1


def test_a_single_study_without_its_data_is_refused(two_studies, tmp_path):
    refused = run("performance", "--out", str(tmp_path))
    assert refused.exit_code != 0 and isinstance(refused.exception, DataError | SystemExit)
    assert not (tmp_path / "all-smoke.json").exists()
