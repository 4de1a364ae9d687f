"""The command line's door to symmetries."""

import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from normgauge.cli._symmetries import symmetries
from normgauge.errors import NormgaugeError

APP = typer.Typer()
APP.command()(symmetries)


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "mymodels.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def mlp():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 3))\n"
        "def words():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))\n"
        "def number():\n    return 3\n"
        "def normed(norm):\n    import normgauge as ng\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(4, 6), ng.nn.registry.get(norm).layer(6, 0), nn.Linear(6, 3))\n"
        "def broken():\n    raise KeyError('width')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds its folder
    sys.modules.pop("mymodels", None)


def run(*arguments):
    return CliRunner().invoke(APP, list(arguments))


def test_table_sentences_and_json(factories):
    result = run("mymodels:mlp", "--input", "4", "--explain")
    assert result.exit_code == 0 and "rescale" in result.stdout and "mode train" in result.stdout
    assert "only their product counts" in result.stdout
    told = json.loads(run("mymodels:mlp", "--input", "4", "--json").stdout)
    assert told["dimension"] == 6 and told["families"][0]["status"] == "exact"
    assert json.loads(run("mymodels:words", "--input", "2", "--tokens", "5", "--json").stdout)["unobserved"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mymodels:nothing", "--input", "4"), "must be importable and name a factory"),
        (("mymodels:number", "--input", "4"), "a module or an Objective"),
        (("mymodels:mlp", "--input", "four"), "a shape like 3x32x32"),
        (("mymodels:mlp", "--input", "4", "--of", "loss"), "needs to know the loss"),
        (("mymodels:mlp", "--input", "4", "--mode", "test"), "mode must be"),
        (("mymodels:normed", "--input", "4"), "Got factory(norm) and --norm ''. Pass --norm batch"),
        (("mymodels:mlp", "--input", "4", "--norm", "batch"), "Leave --norm out"),
        (("mymodels:broken", "--input", "4"), "KeyError: 'width'"),
    ],
)
def test_wrong_use_says_why(factories, arguments, message):
    """The door raises; `normgauge` turns it into exit code 2 (tests/cli/test_cli.py)."""
    error = run(*arguments).exception
    assert isinstance(error, NormgaugeError) and message in str(error)


def test_a_factory_of_compare_is_called_with_the_normalizer(factories):
    told = json.loads(run("mymodels:normed", "--input", "4", "--norm", "batch", "--json").stdout)
    assert told["dimension"] > 0
