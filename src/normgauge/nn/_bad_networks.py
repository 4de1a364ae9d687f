"""Networks that are bad on purpose: ReLU nets with a prescribed Lipschitz constant or gradient."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.nn import registry


def cascade(
    widths: Sequence[int], sizes: Sequence[float], *, norm: str = "none", dtype: torch.dtype | None = None
) -> nn.Sequential:
    """Build the ReLU net whose layers truncate or pad with zeros, times a_k of `sizes`: `h_k = relu(a_k I h_{k-1})`.

    Without normalization, for r = min(widths) units that survive: `|h, x|_Lip = a_1 ... a_K` (S2 Theorem 6), the
    constant with respect to the input of layer i's ReLU is `a_{i+1} ... a_K` (S2 Theorem 13, eq (9)), and that with
    respect to the weights of layer i, at inputs with an active unit among those r, is `a_{i+1} ... a_K |h_{i-1}(x)|`.
    With a normalizer `norm` of the registry between each layer and its ReLU the same weights do not explode: the sizes
    cancel, up to eps. `widths` are those of the input and of every layer, `dtype` is that of the weights.

    Deviations: S2 eq (8) prints `|h_{i-1}(x)|` truncated to the widths above; each row of W_i sees all of h_{i-1}.

    Examples:
        Ten layers of size 10 stretch a positive input by 10^10:

        >>> net = cascade([3] * 11, [10.0] * 10)
        >>> [f"{value:.3e}" for value in net(torch.ones(3)).tolist()]
        ['1.000e+10', '1.000e+10', '1.000e+10']

    References: than2025
    """
    _check_widths(widths)
    if len(sizes) != len(widths) - 1 or not all(math.isfinite(size) and size >= 0 for size in sizes):
        rule = f"sizes must be {len(widths) - 1} finite numbers >= 0, one per layer"
        raise InputError("cascade", rule, str(list(sizes)), "Pass one size per pair of neighbouring widths")
    declaration = registry.get(norm)
    _check_room(sizes, norm, torch.get_default_dtype() if dtype is None else dtype)
    layers: list[nn.Module] = []
    for (fan_in, fan_out), size in zip(pairwise(widths), sizes, strict=True):
        layer = nn.utils.skip_init(nn.Linear, fan_in, fan_out, bias=False, dtype=dtype)
        with torch.no_grad():
            layer.weight.copy_(size * torch.eye(fan_out, fan_in, dtype=layer.weight.dtype))
        if declaration.placement == "weights":
            layer = declaration.wrap(layer)
        layers.append(layer)
        if declaration.placement == "activation":
            layers.append(declaration.layer(fan_out, 0).to(layer.weight.dtype))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def network_with_slope(
    slope: float, widths: Sequence[int], *, norm: str = "none", dtype: torch.dtype | None = None
) -> nn.Sequential:
    """Build a ReLU net whose Lipschitz constant is `slope`: a `cascade` of equal sizes `slope^(1/K)`.

    A slope far above 1 explodes, one far below 1 vanishes, and no weight shows it: at depth K each layer's norm is
    only `slope^(1/K)`. The constant is attained at every input that is positive in its first min(widths) entries.
    Arguments are those of `cascade`; with a norm the constant is no longer `slope`.

    Examples:
        >>> net = network_with_slope(1e6, [2, 4, 4, 3], dtype=torch.float64)
        >>> J = torch.func.jacrev(net)(torch.tensor([0.3, 0.7], dtype=torch.float64))
        >>> abs(float(torch.linalg.matrix_norm(J, 2).detach()) / 1e6 - 1) < 1e-14
        True

    References: than2025
    """
    _check_widths(widths)
    if not (math.isfinite(slope) and slope >= 0):
        raise InputError("network_with_slope", "slope must be a finite number >= 0", repr(slope), "Pass slope=1e6")
    depth = len(widths) - 1
    sizes = [slope ** (1 / depth)] * depth
    if slope > 0:  # the last one makes the product exact, not only the sizes equal
        sizes[-1] = slope / math.prod(sizes[:-1])
    return cascade(widths, sizes, norm=norm, dtype=dtype)


def network_with_gradient(
    size: float,
    widths: Sequence[int],
    batch: tuple[Tensor, Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    layer: int = 1,
) -> nn.Sequential:
    """Build a ReLU net with one output whose training loss has a gradient of norm `size` in the weights of one layer.

    The net is `c (1, ..., 1) h_K(x)` with h a `cascade` (S2 Theorem 15). For `W_i = V / b`, b = a_{i+1} ... a_K, the
    output does not depend on b, while `dL/dW_i = b dL/dV`: so b is chosen to give the gradient any size, exactly,
    with the same loss at every b. Layers above i have size `b^(1/(K-i))`, those below i size 1. A Linear without bias
    and a Flatten follow. Where the loss has no slope at these data there is no such net (InputError).

    Args:
        size: of the gradient, > 0: 1e12 explodes, 1e-12 vanishes.
        widths: of the input and of the layers 1, ..., K of the cascade, K > `layer`.
        batch: inputs `[m, widths[0]]`, whose dtype the net takes, and targets.
        loss: `loss(output, target)` with outputs `[m]`, a mean over samples.
        layer: i, counted from 1.

    Examples:
        >>> inputs, targets = torch.tensor([[1.0, 2.0], [3.0, 1.0]]).double(), torch.tensor([0.0, 1.0]).double()
        >>> loss = torch.nn.functional.mse_loss
        >>> net = network_with_gradient(1e9, [2, 3, 3, 2], (inputs, targets), loss)
        >>> loss(net(inputs), targets).backward()
        >>> abs(float(net[0].weight.grad.norm()) / 1e9 - 1) < 1e-9
        True

    References: than2025
    """
    _check_widths(widths)
    depth = len(widths) - 1
    if not (math.isfinite(size) and size > 0) or not 1 <= layer < depth:
        rule = f"size must be positive and layer lie between 1 and {depth - 1}, below the last layer"
        step = "Pass size=1e12 and more widths, or a lower layer"
        raise InputError("network_with_gradient", rule, f"size={size!r}, layer={layer!r}", step)
    inputs, targets = batch
    unit = _append_last_layer(cascade(widths, [1.0] * depth, dtype=inputs.dtype), widths[-1])
    variable = unit.get_parameter(f"{2 * (layer - 1)}.weight")
    norm = float(torch.autograd.grad(loss(unit(inputs), targets), variable)[0].norm())
    if not (math.isfinite(norm) and norm > 0):
        rule, got = "the loss must have a slope at these data", f"a gradient of norm {norm:g} for the net of unit sizes"
        step = "Pass inputs with positive entries among the first min(widths), or other targets"
        raise InputError("network_with_gradient", rule, got, step)
    above = depth - layer
    sizes = [1.0] * layer + [(size / norm) ** (1 / above)] * above
    sizes[layer - 1] = 1 / math.prod(sizes[layer:])
    return _append_last_layer(cascade(widths, sizes, dtype=inputs.dtype), widths[-1])


def _append_last_layer(body: nn.Sequential, width: int) -> nn.Sequential:
    """Append the last layer of ones and flatten its single output."""
    last = nn.utils.skip_init(nn.Linear, width, 1, bias=False, dtype=body[0].weight.dtype)
    with torch.no_grad():
        last.weight.fill_(1.0)
    return nn.Sequential(*body, last, nn.Flatten(0))


def _check_room(sizes: Sequence[float], norm: str, dtype: torch.dtype) -> None:
    """Refuse sizes whose values for an input of size 1, or whose slopes, the dtype turns into infinity or zero."""
    room = torch.finfo(dtype)
    logs = [math.log10(size) if size else 0.0 for size in sizes]
    # a normalizer starts anew at each layer, but takes squares; else what was gained adds up, from either end
    reached = [2 * log for log in logs] if norm != "none" else [*accumulate(logs), *accumulate(reversed(logs))]
    if not math.log10(room.tiny) < min(reached) <= max(reached) < math.log10(room.max):
        rule = f"{dtype} holds numbers from {room.tiny:.1e} to {room.max:.1e}, and the network must stay among them"
        got = f"values from 10^{min(reached):.1f} to 10^{max(reached):.1f}"
        step = "Pass dtype=torch.float64, or less extreme sizes" if dtype != torch.float64 else "Pass milder sizes"
        raise InputError("sizes", rule, got, step)


def _check_widths(widths: Sequence[int]) -> None:
    if len(widths) < 2 or not all(isinstance(width, int) and width > 0 for width in widths):
        rule = "a network needs the width of its input and of at least one layer, all positive"
        raise InputError("widths", rule, str(list(widths)), "Pass for example widths=[4, 8, 8, 3]")
