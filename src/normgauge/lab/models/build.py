"""A network by name under any normalizer: built in, published, or a user's own factory."""

from __future__ import annotations

import math

import torch
from torch import nn

from normgauge.errors import InputError, unknown_name
from normgauge.lab.imports import call_function
from normgauge.lab.models.gpt import gpt
from normgauge.lab.models.normalized import Normalized
from normgauge.lab.models.published import PUBLISHED
from normgauge.lab.models.small import SMALL, Factory
from normgauge.nn import registry
from normgauge.rng import generator

FACTORIES: dict[str, Factory] = {**SMALL, "gpt": gpt, **PUBLISHED}


def names() -> tuple[str, ...]:
    """Return the names of the built-in models."""
    return tuple(FACTORIES)


def build(model: str, norm: str, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """Build a model under a normalizer with weights that depend on the seed only, not on the normalizer.

    Args:
        model: a built-in name, or `package.module:factory` with `factory(norm) -> nn.Module`.
        norm: a name of the normalizer registry.
        shape: the shape of one input.
        classes: the number of outputs.
        seed: draws the weights, the same ones for every normalizer (variance 2 / fan-in; 1 / fan-in for dln and gpt).

    Raises:
        UnknownNameError: when model or norm is not known.
        InputError: when a user's factory cannot be imported or gives no module.
    """
    registry.get(norm)
    if ":" in model:
        return _build_from_factory(model, norm, seed)
    if model not in FACTORIES:
        raise unknown_name("model", model, FACTORIES, "Or pass package.module:factory")
    network = FACTORIES[model](norm, shape, classes)
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


def _build_from_factory(path: str, norm: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = call_function("model", path, "a function factory(norm)", norm)
    if not isinstance(network, nn.Module):
        raise InputError(
            f"model {path!r}", "the factory must return an nn.Module", type(network).__name__, "Return the model"
        )
    return network
