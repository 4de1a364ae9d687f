"""`save` and `load`: weights of a model no stock class fits, and the recipe that rebuilds it from the stock one."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, StoreError
from normgauge.network import copy_model
from normgauge.surgery import statistics
from normgauge.surgery._surgery import Surgery

_PLAIN = (int, float, bool, str, type(None))


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a `.safetensors` file, or of a `.pt` file read as weights only."""
    try:
        if Path(path).suffix == ".safetensors":
            return dict(_safetensors().load_file(str(path)))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        step = "Give a .safetensors file, or a .pt file with a state_dict"
        raise StoreError("surgery", f"{path} must hold weights", str(error), step) from error
    content = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        rule = "a .pt file holds a state_dict"
        raise StoreError("surgery", rule, type(content).__name__, "Save model.state_dict()")
    return content


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        rule, step = "files .safetensors need the package safetensors", "pip install safetensors, or use .pt"
        raise InputError("surgery", rule, str(error), step) from error


def save(surgery: Surgery, path: str | Path, **facts: Any) -> Path:
    """Write the weights of `surgery.model` and, beside them, `<path>.recipe.json`; return the recipe's path.

    The path ends in `.safetensors` or `.pt`; `facts` are what else the recipe shall say, such as the factory's name.
    """
    before, after = ({n: _entry(m) for n, m in model.named_modules()} for model in (surgery.original, surgery.model))
    modules = {name: entry for name, entry in after.items() if before.get(name) != entry}
    lost = [entry["class"] for entry in modules.values() if _class(entry["class"]) is None]
    if lost:
        rule = "a recipe rebuilds modules from classes that can be imported"
        raise InputError("surgery.save", rule, ", ".join(sorted(set(lost))), "Use torch.save(surgery.model, path)")
    state = {name: value.detach().contiguous() for name, value in surgery.model.state_dict().items()}
    shared = ties(surgery.model)
    if Path(path).suffix == ".safetensors":
        kept = {name: value for name, value in state.items() if shared.get(name, name) == name}
        _safetensors().save_file({name: value.clone() for name, value in kept.items()}, str(path))
    else:
        torch.save(state, path)
    recipe = {
        **facts,
        "operation": surgery.operation,
        "proof": surgery.proof,
        "change": surgery.change,
        "refused": [list(item) for item in surgery.refused],
        "done": [row["what"] for row in surgery.rows if "left alone" not in row["what"]],
        "modules": modules,
        "gone": [name for name in before if name not in after],
        "ties": shared,
    }
    place = Path(f"{path}.recipe.json")
    place.write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return place


def load(factory: Callable[[], nn.Module] | nn.Module, path: str | Path) -> nn.Module:
    """Return the model that `save` wrote: the factory's, rebuilt by the recipe, with the weights of the file.

    The factory makes the model as it was before, with any weights; or it is that model.
    """
    model = copy_model(factory) if isinstance(factory, nn.Module) else factory()
    place = Path(f"{path}.recipe.json")
    if not place.is_file():
        raise StoreError("surgery.load", "a recipe lies beside the weights", f"no {place}", "Copy both files")
    recipe = json.loads(place.read_text(encoding="utf-8"))
    for name, entry in sorted(recipe["modules"].items(), key=lambda item: item[0].count(".") if item[0] else -1):
        _rebuild(model, name, entry)
    for name in recipe["gone"]:
        parent, _, child = name.rpartition(".")
        if parent not in recipe["gone"]:
            model.get_submodule(parent)._modules.pop(child, None)
    for name, first in ties(model).items():  # a tie that was cut
        if name != first and recipe["ties"].get(name, name) == name:
            parent, _, child = name.rpartition(".")
            model.get_submodule(parent)._parameters[child] = nn.Parameter(model.get_parameter(name).detach().clone())
    if any(isinstance(module, statistics.SplitNorm) for module in model.modules()):
        model.register_forward_pre_hook(statistics.begin_pass)
    weights = load_weights(path)
    weights |= {name: weights[first] for name, first in recipe["ties"].items() if first in weights}
    result = model.load_state_dict(weights, strict=False)
    if result.missing_keys or result.unexpected_keys:
        got = f"missing {result.missing_keys[:3]}, unexpected {result.unexpected_keys[:3]}"
        rule = "the factory makes the model the recipe was written for"
        raise StoreError("surgery.load", rule, got, "Give the same factory")
    return model


def ties(model: nn.Module) -> dict[str, str]:
    """Return the first name of the same parameter, for every name of a shared one."""
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: one for name, one in names if sum(other == one for _, other in names) > 1}


def _entry(module: nn.Module) -> dict[str, Any]:
    kind = type(module)
    over = next((layer for layer in (statistics.Frozen, statistics.Guarded) if isinstance(module, layer)), None)
    base = kind if over is None else kind.__mro__[2]
    own = {name: value for name, value in vars(module).items() if name == "training" or not name.startswith("_")}
    plain = {n: v for n, v in own.items() if all(isinstance(x, _PLAIN) for x in (v if isinstance(v, tuple) else (v,)))}
    held = {**module._parameters, **module._buffers}
    return {
        "class": f"{over.__name__ if over else ''}+{base.__module__}:{base.__qualname__}",
        "attributes": {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()},
        "shapes": {name: None if value is None else list(value.shape) for name, value in held.items()},
        "buffers": list(module._buffers),
    }


def _class(text: str) -> type[nn.Module] | None:
    over, _, path = text.partition("+")
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return statistics.class_over(getattr(statistics, over), found) if found is not None and over else found


def _rebuild(model: nn.Module, name: str, entry: dict[str, Any]) -> None:
    """Give a module the class, numbers and shapes the recipe says; what it had is kept where it fits."""
    parent, _, child = name.rpartition(".")
    old = dict(model.named_modules(remove_duplicate=False)).get(name)
    kind = _class(entry["class"])
    assert kind is not None
    if old is None or type(old) is not kind:
        new = kind.__new__(kind)
        nn.Module.__init__(new)
        new.__dict__.update({k: v for k, v in (vars(old) if old is not None else {}).items() if k not in new.__dict__})
        if old is not None:
            new._parameters, new._buffers, new._modules = old._parameters, old._buffers, old._modules
        model.get_submodule(parent)._modules[child] = new
        old = new
    fixed = {key: tuple(value) if isinstance(value, list) else value for key, value in entry["attributes"].items()}
    old.__dict__.update(fixed)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    for key in [key for key in (*old._parameters, *old._buffers) if key not in entry["shapes"]]:
        (old._parameters if key in old._parameters else old._buffers).pop(key)
    for key, shape in entry["shapes"].items():
        has = getattr(old, key, None)
        if shape is None or has is None or list(has.shape) != shape:
            dtype = torch.long if key == "num_batches_tracked" else like.dtype
            value = None if shape is None else torch.zeros(shape, dtype=dtype, device=like.device)
            if key in entry["buffers"]:
                old._parameters.pop(key, None)
                old.register_buffer(key, value)
            else:
                old.register_parameter(key, None if value is None else nn.Parameter(value))
