"""The command line as a person or a script meets it."""

import json
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

import normgauge as ng
from normgauge.cli import main


def normgauge(*words, cwd=None):
    command = [sys.executable, "-m", "normgauge", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)


@pytest.fixture
def here(monkeypatch, capsys):
    """Run the command in this process, as the console script does: a process of its own takes seconds to start."""

    def run(words, folder):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["normgauge", *words])
        monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds its folder
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    words = ["compare", "--model", "mlp", "--norms", "none,batch", "--rates", "0.1", "--seeds", "2", "--steps", "4"]
    return out, normgauge(*words, "--size", "smoke", "--jobs", "1", "--out", str(out), "--json")


def test_json_is_one_document_and_nothing_else(compared):
    out, done = compared
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {row["norm"] for row in document["rows"]} == {"none", "batch"}
    assert document["counts"] == {"ok": 4}
    assert document["report"] == str(out / "report.html")


def test_the_page_is_written_and_can_be_redrawn(compared, tmp_path):
    out, _ = compared
    page = (out / "report.html").read_text()
    assert "<html" in page and "batch" in page
    again = normgauge("report", str(out), "--out", str(tmp_path / "again.html"))
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again.html").stat().st_size > 100_000
    (out / "report.html").unlink()
    assert normgauge("report", str(out)).stdout.split() == [str(out / "report.html")]  # the folder's own page
    assert (out / "report.html").exists()


def test_plain_output_ends_with_the_answer_and_has_no_colour_codes(compared):
    out, _ = compared
    words = ["compare", "--model", "mlp", "--norms", "none,batch", "--rates", "0.1", "--seeds", "2", "--steps", "4"]
    done = normgauge(*words, "--size", "smoke", "--jobs", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "\x1b[" not in done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert "batch" in last and ("Use " in last or "cannot tell" in last)
    assert "report.html" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "--norms", "bach"], "unknown normalizer 'bach'. Did you mean 'batch'?"),
        (["compare", "--model", "vg"], "unknown model 'vg'. Did you mean 'vgg'?"),
        (["compare", "--rates", "fast"], "learning rates are numbers separated by commas. Got 'fast'"),
        (["compare", "--norms", ","], "name at least one normalizer"),
        (["compare", "--data", "mnist"], "unknown data 'mnist'"),
        (["compare", "--rates", "0.1,nan"], "rates are positive and finite"),
        (["compare", "--rates", "inf"], "rates are positive and finite"),
        (["compare", "--shard", "\u00b2/4"], "--shard: two numbers i/n"),
        (
            ["compare", "--ddp", "3", "--batch", "64"],
            "of the number of processes that share it. Got batch=64",
        ),
        (["compare", "--statistics", "foo"], "unknown statistics 'foo'"),
        (["compare", "--out", "a_file"], "the name of a folder, made if it is not there. Got the file a_file"),
        (["compare", "--out", "a_file/below"], "Got the file a_file"),
        (["reproduce", "valley", "--out", "a_file"], "Got the file a_file"),
        (["compare", "--cluster", "nonsense"], "a Dask scheduler must listen there"),
        (["compare", "--cluster", "foo://bar:1"], "a Dask scheduler must listen there"),
        (["compare", "--model", "cli_nets:broken"], "cli_nets.py, line 2, in broken"),
        (["compare", "--model", "cli_nets:number"], "the factory must return an nn.Module"),
        (["report", "nowhere"], "Run normgauge compare first"),
        (["report", "a_file"], "a store is an SQLite file"),
        (["merge", "a_file.sqlite"], "the store must exist"),
        (["merge", "a_file"], "the store must exist"),
    ],
)
def test_wrong_use_is_explained_without_a_stack_trace(words, message, tmp_path, here, monkeypatch):
    if "--cluster" in words:
        pytest.importorskip("distributed")
        monkeypatch.setattr("normgauge.lab.runs.executors.CONNECT_SECONDS", 0.5)
    (tmp_path / "a_file").write_text("a poem " * 200)
    (tmp_path / "cli_nets.py").write_text("def broken(norm):\n    return [][1]\ndef number(norm):\n    return 3\n")
    sys.modules.pop("cli_nets", None)
    code, out, err = here(words, tmp_path)
    assert code == 2, err
    assert message in err
    assert "Traceback" not in err and not out


FRAGILE = """
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.inner = norm, nn.Linear(64, 10)
    def forward(self, x):
        if self.norm == "batch" and Path("broken").exists():
            raise RuntimeError("no luck")
        return self.inner(x.flatten(1)) * (1.5 if self.norm == "batch" else 1.0)
"""


def test_failed_runs_are_named_cost_the_exit_code_and_are_tried_again(tmp_path, here):
    (tmp_path / "fragile_nets.py").write_text(FRAGILE)
    (tmp_path / "broken").touch()
    words = ["compare", "--model", "fragile_nets:Net", "--norms", "none,batch", "--rates", "0.1", "--seeds", "2"]
    words += ["--steps", "2", "--size", "smoke", "--jobs", "1", "--out", "o"]
    code, out, err = here(words, tmp_path)
    assert code == 1 and "Only none trained" in out
    assert "2 runs ok, 1 error." in err
    assert "norm batch, lr 0.1, seed 0: error: RuntimeError: no luck (" in err and "fragile_nets.py, line 11" in err
    (tmp_path / "broken").unlink()
    code, out, err = here(words, tmp_path)
    assert code == 0 and "Stored runs that failed are tried again: 1 (error: RuntimeError: no luck" in err
    assert "4 runs ok.\n" in err
    sys.modules.pop("fragile_nets")


@pytest.mark.parametrize("as_json", [True, False])
def test_a_page_that_cannot_be_written_does_not_cost_the_answer(compared, tmp_path, here, as_json):
    out, _ = compared
    shutil.copytree(out, tmp_path / "o")
    (tmp_path / "o" / "report.html").unlink()
    (tmp_path / "o" / "report.html").mkdir()  # no page can be put in its place
    words = ["compare", "--model", "mlp", "--norms", "none,batch", "--rates", "0.1", "--seeds", "2", "--steps", "4"]
    words += ["--size", "smoke", "--jobs", "1", "--out", "o", *["--json"] * as_json]
    code, out, err = here(words, tmp_path)
    assert code == 1 and "The page was not written: o/report.html: a file must be writable there" in err
    assert "Traceback" not in err
    if as_json:
        assert json.loads(out)["report"] is None and json.loads(out)["answer"]
    else:
        assert "batch" in out.strip().splitlines()[-1]
    assert not list((tmp_path / "o").glob(".*"))


def test_a_report_lies_beside_its_store_or_in_the_folder_named(compared, tmp_path, here):
    out, _ = compared
    shutil.copytree(out, tmp_path / "o")
    (tmp_path / "o" / "report.html").unlink()
    assert here(["report", "o"], tmp_path)[:2] == (0, "o/report.html\n")
    (tmp_path / "pages").mkdir()
    assert here(["report", "o", "--out", "pages"], tmp_path)[:2] == (0, "pages/report.html\n")
    assert (tmp_path / "pages" / "report.html").exists() and (tmp_path / "o" / "report.html").exists()


def test_symmetries_of_a_factory(tmp_path, here):
    (tmp_path / "nets_of_the_command_line.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))\n"
        "def wrong():\n"
        "    return 5\n"
    )
    done = normgauge("symmetries", "nets_of_the_command_line:net", "--input", "3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["dimension"] == 12  # four rows, four dead biases, four (gamma, beta) against the next layer
    for words, message in (
        (["nets_of_the_command_line:net", "--input", "3by3"], "--input is a shape like 3x32x32"),
        (["nets_of_the_command_line:wrong", "--input", "3"], "the factory returns a module or an Objective"),
        (["nets_of_the_command_line:missing", "--input", "3"], "package.module:name must be importable"),
    ):
        code, _, err = here(["symmetries", *words], tmp_path)
        assert code == 2 and message in err and "Traceback" not in err


def test_claims_speak_json(tmp_path, here):
    done = normgauge("claims", "--id", "S4-L1b", "--json")
    (claim,) = json.loads(done.stdout)
    assert claim["id"] == "S4-L1b" and claim["verdict"] == "holds_with_correction" and claim["evidence"]
    assert here(["claims", "--id", "S9-X"], tmp_path)[0] == 2


def test_help_and_version():
    listed = normgauge("--help").stdout
    assert "Train one network under several normalizers, optimizers or other" in listed
    assert listed.count("...") == 1, "only the usage line has dots, no sentence is cut"
    words = normgauge("--version").stdout.split()
    assert words[:2] == ["normgauge", ng.__version__] and words[2:4] == ["(torch", f"{metadata.version('torch')},"]
    assert normgauge("compare", "--seeds", "0").returncode == 2


@pytest.mark.parametrize("no_color", [False, True])
def test_verdicts_and_severities_are_coloured_on_terminals_unless_no_color(no_color, monkeypatch, capsys):
    from normgauge.cli._console import console

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1") if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
    console().print("S0-1 false as stated\nWARNING NG01: it holds with correction, S1 holds")
    printed = capsys.readouterr().out
    assert ("\x1b[1;31mfalse as stated" in printed) != no_color
    assert ("\x1b[33mWARNING" in printed and "\x1b[33mholds with correction" in printed) != no_color
    assert "\x1b[3" not in printed if no_color else "\x1b[32mholds\x1b" in printed


def test_judges_say_how_far_they_are_in_plain_lines_where_there_is_no_terminal(capsys):
    from normgauge.cli._console import console, judging_bar

    with judging_bar(console(stderr=True), 8) as progress:
        for done in range(1, 9):
            progress("S0-x", done, 8)
    assert capsys.readouterr().err.splitlines() == [f"judged {k} of 8" for k in (2, 4, 6, 8)]


def test_a_claim_in_full_hangs_beneath_its_labels(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    lines = normgauge("claims", "--id", "S1-T4.1", "--shipped", cwd=tmp_path).stdout.splitlines()
    assert max(map(len, lines)) <= 72 and all(line == line.rstrip() for line in lines)
    assert all(line[:1].isspace() or ":" in line[:13] for line in lines[2:-1])
