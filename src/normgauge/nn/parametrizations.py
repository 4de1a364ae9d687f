"""Weight normalizers for layers, on `torch.nn.utils.parametrize`, and the facts the register declares about them.

Rows are output channels: axis 0 of Linear and Conv weights, the matching slices of ConvTranspose weights. Assigning
`layer.weight = w` stores a raw value whose normalized form is w again if w lies where normalized weights live, and
the normalized form of w otherwise. `module` is a Linear, Conv or ConvTranspose throughout, `name` that of its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normgauge.errors import InputError
from normgauge.nn import registry
from normgauge.nn._rows import (
    CenteredWeightNorm,
    Gain,
    Hyperball,
    RowParametrization,
    UnitColumns,
    UnitSphere,
    WeightNorm,
    WeightStandardization,
)
from normgauge.nn._spectral import spectral_norm
from normgauge.nn.functional._weights import centered_weight_norm as centered_weight_norm_of_rows

RELU_GAIN = math.sqrt(2.0 / (1.0 - 1.0 / math.pi))  # 1 / standard deviation of relu(standard normal)


def weight_norm(module: nn.Module, name: str = "weight") -> nn.Module:
    """Reparametrize a layer's rows by length and direction, w = g v / ||v||, in place; the function stays the same.

    Row i lives on S^(n-1) of radius |g_i| (n entries per row), g_i learned. The raw direction v has a flat direction:
    its own length. Rows are output channels, also for ConvTranspose (torch takes axis 0 for all).

    Returns:
        The same module, with `parametrizations.weight.original0` = g and `original1` = v.

    Raises:
        InputError: when the module has no such weight, is normalized already, or a row is zero.

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

    Row i lives on S^(n-2), orthogonal to (1, ..., 1), of radius 1, or |g_i| with gain "row".

    Args:
        module: to wrap.
        name: of its weight.
        gain: "none", or "row" for a learned length per output channel, which starts at the row's own.

    Raises:
        InputError: when the module has no such weight, is normalized already, or a row is constant.

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

    Row i lives on S^(n-2), orthogonal to (1, ..., 1), of radius sqrt(n) for eps = 0, times |g_i| with gain "row".
    Meant to stand before GroupNorm or BatchNorm: alone it multiplies the signal by about sqrt(n).

    Args:
        module: to wrap.
        name: of its weight.
        gain: "none", or "row" for a learned factor per output channel, which starts at the row's standard deviation.
        eps: added to the variance.

    Raises:
        InputError: when the module has no such weight, is normalized already, or rows have a single entry.

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
    (for eps = 0). With gamma = 1 / (standard deviation of the activation of a standard normal), the default is that
    of ReLU, sqrt(2 / (1 - 1 / pi)), inputs that are activations of unit Gaussians give outputs of mean zero and
    variance one over the draw of the weights; training aligns weights with inputs, and the variance then grows.

    Args:
        module: to wrap.
        name: of its weight.
        gamma: gain of the activation before the layer.
        eps: added to the variance.

    Raises:
        InputError: when the module has no such weight, is normalized already, or rows have a single entry.

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

    Row i lives on S^(n-1) of `radius`.

    Args:
        module: to wrap.
        name: of its weight.
        radius: of every row.

    Raises:
        InputError: when the module has no such weight, is normalized already, a row is zero, or radius is not positive.

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

    Raises:
        InputError: when the module has no such weight, is normalized already, or a column is zero.

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

    Raises:
        InputError: when the module has no such weight, is normalized already, or the weight is zero.

    Examples:
        >>> layer = torch.nn.Linear(5, 2)
        >>> before = layer.weight.detach().clone()
        >>> bool(torch.allclose(hyperball(layer).weight, before))
        True

    References: wen2026.
    """
    return _attach(module, name, Hyperball(module, _weight_of(module, name, "Hyperball")))


def _attach(module: nn.Module, name: str, parametrization: RowParametrization) -> nn.Module:
    weight = _weight_of(module, name, type(parametrization).__name__)
    if parametrization.centered and parametrization.rows(weight).shape[1] < 2:
        centered_weight_norm_of_rows(parametrization.rows(weight))  # which explains
    parametrize.register_parametrization(module, name, parametrization)
    return module


def _weight_of(module: nn.Module, name: str, subject: str) -> Tensor:
    weight = getattr(module, name, None) if isinstance(module, nn.Module) else None
    if not isinstance(weight, Tensor) or weight.ndim < 2 or isinstance(weight, nn.UninitializedParameter):
        raise InputError(
            subject,
            f"the module must have a tensor {name!r} with at least two axes, as Linear and Conv have",
            type(module).__name__,
            "Wrap each Linear or Conv layer of the model itself",
        )
    if parametrize.is_parametrized(module, name):
        raise InputError(
            subject,
            f"the {name} may carry one normalizer",
            "a layer that is parametrized already",
            "Take it off with torch.nn.utils.parametrize.remove_parametrizations first",
        )
    return weight


def _check_gain(subject: str, gain: str) -> None:
    if gain not in ("none", "row"):
        raise InputError(subject, "gain is 'none' or 'row'", repr(gain), "Use one of them")


def _declare(builder: Callable[[nn.Module], nn.Module], name: str, title: str, formula: str, **facts: Any) -> None:
    """Declare a weight normalizer; `lives` says where its weights are, `says` what else there is to say."""
    says = facts.pop("says", "The same map in training and evaluation.")
    registry.register(
        registry.Declaration(
            name=name,
            title=title,
            formula=formula,
            placement="weights",
            statistics="weights",
            axes=facts.pop("axes", "entries of each row of the weights"),
            behaviour=f"{says} Lives: {facts.pop('lives')}.",
            parametrize=builder,
            **facts,
        )
    )


def _scale(per: registry.Per = "row", **options: Any) -> registry.Invariance:
    return registry.Invariance("weights", "scale", per, **options)


_SHIFT = registry.Invariance("weights", "shift", "row")
_declare(
    weight_norm,
    "weight",
    "weight normalization",
    r"w_i = g_i \frac{v_i}{\lVert v_i \rVert_2}",
    lives="row i on S^(n-1), radius |g_i|",
    cite=("salimans2016", "sun2020"),
    invariances=(_scale(),),
    says="The same map in training and evaluation; g starts at the row's length, so wrapping changes nothing at first. "
    "Not invariant to (a v, g / a): that divides the row by a.",
)
_declare(
    centered_weight_norm,
    "centered_weight",
    "centred weight normalization",
    r"w_i = \frac{v_i - \bar v_i}{\lVert v_i - \bar v_i \rVert_2}",
    lives="row i on S^(n-2) orthogonal to (1, ..., 1), radius 1",
    cite=("huang2017", "sun2020"),
    invariances=(_scale(), _SHIFT),
)
_declare(
    weight_standardization,
    "weight_standardization",
    "weight standardization",
    r"w_i = \frac{v_i - \bar v_i}{\sqrt{\operatorname{var} v_i + \epsilon}}",
    lives="row i on S^(n-2) orthogonal to (1, ..., 1), radius sqrt(n) for eps = 0",
    cite=("qiao2019", "sun2020"),
    invariances=(_scale(exact=False), _SHIFT),
    says="The same map in training and evaluation; stands before an activation normalizer.",
)
_declare(
    scaled_weight_standardization,
    "scaled_weight_standardization",
    "scaled weight standardization",
    r"w_i = \gamma\, g_i \frac{v_i - \bar v_i}{\sqrt{n (\operatorname{var} v_i + \epsilon)}}",
    lives="row i on S^(n-2) orthogonal to (1, ..., 1), radius gamma |g_i| for eps = 0",
    cite=("brock2021",),
    invariances=(_scale(exact=False), _SHIFT),
    says="The same map in training and evaluation; a control that needs no activation statistics.",
)
_declare(
    spectral_norm,
    "spectral",
    "spectral normalization by the true operator norm",
    r"W = V / \lVert x \mapsto V * x \rVert_2",
    axes="all weights of the layer, through its largest singular value as an operator",
    lives="the tensor on the unit sphere of the operator norm",
    cite=("miyato2018", "sun2020"),
    invariances=(_scale("tensor"),),
    says="One power iteration per training forward, none in evaluation; a convolution learns its input size at the "
    "first forward.",
    detached=True,  # the iterated vector is a constant in the gradient
)
_declare(
    unit_sphere,
    "unit_sphere",
    "rows on the unit sphere (oblique)",
    r"w_i = \frac{v_i}{\lVert v_i \rVert_2}",
    lives="row i on S^(n-1), radius 1",
    cite=("salimans2016", "sun2020"),
    invariances=(_scale(),),
)
_declare(
    unit_columns,
    "unit_columns",
    "columns on the unit sphere",
    r"W_{\cdot j} = \frac{V_{\cdot j}}{\lVert V_{\cdot j} \rVert_2}",
    axes="entries of each column of the weights, those of one input",
    lives="column j on S^(m-1), radius 1",
    cite=("loshchilov2025",),
    invariances=(_scale("column", flips=False),),
    says="The same map in training and evaluation; for matrices that write to a stream, as nGPT has them.",
)
_declare(
    hyperball,
    "hyperball",
    "the weights of a layer on a sphere (hyperball)",
    r"W = R \frac{V}{\lVert V \rVert_F}",
    axes="all weights of the layer",
    lives="the tensor on a sphere of the radius it had when wrapped",
    cite=("wen2026",),
    invariances=(_scale("tensor"),),
    says="The same map in training and evaluation; wrapping changes nothing at first.",
)
