"""Weight normalizers for layers, on `torch.nn.utils.parametrize`.

Rows are output channels: axis 0 of Linear and Conv weights, the matching slices of ConvTranspose weights (torch takes
axis 0 for all). n counts the entries of a row. Assigning `layer.weight = w` stores a raw value whose normalized form is
w again if w lies where normalized weights live, and the normalized form of w otherwise. `module` is a Linear, Conv or
ConvTranspose throughout, `name` that of its weight, changed in place and returned. A module without such a weight,
one that is normalized already, and a weight without direction (a zero row) are refused by an InputError.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normgauge.errors import InputError
from normgauge.nn import functional, registry
from normgauge.nn._spectral import spectral_norm

Gain = Literal["none", "row"]
RELU_GAIN = math.sqrt(2.0 / (1.0 - 1.0 / math.pi))  # 1 / standard deviation of relu(standard normal)
RELU_MEAN, RELU_STD = math.sqrt(1 / (2 * math.pi)), math.sqrt((1 - 1 / math.pi) / 2)  # of relu(standard normal)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class RowParametrization(nn.Module):
    """Base of parametrizations that act on each output channel's weights as one vector."""

    centered = False

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.transposed = isinstance(layer, _TRANSPOSED)
        self.groups = int(getattr(layer, "groups", 1))

    def rows(self, weight: Tensor) -> Tensor:
        """Return the weight as `[output channels, entries]`."""
        if not self.transposed:
            return weight.flatten(1)
        grouped = weight.unflatten(0, (self.groups, -1)).transpose(1, 2)
        return grouped.reshape(self.groups * weight.shape[1], -1)

    def unrows(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return rows in the layout of the weight `like`."""
        if not self.transposed:
            return rows.reshape(like.shape)
        per_group = like.shape[0] // self.groups
        grouped = rows.reshape(self.groups, like.shape[1], per_group, *like.shape[2:])
        return grouped.transpose(1, 2).reshape(like.shape)


class WeightNorm(RowParametrization):
    """w = g v / ||v|| per row; `original0` is g, `original1` is v."""

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        """Return the normalized weight."""
        return self.unrows(functional.weight_norm(self.rows(v), g), v)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lengths and the weight itself."""
        return _lengths(self.rows(weight)), weight


class CenteredWeightNorm(RowParametrization):
    """w = (v - mean) / ||v - mean|| per row, times g (`original0`) with gain "row"."""

    centered = True

    def __init__(self, layer: nn.Module, gain: Gain) -> None:
        super().__init__(layer)
        self.gain = gain

    def forward(self, *originals: Tensor) -> Tensor:
        """Return the normalized weight."""
        rows = functional.centered_weight_norm(self.rows(originals[-1]))
        return self.unrows(_apply_gain(rows, originals), originals[-1])

    def right_inverse(self, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the weight, and with gain "row" first its centred lengths."""
        rows = self.rows(weight)
        lengths = _lengths(rows - rows.mean(1, keepdim=True), "a row must not be constant")
        return weight if self.gain == "none" else (lengths, weight)


class WeightStandardization(RowParametrization):
    """w = scale (v - mean) / sqrt(var + eps) per row, times g (`original0`) with gain "row"."""

    centered = True

    def __init__(self, layer: nn.Module, gain: Gain, eps: float, scale: float) -> None:
        super().__init__(layer)
        self.gain, self.eps, self.scale = gain, eps, scale

    def forward(self, *originals: Tensor) -> Tensor:
        """Return the normalized weight."""
        rows = functional.weight_standardization(self.rows(originals[-1]), self.eps)
        return self.unrows(_apply_gain(rows if self.scale == 1.0 else rows * self.scale, originals), originals[-1])

    def right_inverse(self, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the weight, and with gain "row" first the gain that gives it back."""
        rows = self.rows(weight)
        if self.gain == "none":
            return weight
        return (rows.var(1, correction=0) + self.eps).sqrt() / self.scale, weight


class UnitSphere(RowParametrization):
    """w = radius v / ||v|| per row."""

    def __init__(self, layer: nn.Module, radius: float) -> None:
        super().__init__(layer)
        self.length = radius

    def forward(self, v: Tensor) -> Tensor:
        """Return the normalized weight."""
        return self.unrows(functional.unit_sphere(self.rows(v), self.length), v)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the weight itself."""
        _lengths(self.rows(weight))
        return weight


class UnitColumns(RowParametrization):
    """w = v / ||v|| per input unit: columns of a matrix, all entries that one input channel reaches."""

    def forward(self, v: Tensor) -> Tensor:
        """Return the normalized weight."""
        return v / self._lengths(v)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the weight itself."""
        _lengths(self._lengths(weight).flatten()[:, None], "a column must not be zero")
        return weight

    def _lengths(self, v: Tensor) -> Tensor:
        axis = 0 if self.transposed else 1
        return torch.linalg.vector_norm(v, dim=[other for other in range(v.ndim) if other != axis], keepdim=True)


class Hyperball(RowParametrization):
    """w = R v / ||v|| for the whole tensor, R its norm when wrapped or assigned."""

    def __init__(self, layer: nn.Module, weight: Tensor) -> None:
        super().__init__(layer)
        self.length: Tensor
        self.register_buffer("length", torch.linalg.vector_norm(weight.detach()))

    def forward(self, v: Tensor) -> Tensor:
        """Return the normalized weight."""
        return v * (self.length / torch.linalg.vector_norm(v))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the weight itself, whose norm is the radius from now on."""
        self.length.copy_(_lengths(weight.detach().reshape(1, -1), "the weight must not be zero")[0])
        return weight


def _apply_gain(rows: Tensor, originals: tuple[Tensor, ...]) -> Tensor:
    return rows if len(originals) == 1 else rows * originals[0].unsqueeze(1)


def _lengths(rows: Tensor, rule: str = "a row must not be zero") -> Tensor:
    lengths = torch.linalg.vector_norm(rows, dim=1)
    if bool((lengths == 0).any()):
        number = int((lengths == 0).nonzero()[0])
        raise InputError("weight normalizer", f"{rule}: it has no direction", f"row {number}", "Initialize it first")
    return lengths


def weight_norm(module: nn.Module, name: str = "weight") -> nn.Module:
    """Reparametrize a layer's rows by length and direction, w = g v / ||v||, in place; the function stays the same.

    Row i lives on S^(n-1) of radius |g_i|, g_i learned: `parametrizations.weight.original0` is g, `original1` v. The
    raw direction v has a flat direction: its own length.

    Deviations: akbar2025 states invariance under (v, g) -> (a v, g / a); it is (v, g) -> (a v, g). See
    `normgauge.nn.functional.weight_norm`.

    Examples:
        >>> layer = torch.nn.Linear(3, 2)
        >>> before = layer.weight.detach().clone()
        >>> bool(torch.allclose(weight_norm(layer).weight, before))
        True

    References: salimans2016, sun2020.
    """
    return _attach(module, name, WeightNorm(module))


def centered_weight_norm(module: nn.Module, name: str = "weight", *, gain: Gain = "none") -> nn.Module:
    """Hold each row of a layer's weight at mean zero and length one, in place.

    Row i lives on S^(n-2), orthogonal to (1, ..., 1), of radius 1; with gain "row" of radius |g_i|, a learned length
    per output channel, which starts at the row's own. A constant row is refused.

    Examples:
        >>> layer = centered_weight_norm(torch.nn.Linear(5, 2))
        >>> bool(torch.allclose(layer.weight.sum(1), torch.zeros(2), atol=1e-6))
        True

    References: huang2017, sun2020.
    """
    _check_gain("centered_weight_norm", gain)
    return _attach(module, name, CenteredWeightNorm(module, gain))


def weight_standardization(
    module: nn.Module, name: str = "weight", *, gain: Gain = "none", eps: float = 1e-10
) -> nn.Module:
    """Hold each row of a layer's weight at mean zero and variance one, in place.

    Row i lives on S^(n-2), orthogonal to (1, ..., 1), of radius sqrt(n) for eps = 0 (added to the variance); with gain
    "row" times |g_i|, a learned factor per output channel, which starts at the row's standard deviation. Meant to stand
    before GroupNorm or BatchNorm: alone it multiplies the signal by about sqrt(n). Rows of one entry are refused.

    Deviations: qiao2019's code uses the unbiased deviation and eps = 1e-5 outside the root; sun2020 has neither.

    Examples:
        >>> layer = weight_standardization(torch.nn.Linear(5, 2))
        >>> bool(torch.allclose(layer.weight.var(1, correction=0), torch.ones(2), atol=1e-5))
        True

    References: qiao2019, sun2020.
    """
    _check_gain("weight_standardization", gain)
    return _attach(module, name, WeightStandardization(module, gain, eps, 1.0))


def scaled_weight_standardization(
    module: nn.Module, name: str = "weight", *, gamma: float = RELU_GAIN, eps: float = 1e-10
) -> nn.Module:
    """Hold each row at mean zero and length gamma |g_i|, in place: the control without activation statistics.

    w = gamma g (v - mean) / sqrt(n (var + eps)), g_i learned from 1. Row i lives on S^(n-2) of radius gamma |g_i|
    (for eps = 0). gamma is 1 / (standard deviation of the activation of a standard normal) for the activation before
    the layer, by default ReLU's sqrt(2 / (1 - 1 / pi)): inputs that are activations of unit Gaussians then give outputs
    of mean zero and variance one over the draw of the weights; training aligns weights with inputs, and it grows.

    Deviations: brock2021's code clamps n var at eps; here eps is added to var.

    Examples:
        >>> layer = scaled_weight_standardization(torch.nn.Linear(5, 2), gamma=1.0)
        >>> bool(torch.allclose(layer.weight.norm(dim=1), torch.ones(2), atol=1e-5))
        True

    References: brock2021.
    """
    rows = _weight_of(module, name, "scaled_weight_standardization")
    entries = RowParametrization(module).rows(rows).shape[1]
    _attach(module, name, WeightStandardization(module, "row", eps, gamma / math.sqrt(entries)))
    with torch.no_grad():  # the paper's start; assignment, in contrast, chooses the gain that gives back its value
        module.parametrizations[name].original0.fill_(1.0)  # type: ignore[index, union-attr]
    return module


def unit_sphere(module: nn.Module, name: str = "weight", *, radius: float = 1.0) -> nn.Module:
    """Hold each row of a layer's weight at one length, in place: a point of the oblique manifold.

    Row i lives on S^(n-1) of `radius`, which must be positive.

    Examples:
        >>> bool(torch.allclose(unit_sphere(torch.nn.Linear(5, 2)).weight.norm(dim=1), torch.ones(2)))
        True

    References: salimans2016, sun2020.
    """
    if not radius > 0:
        raise InputError("unit_sphere", "radius must be positive", repr(radius), "Use for example radius=1.0")
    return _attach(module, name, UnitSphere(module, radius))


def unit_columns(module: nn.Module, name: str = "weight") -> nn.Module:
    """Hold what each input of a layer sends out at length one, in place: a column of a matrix lives on S^(m-1).

    nGPT keeps every vector of the stream's width on the sphere: rows of matrices that read the stream (`unit_sphere`),
    columns of those that write to it.

    Examples:
        >>> bool(torch.allclose(unit_columns(torch.nn.Linear(5, 2)).weight.norm(dim=0), torch.ones(5)))
        True

    References: loshchilov2025.
    """
    return _attach(module, name, UnitColumns(module))


def hyperball(module: nn.Module, name: str = "weight") -> nn.Module:
    """Hold the whole weight at the norm it has, in place: `w = R v / ||v||`, a point of the sphere of radius R.

    The constraint of hyperball optimizers as a parametrization: any optimizer of v moves w on that sphere. They
    normalize the update as well, `theory.weight_dynamics.hyperball_equilibrium`.

    Examples:
        >>> layer = torch.nn.Linear(5, 2)
        >>> before = layer.weight.detach().clone()
        >>> bool(torch.allclose(hyperball(layer).weight, before))
        True

    References: wen2026.
    """
    return _attach(module, name, Hyperball(module, _weight_of(module, name, "Hyperball")))


class UnitRows(nn.Module):
    """`gain[i] * v[i] / ||v[i]||`; gains start where the mean square of the Jacobian is one after a rectifier."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((rows,), math.sqrt(1 - 1 / math.pi)))

    def forward(self, v: Tensor) -> Tensor:
        """Return the weight of the raw rows v."""
        return functional.weight_norm(v, self.gain)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return raw rows; their norm is forgotten, so that assigning a weight sets its directions only."""
        return weight


def norm_propagation(module: nn.Module, *, after: Literal["relu", "data"] = "relu") -> nn.Module:
    r"""Normalize a Linear or Conv layer by its weights and the moments of its input, without looking at data.

    `after` says what comes in: the output of a rectifier, or standardized data.
    `z_i = gain_i * v_i . xhat / ||v_i|| + bias_i` with `xhat = x` for standardized data, and
    `xhat = (x - c2) / c1`, `c1 = sqrt((1 - 1/pi) / 2)`, `c2 = sqrt(1 / (2 pi))` for the output of a rectifier: mean and
    standard deviation of max(0, u) for u ~ N(0, 1). If xhat has uncorrelated entries of mean 0 and variance 1, so has
    each z_i / gain_i mean 0 and variance 1.

    Deviations: arpit2016 standardizes after the rectifier; here the next layer does it to its input, which is the same
        map and leaves the activation alone. Zero padding then pads the standardized input, by its mean.

    Examples:
        >>> layer = norm_propagation(torch.nn.Linear(3, 2), after="data")
        >>> torch.allclose(layer.weight.norm(dim=1), torch.full((2,), (1 - 1 / math.pi) ** 0.5))
        True

    References: arpit2016.
    """
    if after not in ("relu", "data"):
        raise InputError("norm_propagation", "after is 'relu' or 'data'", repr(after), "Say what comes in")
    weight = _weight_of(module, "weight", "norm_propagation")
    rows = UnitRows(weight.shape[0]).to(weight.device, weight.dtype)
    parametrize.register_parametrization(module, "weight", rows)
    if after == "relu":
        module.register_forward_pre_hook(_standardize_rectified)
    return module


def _standardize_rectified(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return ((inputs[0] - RELU_MEAN) / RELU_STD, *inputs[1:])


def _attach(module: nn.Module, name: str, parametrization: RowParametrization) -> nn.Module:
    weight = _weight_of(module, name, type(parametrization).__name__)
    if parametrization.centered and parametrization.rows(weight).shape[1] < 2:
        functional.centered_weight_norm(parametrization.rows(weight))  # which explains
    parametrize.register_parametrization(module, name, parametrization)
    return module


def _weight_of(module: nn.Module, name: str, subject: str) -> Tensor:
    weight = getattr(module, name, None) if isinstance(module, nn.Module) else None
    if not isinstance(weight, Tensor) or weight.ndim < 2 or isinstance(weight, nn.UninitializedParameter):
        rule = f"the module must have a tensor {name!r} with at least two axes, as Linear and Conv have"
        raise InputError(subject, rule, type(module).__name__, "Wrap each Linear or Conv layer of the model itself")
    if parametrize.is_parametrized(module, name):
        step = "Take it off with torch.nn.utils.parametrize.remove_parametrizations first"
        raise InputError(subject, f"the {name} may carry one normalizer", "a layer that is parametrized already", step)
    return weight


def _check_gain(subject: str, gain: str) -> None:
    if gain not in ("none", "row"):
        raise InputError(subject, "gain is 'none' or 'row'", repr(gain), "Use one of them")


registry.declare("weight", parametrize=weight_norm)
registry.declare("centered_weight", parametrize=centered_weight_norm)
registry.declare("weight_standardization", parametrize=weight_standardization)
registry.declare("scaled_weight_standardization", parametrize=scaled_weight_standardization)
registry.declare("spectral", parametrize=spectral_norm)
registry.declare("unit_sphere", parametrize=unit_sphere)
registry.declare("unit_columns", parametrize=unit_columns)
registry.declare("hyperball", parametrize=hyperball)
registry.declare("norm_propagation", parametrize=norm_propagation)
