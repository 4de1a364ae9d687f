"""Initializations and controls without normalization; each changes a model in place, from a generator of its own.

A *weight layer* is a Linear, Conv or ConvTranspose layer. fan_in counts the entries one output reads (kernel positions
times input channels per group), fan_out the outputs one input reaches. Biases become zero. Normalizers keep their
parameters. A layer that stands in the model twice is drawn once.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from normgauge.errors import InputError, ModelError, NonFiniteError
from normgauge.rng import generator, preserved_rng

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WeightLayer = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)
_Draw = Callable[[Tensor, tuple[int, int], torch.Generator], Tensor]


def he(model: nn.Module, *, gain: float = math.sqrt(2.0), seed: int = 0) -> nn.Module:
    """Draw every weight from N(0, gain^2 / fan_in): the mean square of the signal is kept through ReLU.

    The gain is sqrt(2) for ReLU, 1 for the identity.

    Examples:
        >>> layer = he(torch.nn.Linear(400, 300))
        >>> abs(layer.weight.var().item() * 400 / 2 - 1) < 0.02
        True

    References: he2015.
    """
    return _fill(model, lambda weight, fans, draw: weight.normal_(0.0, gain / math.sqrt(fans[0]), generator=draw), seed)


def glorot(model: nn.Module, *, gain: float = 1.0, seed: int = 0) -> nn.Module:
    """Draw every weight uniformly with standard deviation gain sqrt(2 / (fan_in + fan_out)).

    Examples:
        >>> layer = glorot(torch.nn.Linear(400, 200))
        >>> abs(layer.weight.var().item() * 300 - 1) < 0.02
        True

    References: glorot2010.
    """

    def draw_one(weight: Tensor, fans: tuple[int, int], draw: torch.Generator) -> Tensor:
        half_width = gain * math.sqrt(6.0 / (fans[0] + fans[1]))
        return weight.uniform_(-half_width, half_width, generator=draw)

    return _fill(model, draw_one, seed)


def selu(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Draw every weight from N(0, 1 / fan_in), the initialization under which SELU keeps mean zero and variance one.

    Use with `torch.nn.SELU` (and `torch.nn.AlphaDropout`); a model without SELU is refused (ModelError), since with
    another activation this scale has no fixed point at variance one.

    Examples:
        >>> net = selu(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.SELU()))
        >>> abs(net[0].weight.var().item() * 300 - 1) < 0.02
        True

    References: klambauer2017.
    """
    if not any(isinstance(part, nn.SELU) for part in model.modules()):
        rule = "the model must contain SELU activations"
        raise ModelError("init.selu", rule, "none", "Use init.he for ReLU networks")
    return he(model, gain=1.0, seed=seed)


def orthogonal(model: nn.Module, *, gain: float = 1.0, seed: int = 0) -> nn.Module:
    """Make every weight, as a matrix `[output channels, rest]`, a random (semi-)orthogonal one times `gain`.

    Deviations: for a convolution with overlapping kernels the reshaped matrix is not the operator, so the layer is not
    an isometry; `delta_orthogonal` is one.

    Examples:
        >>> w = orthogonal(torch.nn.Linear(5, 3)).weight
        >>> bool(torch.allclose(w @ w.T, torch.eye(3), atol=1e-5))
        True

    References: saxe2014.
    """

    def draw_one(weight: Tensor, fans: tuple[int, int], draw: torch.Generator) -> Tensor:
        return weight.copy_(gain * _orthogonal(weight.shape[0], weight[0].numel(), draw).reshape(weight.shape))

    return _fill(model, draw_one, seed)


def delta_orthogonal(model: nn.Module, *, gain: float = 1.0, seed: int = 0) -> nn.Module:
    """Make every layer an isometry times `gain`: an orthogonal matrix at the kernel's centre, zero elsewhere.

    Exact for stride 1 and odd kernels with half padding, when channels do not decrease: the operator is then the same
    orthogonal matrix at every position. Linear layers are as in `orthogonal`; grouped or transposed convolutions and
    even kernels are refused (ModelError).

    References: xiao2018.
    """
    for layer in weight_layers(model):
        even = any(k % 2 == 0 for k in getattr(layer, "kernel_size", ()))
        if isinstance(layer, _TRANSPOSED) or getattr(layer, "groups", 1) != 1 or even:
            rule = "convolutions have odd kernels and groups=1"
            raise ModelError("init.delta_orthogonal", rule, repr(layer), "Use orthogonal")

    def draw_one(weight: Tensor, fans: tuple[int, int], draw: torch.Generator) -> Tensor:
        taps = weight.zero_().reshape(weight.shape[0], weight.shape[1], -1)  # odd kernels: the middle tap is the centre
        taps[:, :, taps.shape[2] // 2] = gain * _orthogonal(weight.shape[0], weight.shape[1], draw)
        return weight

    return _fill(model, draw_one, seed)


def _orthogonal(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    normal = torch.randn(max(rows, columns), min(rows, columns), generator=draw, dtype=torch.float64)
    basis, triangle = torch.linalg.qr(normal)
    basis = basis * triangle.diagonal().sign()  # without the signs the draw is not uniform
    return basis if rows >= columns else basis.T


def weight_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the Linear, Conv and ConvTranspose layers of a model, each once, in the order of `modules()`."""
    yield from (part for part in model.modules() if isinstance(part, WeightLayer))


def fans(layer: nn.Module) -> tuple[int, int]:
    """Return fan_in and fan_out of a weight layer, groups counted.

    Examples:
        >>> fans(torch.nn.Conv2d(4, 6, 3, groups=2))
        (18, 27)
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)  # for the type checker
    kernel = math.prod(weight.shape[2:])
    groups = int(getattr(layer, "groups", 1))
    if isinstance(layer, _TRANSPOSED):
        return weight.shape[0] // groups * kernel, weight.shape[1] * kernel
    return weight.shape[1] * kernel, weight.shape[0] // groups * kernel


def _fill(model: nn.Module, draw_one: _Draw, seed: int) -> nn.Module:
    """Fill all weights on the CPU, so that every device gets the same numbers, and zero the biases."""
    layers = list(weight_layers(model))
    if not layers:
        rule = "the model must have a Linear, Conv or ConvTranspose layer"
        raise ModelError("initialization", rule, type(model).__name__, "Pass the whole model")
    draw = generator(seed)
    for layer in layers:
        if parametrize.is_parametrized(layer, "weight"):
            got = f"{type(layer).__name__} with a weight normalizer"
            step = "Initialize first, then normalize the weights"
            raise InputError("initialization", "weights must be plain, not parametrized", got, step)
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)  # for the type checker
        with torch.no_grad():
            weight.copy_(draw_one(torch.empty(weight.shape, dtype=torch.float64), fans(layer), draw))
            if isinstance(bias, Tensor):
                bias.zero_()
    return model


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
    scalars of the paper; the architecture must contain them, this function does not add them. A model without block or
    head, or with a normalization layer, is refused (ModelError).

    References: zhang2019fixup.
    """
    for name, part in model.named_modules():
        if isinstance(part, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
            rule = "the network must have no normalization: Fixup replaces it"
            raise ModelError("init.fixup", rule, f"{type(part).__name__} at {name!r}", "Replace it by ScalarBias")
    residual_blocks = [part for part in model.modules() if (blocks or _looks_like_a_block)(part)]
    if not residual_blocks:
        rule = "the model needs residual blocks: children `branch`, or `conv1` and `conv2`"
        step = "Pass blocks=lambda module: isinstance(module, YourBlock)"
        raise ModelError("init.fixup", rule, f"none in {type(model).__name__}", step)
    he(model, seed=seed)
    inside: set[int] = set()
    with torch.no_grad():
        for block in residual_blocks:
            inside |= {id(layer) for layer in weight_layers(block)}
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
        return list(weight_layers(children["branch"]))
    kept = [child for name, child in children.items() if name not in ("skip", "shortcut", "downsample")]
    return [layer for child in kept for layer in weight_layers(child)]


def _head(model: nn.Module, name: str | None, inside: set[int]) -> nn.Module:
    named = dict(model.named_modules())
    if name is not None:
        if name not in named or not isinstance(named[name], WeightLayer):
            rule = "head names a weight layer of the model"
            raise ModelError("init.fixup", rule, repr(name), "Look at named_modules")
        return named[name]
    outside = [part for part in model.modules() if isinstance(part, nn.Linear) and id(part) not in inside]
    if not outside:
        raise ModelError("init.fixup", "the model needs a Linear head outside its blocks", "none", "Pass head='name'")
    return outside[-1]


def lsuv(
    model: nn.Module, inputs: Any, *, tolerance: float = 0.02, rounds: int = 10, gain: float = 1.0, seed: int = 0
) -> nn.Module:
    """Scale orthogonal weights, layer by layer, until each layer's output on `inputs` has variance gain^2.

    Every weight layer starts orthogonal; then, in the order in which the forward pass reaches them, its weight is
    divided by std(output) / gain until |var / gain^2 - 1| < tolerance. Biases are zero, so the variance is homogeneous
    and one division suffices unless a layer is reached several times. `inputs` are one batch: a tensor, a tuple of
    arguments or a mapping. A layer that is never reached, or whose output is constant, is refused (ModelError).

    Cost: at most `rounds` forward passes per layer, usually two. The model runs in its own mode; buffers (running
    statistics) and the global random state are as before.

    References: mishkin2016.
    """
    if not tolerance > 0 or rounds < 1 or not gain > 0:
        got = f"tolerance={tolerance}, rounds={rounds}, gain={gain}"
        raise InputError("init.lsuv", "tolerance, rounds and gain must be positive", got, "Leave them as they are")
    orthogonal(model, seed=seed)
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
    handle = layer.register_forward_hook(lambda _, __, out: variances.append(float(out.float().var(correction=0))))
    try:
        for _ in range(rounds):
            variances.clear()
            _run(model, inputs)
            variance = sum(variances) / len(variances)
            if not math.isfinite(variance):
                raise NonFiniteError("init.lsuv", "activations must be finite", "inf or nan", "Scale the inputs first")
            if variance == 0.0:
                step = "Use a larger batch, or inputs that are not all equal"
                rule = "every layer's output must vary over the batch"
                raise ModelError("init.lsuv", rule, f"a constant output of {layer}", step)
            if abs(variance / gain**2 - 1.0) < tolerance:
                return
            layer.weight.mul_(gain / math.sqrt(variance))  # type: ignore[operator]
    finally:
        handle.remove()


def _order_of_use(model: nn.Module, inputs: Any) -> list[nn.Module]:
    order: list[nn.Module] = []
    layers = list(weight_layers(model))
    handles = [layer.register_forward_pre_hook(lambda module, _: order.append(module)) for layer in layers]
    try:
        _run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    unique = list(dict.fromkeys(order))
    missed = [layer for layer in layers if layer not in unique]
    if missed:
        got, step = f"{len(missed)} never reached, the first {missed[0]}", "Pass the part of the model that runs"
        raise ModelError("init.lsuv", "the forward pass must reach every weight layer", got, step)
    return unique


def _run(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, dict):
        model(**inputs)
    else:
        model(*inputs if isinstance(inputs, tuple) else (inputs,))
