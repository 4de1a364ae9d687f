"""Initializations that look at the network: Fixup (residual branches) and LSUV (data)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, ModelError, NonFiniteError
from normgauge.nn import _init_draws as draws
from normgauge.rng import preserved_rng


class ScalarBias(nn.Module):
    """x + b with one learned number b, zero at first: what Fixup puts before each weight layer and activation."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return x + b."""
        return x + self.value


class ScalarScale(nn.Module):
    """a x with one learned number a, one at first: what Fixup puts at the end of each residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return a x."""
        return x * self.value


def fixup(
    model: nn.Module, *, blocks: Callable[[nn.Module], bool] | None = None, head: str | None = None, seed: int = 0
) -> nn.Module:
    """Initialize a residual network without normalization so that one step changes its output by O(rate) at any depth.

    With L residual blocks and m weight layers in a block's branch: the last weight layer of each branch is zero, the
    others are He times L^(-1 / (2 m - 2)), the head is zero, everything else (stem, shortcuts) is He.

    Conventions: a block is a module for which `blocks(module)` is true; by default one with a child named `branch` or
    `skip`, or with children `conv1` and `conv2` (torchvision). Its branch is the child `branch`, or all of it except
    children named `skip`, `shortcut` or `downsample`. Weight layers count in the order of registration. The head is
    the last Linear outside the blocks, or the layer named `head`. `ScalarBias` and `ScalarScale` are the learned
    scalars of the paper; the architecture must contain them, this function does not add them.

    Args:
        model: changed in place; without normalization layers.
        blocks: predicate that says which modules are residual blocks.
        head: name of the output layer.
        seed: of the generator.

    Raises:
        ModelError: when no block or no head is found, a branch has no weight layer, or a normalization layer is there.

    References: zhang2019fixup.
    """
    _refuse_normalizers(model)
    is_block = blocks or _looks_like_a_block
    residual_blocks = [part for part in model.modules() if is_block(part)]
    if not residual_blocks:
        raise ModelError(
            "init.fixup",
            "the model needs residual blocks: children `branch`, or `conv1` and `conv2`",
            f"none in {type(model).__name__}",
            "Pass blocks=lambda module: isinstance(module, YourBlock)",
        )
    draws.he(model, seed=seed)
    inside: set[int] = set()
    with torch.no_grad():
        for block in residual_blocks:
            inside |= {id(layer) for layer in draws.weight_layers(block)}
            layers = _branch_layers(block)
            if not layers:
                raise ModelError("init.fixup", "a branch needs a weight layer", type(block).__name__, "Check `blocks`")
            for layer in layers[:-1]:
                layer.weight.mul_(len(residual_blocks) ** (-1.0 / (2 * len(layers) - 2)))  # type: ignore[operator]
            layers[-1].weight.zero_()  # type: ignore[operator]
        _head(model, head, inside).weight.zero_()  # type: ignore[operator]
    return model


def _looks_like_a_block(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return "branch" in children or "skip" in children or {"conv1", "conv2"} <= set(children)


def _branch_layers(block: nn.Module) -> list[nn.Module]:
    children = dict(block.named_children())
    if "branch" in children:
        return list(draws.weight_layers(children["branch"]))
    kept = [child for name, child in children.items() if name not in ("skip", "shortcut", "downsample")]
    return [layer for child in kept for layer in draws.weight_layers(child)]


def _head(model: nn.Module, name: str | None, inside: set[int]) -> nn.Module:
    named = dict(model.named_modules())
    if name is not None:
        if name not in named or not isinstance(named[name], draws.WeightLayer):
            raise ModelError(
                "init.fixup", "head names a weight layer of the model", repr(name), "Look at named_modules"
            )
        return named[name]
    outside = [part for part in model.modules() if isinstance(part, nn.Linear) and id(part) not in inside]
    if not outside:
        raise ModelError("init.fixup", "the model needs a Linear head outside its blocks", "none", "Pass head='name'")
    return outside[-1]


def _refuse_normalizers(model: nn.Module) -> None:
    from torch.nn.modules.batchnorm import _NormBase

    kinds = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    for name, part in model.named_modules():
        if isinstance(part, kinds):
            raise ModelError(
                "init.fixup",
                "the network must have no normalization: Fixup replaces it",
                f"{type(part).__name__} at {name!r}",
                "Replace it by ScalarBias",
            )


def lsuv(
    model: nn.Module, inputs: Any, *, tolerance: float = 0.02, rounds: int = 10, gain: float = 1.0, seed: int = 0
) -> nn.Module:
    """Scale orthogonal weights, layer by layer, until each layer's output on `inputs` has variance gain^2.

    Every weight layer starts orthogonal; then, in the order in which the forward pass reaches them, its weight is
    divided by std(output) / gain until |var / gain^2 - 1| < tolerance.

    Cost: at most `rounds` forward passes per layer, usually two. The model runs in its own mode; buffers (running
    statistics) and the global random state are as before.

    Args:
        model: changed in place.
        inputs: one batch: a tensor, a tuple of arguments or a mapping of keyword arguments.
        tolerance: of the variance.
        rounds: most passes per layer.
        gain: standard deviation aimed at.
        seed: of the orthogonal start.

    Raises:
        ModelError: when a layer is never reached, or its output is constant.
        InputError: when tolerance or rounds are not positive.

    Biases are zero, so the variance is homogeneous and one division suffices unless a layer is reached several times.

    References: mishkin2016.
    """
    if not tolerance > 0 or rounds < 1 or not gain > 0:
        raise InputError(
            "init.lsuv",
            "tolerance, rounds and gain must be positive",
            f"tolerance={tolerance}, rounds={rounds}, gain={gain}",
            "Leave them at their defaults",
        )
    draws.orthogonal(model, seed=seed)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), preserved_rng():
        try:
            for layer in _order_of_use(model, inputs):
                _scale_layer(model, inputs, layer, tolerance, rounds, gain)
        finally:
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    return model


def _scale_layer(model: nn.Module, inputs: Any, layer: nn.Module, tolerance: float, rounds: int, gain: float) -> None:
    variances: list[float] = []
    handle = layer.register_forward_hook(
        lambda _, __, output: variances.append(float(output.float().var(correction=0)))
    )
    try:
        for _ in range(rounds):
            variances.clear()
            _run(model, inputs)
            variance = sum(variances) / len(variances)
            if not math.isfinite(variance):
                raise NonFiniteError("init.lsuv", "activations must be finite", "inf or nan", "Scale the inputs first")
            if variance == 0.0:
                raise ModelError(
                    "init.lsuv",
                    "every layer's output must vary over the batch",
                    f"a constant output of {layer}",
                    "Use a larger batch, or inputs that are not all equal",
                )
            if abs(variance / gain**2 - 1.0) < tolerance:
                return
            layer.weight.mul_(gain / math.sqrt(variance))  # type: ignore[operator]
    finally:
        handle.remove()


def _order_of_use(model: nn.Module, inputs: Any) -> list[nn.Module]:
    order: list[nn.Module] = []
    layers = list(draws.weight_layers(model))
    handles = [layer.register_forward_pre_hook(lambda module, _: order.append(module)) for layer in layers]
    try:
        _run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    unique = list(dict.fromkeys(order))
    missed = [layer for layer in layers if layer not in unique]
    if missed:
        raise ModelError(
            "init.lsuv",
            "the forward pass must reach every weight layer",
            f"{len(missed)} never reached, the first {missed[0]}",
            "Pass the part of the model that runs",
        )
    return unique


def _run(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, dict):
        model(**inputs)
    elif isinstance(inputs, tuple):
        model(*inputs)
    else:
        model(inputs)
