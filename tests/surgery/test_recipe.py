"""Weights and the recipe beside them rebuild models no stock class fits; the command writes both."""

import json
import sys

import pytest
import torch
from operations import EXAMPLE, convolutional, hugging_face, shaken
from torch import nn
from typer.testing import CliRunner

import normgauge as ng
from normgauge.cli._app import app
from normgauge.errors import InputError, StoreError
from normgauge.surgery import load, save

pytestmark = pytest.mark.usefixtures("single_precision")
IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.a(self.norm(x)))


OPERATIONS = {
    "fold": lambda: ng.fold_norms(convolutional(), example=IMAGES),
    "freeze": lambda: ng.freeze_norms(convolutional(), example=IMAGES),
    "guard": lambda: ng.guard_norms(convolutional(), example=IMAGES),
    "strip": lambda: ng.strip_biases(convolutional(), example=IMAGES),
    "prune": lambda: ng.prune_norms(convolutional()[1:4].append(nn.Conv2d(8, 2, 1)), "gamma", 0.5, IMAGES),
    "swap": lambda: ng.swap_norms(convolutional(), "group", example=IMAGES),
    "split": lambda: ng.split_norms(shaken(Shared()), example=IMAGES),
}


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_saved_models_come_back(name, suffix, tmp_path):
    if suffix == "safetensors":
        pytest.importorskip("safetensors")
    done = OPERATIONS[name]()
    path = tmp_path / f"new.{suffix}"
    recipe = json.loads(save(done, path, factory="mine:make").read_text())
    assert recipe["operation"] == done.operation and recipe["factory"] == "mine:make"
    other = shaken(done.undo(), seed=9)
    back = load(lambda: other, path)
    assert [type(m).__name__ for m in back.modules()] == [type(m).__name__ for m in done.model.modules()]
    assert torch.equal(back.eval()(IMAGES), done.model.eval()(IMAGES))
    if name == "freeze":
        assert not back.train()[2].training


def test_models_whose_ties_were_cut(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "new.safetensors"
    done = ng.rotate_stream(hugging_face("gpt2"), example=EXAMPLE, untie=True)
    save(done, path)
    back = load(lambda: hugging_face("gpt2"), path).eval()
    assert torch.equal(back(**EXAMPLE).logits, done.model(**EXAMPLE).logits)
    tied = ng.fold_norms(hugging_face("gpt2"), example=EXAMPLE)
    save(tied, path)
    back = load(lambda: hugging_face("gpt2"), path).eval()
    assert back.lm_head.weight is back.transformer.wte.weight
    assert torch.equal(back(**EXAMPLE).logits, tied.model(**EXAMPLE).logits)


def test_wrong_files_are_explained(tmp_path):
    done = OPERATIONS["fold"]()
    with pytest.raises(StoreError, match="recipe"):
        load(convolutional, tmp_path / "none.pt")
    save(done, tmp_path / "a.pt")
    with pytest.raises(StoreError, match="same factory"):
        load(lambda: nn.Sequential(*convolutional(), nn.Linear(6, 6)), tmp_path / "a.pt")

    class Local(nn.Module):
        pass

    done.model.append(Local())
    with pytest.raises(InputError, match=r"torch\.save"):
        save(done, tmp_path / "a.pt")


def test_the_command(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    (tmp_path / "surgical_model.py").write_text(
        "from torch import nn\n\ndef make():\n"
        "    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("surgical_model", None)
    import surgical_model

    trained = shaken(surgical_model.make()).eval()
    save_file(trained.state_dict(), "in.safetensors")
    common = ["surgical_model:make", "--input", "4", "--checkpoint", "in.safetensors"]
    result = CliRunner().invoke(app, ["surgery", "fold", *common, "--out", "out.safetensors", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["proof"] <= 1e-10 and told["operation"] == "fold_norms"
    back = ng.surgery.load(surgical_model.make, "out.safetensors").eval()
    inputs = torch.randn(5, 4)
    torch.testing.assert_close(back(inputs), trained(inputs), rtol=1e-4, atol=1e-5)
    assert isinstance(back[1], nn.Identity)
    for verb, more in (
        ("freeze", []),
        ("swap", ["--to", "layer"]),
        ("prune", ["--share", "0.3"]),
        ("canonicalize", []),
    ):
        result = CliRunner().invoke(app, ["surgery", verb, *common, "--out", f"{verb}.pt", *more])
        assert result.exit_code == 0 and "Surgery" in result.stdout, result.output
    result = CliRunner().invoke(app, ["surgery", "layer-to-rms", *common, "--out", "none.pt"])
    assert result.exit_code == 1
    result = CliRunner().invoke(app, ["surgery", "flod", *common, "--out", "x.pt"])
    assert "fold" in str(result.exception)
