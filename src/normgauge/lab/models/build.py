"""A network by name under any normalizer: built in, published, or a user's own factory."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, ModelError, unknown_name
from normgauge.lab.imports import call_function, import_function
from normgauge.lab.models.gpt import gpt
from normgauge.lab.models.normalized import Normalized
from normgauge.lab.models.published import PUBLISHED
from normgauge.lab.models.small import SMALL, Factory
from normgauge.nn import init, registry
from normgauge.rng import generator
from normgauge.surgery import swap_norms

#: The arm of a network without a factory that keeps its own normalizers.
AS_BUILT = "as built"
FACTORIES: dict[str, Factory] = {**SMALL, "gpt": gpt, **PUBLISHED}


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

    Args:
        model: a built-in name, `package.module:factory` with `factory(norm) -> nn.Module`, or `package.module:network`
            with `network() -> nn.Module`, whose normalizers are exchanged by `ng.swap_norms`.
        norm: a name of the normalizer registry; "as built" leaves a network without a factory as it is; "fixup": a
            built-in residual network without normalizer, started by `init.fixup`.
        shape: the shape of one input.
        classes: the number of outputs.
        seed: draws the weights, the same ones for every normalizer (variance 2 / fan-in; 1 / fan-in for dln and gpt).
        example: some inputs, for a network without a factory.
        knobs: further arguments of the factory.

    Raises:
        UnknownNameError: when model or norm is not known.
        InputError: when a user's factory cannot be imported or gives no module.
        ModelError: when a network without a factory cannot take the normalizer.
    """
    if norm == "fixup" and ":" not in model:
        return init.fixup(build(model, "none", shape, classes, seed, **knobs), seed=seed)
    if ":" in model:
        return _build_from_factory(model, norm, seed, example, knobs)
    registry.get(norm)
    if model not in FACTORIES:
        raise unknown_name("model", model, FACTORIES, "Or pass package.module:factory")
    network = _call_built_in(model, norm, shape, classes, knobs)
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


def _call_built_in(model: str, norm: str, shape: tuple[int, ...], classes: int, knobs: Mapping[str, Any]) -> nn.Module:
    taken = inspect.signature(FACTORIES[model]).parameters
    for knob in knobs:
        if knob not in taken:
            raise unknown_name(f"knob of {model}", knob, list(taken)[3:], "Built-in models have these")
    return FACTORIES[model](norm, shape, classes, **knobs)


def takes_norm(path: str, knobs: Mapping[str, Any] = {}) -> bool:
    """Say whether a user's function builds a network under any normalizer, or one network as it is."""
    function = import_function("model", path, "a function factory(norm)")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name not in knobs and p.kind is not p.KEYWORD_ONLY and p.kind is not p.VAR_KEYWORD for p in parameters)


def _build_from_factory(path: str, norm: str, seed: int, example: Tensor | None, knobs: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(seed)
    given = takes_norm(path, knobs)
    if given:
        registry.get(norm)
    what = "a function factory(norm)"
    network = call_function("model", path, what, *([norm] if given else []), **knobs)
    if not isinstance(network, nn.Module):
        raise InputError(
            f"model {path!r}", "the factory must return an nn.Module", type(network).__name__, "Return the model"
        )
    if given or norm == AS_BUILT:
        return network
    if example is None:
        raise InputError(f"model {path!r}", "its normalizers are exchanged on some inputs", "none", "Pass example=...")
    done = swap_norms(network, norm, example=example)
    if done.refused:
        name, why = done.refused[0]
        rule = f"every normalizer of the model can be exchanged for {norm!r}"
        raise ModelError(f"model {path!r}", rule, f"{name}: {why}", f"Leave {norm} out")
    return done.model
