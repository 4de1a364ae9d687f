"""The command line as a person or a script meets it."""

import json
import subprocess
import sys

import pytest

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
        (["report", "nowhere"], "Run normgauge compare first"),
    ],
)
def test_wrong_use_is_explained_without_a_stack_trace(words, message, tmp_path, here):
    code, out, err = here(words, tmp_path)
    assert code == 2
    assert message in err
    assert "Traceback" not in err and not out


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
        (["nets_of_the_command_line:missing", "--input", "3"], "package.module:factory"),
    ):
        code, _, err = here(["symmetries", *words], tmp_path)
        assert code == 2 and message in err and "Traceback" not in err


def test_claims_speak_json(tmp_path, here):
    done = normgauge("claims", "--id", "S4-L1b", "--json")
    (claim,) = json.loads(done.stdout)
    assert claim["id"] == "S4-L1b" and claim["verdict"] == "holds_with_correction" and claim["evidence"]
    assert here(["claims", "--id", "S9-X"], tmp_path)[0] == 2


def test_help_and_version():
    assert "compare" in normgauge("--help").stdout
    assert normgauge("--version").stdout.startswith("normgauge 0.")
    assert normgauge("compare", "--seeds", "0").returncode == 2
