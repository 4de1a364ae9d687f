"""A network by name under any normalizer: built in, published, a user's own factory, or a module in a file."""

import copy
import hashlib
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, ModelError, unknown_name
from normgauge.lab.imports import call_function, code_digests, describe_error, import_function
from normgauge.lab.models.gpt import gpt
from normgauge.lab.models.normalized import Normalized
from normgauge.lab.models.published import PUBLISHED
from normgauge.lab.models.small import SMALL, Factory
from normgauge.nn import init, registry
from normgauge.rng import generator
from normgauge.surgery import swap_norms

#: The arm of a network without a factory that keeps its own normalizers.
AS_BUILT = "as built"
#: Files that hold a whole module, as `torch.save(model, path)` writes it.
FILES = (".pt", ".pth")
FACTORIES: dict[str, Factory] = {**SMALL, "gpt": gpt, **PUBLISHED}
_KEPT: dict[str, nn.Module] = {}  # file -> the module of this process it was written from


def names() -> tuple[str, ...]:
    """Return the names of the built-in models."""
    return tuple(FACTORIES)


def build(
    model: str,
    norm: str,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    *,
    example: Tensor | None = None,
    **knobs: Any,
) -> nn.Module:
    """Build a model under a normalizer with weights that depend on the seed only, not on the normalizer.

    Weights have variance 2 / fan-in (1 / fan-in for dln and gpt); a module in a file has its own. The model is a
    built-in name, `package.module:factory` with `factory(norm, **knobs) -> nn.Module`, or `package.module:network` with
    `network() -> nn.Module` or a file of a module, whose normalizers are exchanged by `ng.swap_norms` on the `example`.
    "as built" leaves those as they are; "fixup" is a built-in residual network without normalizer, started by
    `init.fixup`; any other norm is a name of the normalizer registry.

    Raises:
        InputError: for unknown names, and a factory that cannot be imported or gives no module.
        ModelError: when a network without a factory cannot take the normalizer.
    """
    if norm == "fixup" and ":" not in model:
        return init.fixup(build(model, "none", shape, classes, seed, **knobs), seed=seed)
    if is_own(model):
        return _build_own(model, norm, seed, example, knobs)
    registry.get(norm)
    if model not in FACTORIES:
        raise unknown_name("model", model, FACTORIES, "Or pass package.module:factory")
    taken = inspect.signature(FACTORIES[model]).parameters
    for knob in (knob for knob in knobs if knob not in taken):
        raise unknown_name(f"knob of {model}", knob, list(taken)[3:], "Built-in models have these")
    network = FACTORIES[model](norm, shape, classes, **knobs)
    _draw_weights(network, seed, gain=1.0 if model in ("dln", "gpt") else math.sqrt(2.0))
    for part in network.modules():
        if isinstance(part, Normalized):
            part.wrap_weights()
    if registry.get(norm).placement == "weights":
        with torch.no_grad():
            network.eval()(torch.zeros(2, *shape))  # a spectral norm learns the size of its input at the first forward
        network.train()
    return network


def _draw_weights(network: nn.Module, seed: int, gain: float) -> None:
    """Fill weights with N(0, gain^2 / fan_in), embeddings with N(0, 1) and biases with zero, in the modules' order."""
    source = generator(seed)
    for table in (m for m in network.modules() if isinstance(m, nn.Embedding)):
        nn.init.normal_(table.weight, generator=source)
    layers = [m for m in network.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    for layer in layers:
        fan_in = layer.weight[0].numel()
        scale = (gain if layer is not layers[-1] else 1.0) / math.sqrt(fan_in)
        drawn = torch.randn(layer.weight.shape, generator=source) * scale
        with torch.no_grad():
            layer.weight.copy_(drawn)
            if layer.bias is not None:
                layer.bias.zero_()


def is_own(model: str) -> bool:
    """Say whether a model is a user's own: a function by its name, or a file."""
    return ":" in model or model.endswith(FILES)


def keep_model(network: nn.Module, folder: Path) -> str:
    """Write a module into a folder, named by its class and contents, and return the file, which `build` takes.

    The name of a module that cannot be written is known in this process only.
    """
    path = folder / f"{type(network).__name__}-{_contents_digest(network)}.pt"
    _KEPT[str(path)] = copy.deepcopy(network)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            torch.save(network, part)
            part.replace(path)
        except Exception:  # noqa: BLE001 (what pickle says of a lambda, a lock or a local class has many types)
            part.unlink(missing_ok=True)
    return str(path)


def is_everywhere(path: str) -> bool:
    """Say whether other processes can read a module that was kept: it is in its file, and its classes in modules."""
    kinds = map(type, _KEPT[path].modules())
    return Path(path).exists() and not any(kind.__module__ == "__main__" for kind in kinds)


def file_digests(path: str) -> dict[str, str]:
    """Return what the identity of a module in a file rests on: its contents, and the source of its own classes."""
    network = _load_module(path)
    digests = {path: _contents_digest(network)}
    names = {f"{kind.__module__}:__name__" for kind in map(type, network.modules())}
    for name in names if path not in _KEPT or is_everywhere(path) else ():
        digests |= code_digests(name)
    return digests


def _contents_digest(network: nn.Module) -> str:
    total = hashlib.sha256(str(network).encode())
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()[:12]


def _load_module(path: str) -> nn.Module:
    if path in _KEPT:
        return copy.deepcopy(_KEPT[path])
    rule, step = "the file holds a module that can be read here", "Write it by torch.save(model, path)"
    try:
        network = torch.load(path, weights_only=False, map_location="cpu")
    except Exception as error:
        raise InputError(f"model {path!r}", rule, describe_error(error), step) from error
    if not isinstance(network, nn.Module):
        raise InputError(f"model {path!r}", rule, type(network).__name__, step)
    return network


def takes_norm(path: str, knobs: Mapping[str, Any] = {}) -> bool:
    """Say whether a user's function builds a network under any normalizer, or one network as it is."""
    if path.endswith(FILES):
        return False
    function = import_function("model", path, "a function factory(norm)")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name not in knobs and p.kind is not p.KEYWORD_ONLY and p.kind is not p.VAR_KEYWORD for p in parameters)


def _build_own(path: str, norm: str, seed: int, example: Tensor | None, knobs: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(seed)
    given = takes_norm(path, knobs)
    if given:
        registry.get(norm)
    if path.endswith(FILES):
        if knobs:
            raise InputError(f"model {path!r}", "a module has no knobs", ", ".join(knobs), "Pass a factory")
        network = _load_module(path)
    else:
        network = call_function("model", path, "a function factory(norm)", *([norm] if given else []), **knobs)
    if not isinstance(network, nn.Module):
        rule = "the factory must return an nn.Module"
        raise InputError(f"model {path!r}", rule, type(network).__name__, "Return the model")
    if given or norm == AS_BUILT:
        return network
    if example is None:
        raise InputError(f"model {path!r}", "its normalizers are exchanged on some inputs", "none", "Pass example=...")
    done = swap_norms(network, norm, example=example)
    if not done.refused and norm != "none" and not done.rows:
        rule, step = "a network without a factory has normalizers to exchange", "Pass a factory(norm), or 'as built'"
        raise ModelError(f"model {path!r}", rule, "none", step)
    if done.refused:
        name, why = done.refused[0]
        rule = f"every normalizer of the model can be exchanged for {norm!r}"
        raise ModelError(f"model {path!r}", rule, f"{name}: {why}", f"Leave {norm} out")
    return done.model
