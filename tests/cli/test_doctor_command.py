"""`normgauge doctor`: exit codes, documents, fixes, wrong use."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from normgauge.cli._app import app
from normgauge.errors import NormgaugeError

FILE = """
import torch
from torch import nn
def clean():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
def port():
    net = clean()
    net[1].eps = 1e-2
    return net
def sick():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.99), nn.ReLU(), nn.Linear(8, 2))
def batch():
    torch.manual_seed(1)
    return torch.randn(64, 4), torch.randint(0, 2, (64,))
def loader():
    return [batch(), batch(), batch()]
def optimizer(model):
    return torch.optim.AdamW(model.parameters(), weight_decay=0.1)
def nothing():
    return 3
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "patients_file.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "patients_file", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    torch.set_default_dtype(torch.float32)

    def call(*arguments):
        return CliRunner().invoke(app, ["doctor", *arguments])

    return call


def test_exit_codes(run):
    assert run("patients_file:clean", "--data", "patients_file:batch").exit_code == 0
    assert run("patients_file:sick", "--data", "patients_file:batch").exit_code == 1
    assert run("patients_file:clean", "--input", "4", "--quick").exit_code == 0
    assert run("--example", "--quick").exit_code == 1


@pytest.mark.parametrize(
    "arguments",
    [(), ("patients_file:clean", "--example"), ("patients_file:nothing", "--input", "4"), ("patients_file:clean",),
     ("patients_file:clean", "--input", "4", "--json", "--sarif"), ("patients_file:missing", "--input", "4")],
)  # fmt: skip
def test_wrong_use_is_an_explained_error(run, arguments):
    assert isinstance(run(*arguments).exception, NormgaugeError)  # main() turns it into exit code 2


def test_documents_and_nothing_else(run):
    common = ("patients_file:sick", "--data", "patients_file:loader", "--optimizer", "patients_file:optimizer")
    document = json.loads(run(*common, "--json").stdout)
    assert {"NG07", "NG12"} <= {finding["id"] for finding in document["findings"]}
    assert json.loads(run(*common, "--sarif").stdout)["version"] == "2.1.0"
    ignored = json.loads(run(*common, "--json", "--ignore", "NG07").stdout)
    assert "NG07" not in {finding["id"] for finding in ignored["findings"]} and ignored["suppressed"] == 1


def test_against_and_fix_and_page(run, tmp_path):
    found = run("patients_file:clean", "--data", "patients_file:batch", "--against", "patients_file:port")
    assert found.exit_code == 1 and "DIVERGENCE at 1" in found.stdout and "eps" in found.stdout
    page = ("--html", str(tmp_path / "page.html"), "--fix", str(tmp_path / "fixed"))
    run("patients_file:sick", "--data", "patients_file:batch", *page)
    assert "NG07" in (tmp_path / "page.html").read_text()
    assert "done" in (tmp_path / "fixed" / "repairs.json").read_text()
    model = torch.load(tmp_path / "fixed" / "model.pt", weights_only=False)
    assert abs(model[1].momentum - 0.01) < 1e-9
