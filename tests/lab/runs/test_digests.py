"""A user's own code and data belong to a run's identity: what changed is run again, what did not is not."""

import sys

import pytest
import torch

import normgauge as ng
from normgauge.errors import InputError
from normgauge.lab import imports
from normgauge.lab.runs.digests import data_digest
from normgauge.store import Store

NET = """
import math
import torch
from torch import nn
from own_layers import WIDTH
from own_package import shapes


def factory(norm):
    from own_late import DEPTH
    layers = [nn.Flatten(), nn.Linear(64, WIDTH)]
    layers += [nn.BatchNorm1d(WIDTH)] if norm == "batch" else []
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(WIDTH, 10))


def numbers():
    source = torch.Generator().manual_seed(0)
    def draw(count):
        return torch.randn(count, 64, generator=source), torch.randint(0, 10, (count,), generator=source)
    return draw(80), draw(40), draw(40)


def restless():
    return tuple((torch.randn(40, 64), torch.arange(40) % 10) for _ in range(3))


def broken(norm):
    return WIDTH / 0
"""
OWN = ("own_net", "own_layers", "own_late", "own_package", "own_package.shapes")
SETTINGS = {"norms": ["none"], "rates": [0.1], "seeds": 1, "steps": 2, "size": "smoke", "executor": 1}


def forget():
    for name in OWN:
        sys.modules.pop(name, None)
        imports._IMPORTED.pop(name, None)
    imports.importlib.invalidate_caches()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a user's modules; `forget` stands for another start of Python."""
    (tmp_path / "own_net.py").write_text(NET)
    (tmp_path / "own_layers.py").write_text("WIDTH = 7\n")
    (tmp_path / "own_late.py").write_text("DEPTH = 2\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "shapes.py").write_text("SIDE = 8\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    torch.set_default_dtype(torch.float32)
    forget()
    yield tmp_path
    forget()


def stored(folder):
    with Store(folder / "out" / "runs.sqlite", write=False) as store:
        return len(store.runs())


def test_the_digest_covers_the_users_tree_and_nothing_else(own):
    digests = imports.code_digests("own_net:factory")
    assert list(digests) == sorted(OWN)
    forget()
    assert imports.code_digests("own_net:factory") == digests
    (own / "own_package" / "shapes.py").write_text("SIDE = 9\n")
    forget()
    changed = imports.code_digests("own_net:factory")
    assert [name for name in digests if digests[name] != changed[name]] == ["own_package.shapes"]


@pytest.mark.parametrize("module", ["own_net", "own_layers", "own_late"])
def test_changed_code_is_run_again_with_a_notice_and_unchanged_is_not(own, capsys, module):
    for count in (1, 1):
        ng.compare(model="own_net:factory", out=own / "out", **SETTINGS)
        assert stored(own) == count
        forget()
    assert "changed" not in capsys.readouterr().err
    file = own / f"{module}.py"
    file.write_text(file.read_text().replace("WIDTH = 7", "WIDTH = 9") + "\n# another\n")
    ng.compare(model="own_net:factory", out=own / "out", **SETTINGS)
    assert stored(own) == 2
    assert f"Runs are made again, since the code of {module} changed" in capsys.readouterr().err


def test_changed_data_is_run_again_with_a_notice(own, capsys):
    ng.compare(model="mlp", data="own_net:numbers", out=own / "out", **SETTINGS)
    forget()
    file = own / "own_net.py"
    file.write_text(file.read_text().replace("def broken", "def much_broken"))  # the same numbers from other code
    ng.compare(model="mlp", data="own_net:numbers", out=own / "out", **SETTINGS)
    assert stored(own) == 1
    forget()
    file.write_text(file.read_text().replace("manual_seed(0)", "manual_seed(1)"))
    ng.compare(model="mlp", data="own_net:numbers", out=own / "out", **SETTINGS)
    assert stored(own) == 2
    assert "the data own_net:numbers changed" in capsys.readouterr().err


def test_data_that_differ_whenever_they_are_loaded_are_no_measurement(own):
    torch.manual_seed(12345)
    result = ng.compare(model="mlp", data="own_net:restless", out=own / "out", **SETTINGS)
    assert result.counts == {"error": 1}
    (run,) = Store(own / "out" / "runs.sqlite", write=False).runs()
    assert "Draw them by a fixed seed" in run.sentence


def test_functions_are_taken_by_name(own):
    import own_net

    ng.compare(model=own_net.factory, data=own_net.numbers, out=own / "out", **SETTINGS)
    (run,) = Store(own / "out" / "runs.sqlite", write=False).runs()
    assert run.ok and run.spec["model"] == "own_net:factory" and run.spec["data"] == "own_net:numbers"
    with pytest.raises(InputError, match="top of a module"):
        ng.compare(model=lambda norm: own_net.factory(norm), out=own / "out", **SETTINGS)


def test_a_module_edited_after_its_import_is_refused(own):
    imports.code_digests("own_net:factory")
    (own / "own_layers.py").write_text("WIDTH = 8\n")
    with pytest.raises(InputError, match="module 'own_layers': the module must be the one this process imported"):
        imports.code_digests("own_net:factory")
    import own_layers

    imports.importlib.reload(own_layers)
    imports.code_digests("own_net:factory")


def test_a_factory_that_raises_is_named_with_its_line(own):
    with pytest.raises(
        InputError, match=r"model 'own_net:broken': .*ZeroDivisionError: .*own_net.py, line 28, in broken"
    ):
        ng.compare(model="own_net:broken", out=own / "out", **SETTINGS)
    (own / "own_late.py").write_text("def f(:\n")
    (own / "own_net.py").write_text("import own_late\n")
    forget()
    with pytest.raises(InputError, match=r"SyntaxError: .*own_late.py, line 1"):
        ng.compare(model="own_net:factory", out=own / "out", **SETTINGS)


def test_built_in_models_and_published_data_have_no_digest():
    from normgauge.lab.compare import comparison_study

    fixed = comparison_study(model="mlp", norms=["none"]).fixed
    assert "code" not in fixed and "data_digest" not in fixed


def test_the_digest_of_data_sees_every_value_shape_and_type():
    from dataclasses import replace

    from normgauge.lab.data import load

    digits = load("digits")
    x, y = digits.test
    seen = {data_digest(digits)}
    other = x.clone()
    other[-1, 0, -1, -1] += 1e-6
    for pair in ((other, y), (x, y.roll(1)), (x.double(), y), (x.flatten(1), y), (x[:-1], y[:-1])):
        seen.add(data_digest(replace(digits, test=pair)))
    assert len(seen) == 6
