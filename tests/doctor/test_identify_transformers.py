"""`ng.identify` on every norm class of transformers that can be built from a width."""

import importlib
import inspect
import pkgutil
import time
import warnings

import pytest
import torch
from torch import nn

import normgauge as ng

WIDTH = 24


def norm_classes():
    """Yield (module, class) of every class with Norm in its name in a modeling file."""
    import transformers.models as models

    seen = set()
    for package in pkgutil.iter_modules(models.__path__):
        for kind in (f"modeling_{package.name}",):
            try:
                module = importlib.import_module(f"transformers.models.{package.name}.{kind}")
            except Exception:  # noqa: BLE001
                continue
            for name, cls in vars(module).items():
                if not (inspect.isclass(cls) and issubclass(cls, nn.Module) and "Norm" in name) or cls in seen:
                    continue
                if cls.__module__ != module.__name__:
                    continue
                seen.add(cls)
                yield package.name, cls


def build(cls):
    """Return an instance of a width whose gains are away from their start, and an example it takes; else `None`."""
    torch.manual_seed(0)
    try:
        norm = cls(WIDTH)
    except Exception:  # noqa: BLE001
        return None
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    for example in (torch.randn(2, 5, WIDTH), torch.randn(2, WIDTH, 5, 3)):
        try:
            with torch.no_grad():
                made = norm(example)
        except Exception:  # noqa: BLE001
            continue
        if isinstance(made, torch.Tensor) and made.shape == example.shape:
            return norm, example
    return None


def told_eps(norm):
    """Return the eps the instance stores, under whatever name."""
    names = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps")
    return next((float(v) for n in names if isinstance(v := getattr(norm, n, None), (int, float))), None)


def walk():
    rows = []
    for package, cls in norm_classes():
        built = build(cls)
        if built is None:
            continue
        norm, example = built
        seconds = []
        while not seconds or (seconds[-1] > 1 and len(seconds) < 3):  # others may be using the machine
            start = time.process_time()
            identity = ng.identify(norm, example=example)
            seconds.append(time.process_time() - start)
        rows.append((package, cls.__name__, identity, told_eps(norm), min(seconds)))
    return rows


@pytest.mark.heavy
def test_norm_classes_of_transformers_are_identified():
    pytest.importorskip("transformers")
    with warnings.catch_warnings(action="ignore"):
        rows = walk()
    assert len(rows) > 100
    named = [row for row in rows if row[2].kind != "unknown"]
    assert len(named) >= 0.95 * len(rows), [
        (row[0], row[1], row[2].sentence) for row in rows if row[2].kind == "unknown"
    ]
    wrong = [(*r[:2], r[2].eps, r[3]) for r in named if r[3] is not None and abs(r[2].eps - r[3]) > 1e-3 * r[3]]
    assert not wrong
    assert max(row[4] for row in rows) < 1.0
