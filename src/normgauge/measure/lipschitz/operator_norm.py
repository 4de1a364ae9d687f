"""Norm of a linear layer as an operator, between two numbers that hold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from normgauge import linalg
from normgauge.charts import intervals
from normgauge.errors import CertificateError, InputError, ModelError, NonFiniteError, unknown_name
from normgauge.network import copy_model, fold_channels, stored_affine
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument, spend

BracketKind = Literal["certified", "probabilistic", "estimate"]
KINDS: tuple[str, ...] = get_args(BracketKind)
EXPANDING = 1.0  # a map of norm at most 1 brings no two inputs farther apart
SHORT = 1.01  # lower / reshaped: beyond rounding, dividing by the reshaped norm leaves an expansive layer
_SLACK = 1e-12  # relative, of float64 values
_SINGLE_SLACK = 1e-5  # relative, of a float32 Ritz value
DENSE = "exact: dense matrix"
_DENSE = 256  # a map with a side this short is written out as a matrix
_DENSE_ENTRIES = 2_000_000
_SQUARES = (1e-15, 1e15)  # weights whose squares, and sums of them, a float32 holds
_SMALL = 20_000  # inputs this short: steps are cheap next to the symbol, and the bracket is wider, so spend more
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Bracket(Result):
    """The norm of a layer lies between `lower` and `upper`.

    Attributes:
        lower: norm of A v for one unit vector v, in float64: always a lower bound.
        upper: what the norm does not exceed, in the sense of `kind`.
        kind: certified (a theorem), probabilistic (fails with probability at most `delta` over the random
            start) or estimate (the Ritz value plus its residual, no guarantee).
        method: how `upper` was found.
        layer: the layer in words.
        input_shape: channels and spatial size the layer was measured on.
        reshaped: largest singular value of the weight as a matrix `[channels out, rest]`, which torch's
            spectral_norm uses; not the norm of a convolution. `None` where there is no weight.
        delta: accepted probability of failure, if probabilistic.
        factor: part of `upper` that repeating padding or a coarse grid may have added.
        steps: products with the operator spent on `lower`.
        frequencies: frequencies looked at for `upper`.
        vector: right singular vector found, for a warm start of the next call (`start=`).
    """

    lower: float
    upper: float
    kind: BracketKind
    method: str
    layer: str
    input_shape: tuple[int, ...]
    reshaped: float | None = None
    delta: float | None = None
    factor: float = 1.0
    steps: int = 0
    frequencies: int = 0
    vector: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def gap(self) -> float:
        """Upper divided by lower: 1 when the norm is known exactly."""
        return self.upper / self.lower if self.lower > 0 else (1.0 if self.upper == 0 else math.inf)

    def _title(self) -> str:
        return f"operator norm of {self.layer} on {self.input_shape}"

    def _rows(self) -> list[dict[str, Any]]:
        return [{name: getattr(self, name) for name in ("layer", "lower", "upper", "gap", "reshaped", "kind")}]

    def readings(self) -> tuple[Reading, ...]:
        """Return the upper and the lower bound, and the norm of the reshaped weight."""
        upper = Reading("upper", self.upper, "estimate" if self.kind == "estimate" else "upper")
        reshaped = math.nan if self.reshaped is None else self.reshaped
        why = "there is no weight to reshape"
        return upper, Reading("lower", self.lower, "lower"), Reading.measured("reshaped", reshaped, why=why)

    def _meaning(self) -> str:
        said = f"The layer stretches an input by up to {self.lower:.4g} to {self.upper:.4g}"
        if self.upper <= EXPANDING:
            said += f", never by more than {EXPANDING:g}: alone it cannot make signals or gradients explode."
        elif self.lower > EXPANDING:
            said += f" (over {EXPANDING:g}): divide the weight by {self.upper:.4g} to make it non-expansive."
        else:
            said += f": whether by more than {EXPANDING:g} is open."
        if self.reshaped and self.lower > SHORT * self.reshaped:
            said += f" torch's spectral_norm would divide by {self.reshaped:.4g}, which is not enough."
        return said

    def _notes(self) -> str:
        chance = f", delta {self.delta:g} over the start" if self.delta is not None else ""
        loss = f", padding and grid factor {self.factor:.4g}" if self.factor > 1.0 else ""
        return f"{self.kind} by {self.method}{chance}{loss}; without bias; {self.frequencies} frequencies"

    def chart(self) -> Chart:
        """Return the bracket as a bar from lower to upper, and the reshaped norm below it."""
        rows = [{"norm": "of the layer", "value": self.upper, "low": self.lower, "high": self.upper}]
        if self.reshaped is not None:
            same = dict.fromkeys(("value", "low", "high"), self.reshaped)
            rows.append({"norm": "of the reshaped weight", **same})
        return intervals(rows, value="value", series="norm", low="low", high="high", title=self._title())


@instrument
def operator_norm(
    layer: nn.Module,
    input_shape: Sequence[int] | None = None,
    *,
    kind: BracketKind = "certified",
    iterations: int | None = None,
    delta: float = 1e-10,
    start: Bracket | Tensor | None = None,
    seed: int = 0,
) -> Bracket:
    """Bracket the norm of a linear layer as a map between its inputs and outputs of one size.

    ||A|| = max over x of ||A x|| / ||x||, the layer's Lipschitz constant, where A is what the layer does to inputs of
    `input_shape` with its stride, padding, dilation and groups, bias left out. BatchNorm in evaluation mode is the
    diagonal map weight / sqrt(running_var + eps); inside an `nn.Sequential` with one linear layer it is folded into
    that layer's weight, since ||diag(s) A|| is smaller than max|s| ||A||.

    Kind: `lower` is a Rayleigh value in float64. `upper` is certified (largest symbol norm on a torus the input fits
    in; exact for Linear, for circular padding and where a kernel does not overlap itself), or probabilistic (the
    smaller of that and of a bound that fails with probability `delta` over the random start), or an estimate (the
    Ritz value plus its residual; cheapest, no guarantee).
    Cost: `iterations` products with the layer and its adjoint on one input; certified: a Gram matrix and a Cholesky
    factorization per frequency. No gradient, no trace on the layer.

    Args:
        layer: Linear, Conv1d/2d/3d, ConvTranspose1d/2d/3d, BatchNorm in evaluation mode, or a Sequential of one linear
            layer and BatchNorms. Parametrized weights are read as they are used.
        input_shape: spatial size, or channels and spatial size, or those after a batch size. Not needed for Linear
            and BatchNorm.
        kind: certified, probabilistic or estimate.
        iterations: of the lower bound; by default 30, or 60 for a small input or a probabilistic bound, or 5 from a
            warm start.
        delta: probability of failure a probabilistic upper bound may have.
        start: an earlier bracket of the same shapes, or a right vector, to start from.
        seed: of the random start, drawn from a generator of our own.

    Deviations: `torch.nn.utils.parametrizations.spectral_norm` divides by the norm of the weight reshaped to a matrix
    (miyato2018 does the same). For a 3x3 convolution that is 0.36-0.80 of the operator norm, so the "1-Lipschitz"
    layer it makes is not; `.reshaped` shows the number.

    Examples:
        >>> layer = torch.nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular", bias=False)
        >>> _ = layer.weight.data.fill_(1 / 9)  # a mean filter: norm 1, at frequency zero
        >>> bracket = operator_norm(layer, (1, 8, 8))
        >>> abs(bracket.lower - 1) < 1e-7, abs(bracket.upper - 1) < 1e-7, round(bracket.reshaped, 3)
        (True, True, 0.333)

    References:
        sedghi2019, kuczynski1992, golub1965.
    """
    if kind not in KINDS:
        raise unknown_name("kind of bracket", str(kind), KINDS)
    if iterations is not None and (isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1):
        raise InputError("operator_norm", "iterations is a positive integer", repr(iterations), "Try iterations=30")
    if not 0 < delta < 1:
        raise InputError("operator_norm", "delta must lie in (0, 1)", repr(delta), "Try delta=1e-10")
    map_ = read_layer(layer, input_shape)
    bracket = bracket_of(map_, kind, steps=iterations, delta=delta, start=start, seed=seed)
    spend("gradients", bracket.steps)  # a step is a product with the layer and one with its adjoint
    spend("forwards", math.prod(map_.input_shape) if bracket.method == DENSE else 0)
    return replace(bracket, mode="eval")


@dataclass(frozen=True)
class LinearMap:
    """What a layer does to one input: an operator, or a diagonal of one factor per channel."""

    name: str  # the layer in words
    input_shape: tuple[int, ...]  # channels and spatial size
    weight: Tensor  # the folded weight, for the reshaped norm; factors per channel for BatchNorm alone
    operator: linalg.Convolution | None = None  # the map in float64, if it is not diagonal
    dtype: torch.dtype = torch.float64  # precision of the layer, in which iterations run


def read_layer(layer: nn.Module, input_shape: Sequence[int] | None) -> LinearMap:
    """Return the linear map of a layer on inputs of a shape, weights as used, without a trace on the layer."""
    parts = [part for part in _parts(layer) if not isinstance(part, nn.Identity)]
    linear = [part for part in parts if isinstance(part, _LINEAR)]
    norms = [part for part in parts if isinstance(part, _BatchNorm)]
    if len(linear) + len(norms) != len(parts) or len(linear) > 1 or not parts:
        rule = "the layer must be Linear, Conv, ConvTranspose or BatchNorm, or a Sequential of one of the first three "
        names = ", ".join(type(part).__name__ for part in parts) or "nothing"
        raise ModelError("operator_norm", f"{rule}with BatchNorms", names, "Measure the layers one by one")
    name = " + ".join(_describe(part) for part in parts)
    if not linear:
        total = torch.stack([stored_affine(part)[0] for part in norms]).prod(0)
        _check_finite(total, name)
        shape = tuple(input_shape) if input_shape is not None else (len(total),)
        if len(total) not in shape[:2]:
            got = f"input_shape {shape}"
            raise InputError(name, f"its input has {len(total)} channels", got, "Give channels first")
        return LinearMap(name, shape, total)
    main = linear[0]
    place = next(number for number, part in enumerate(parts) if part is main)
    # torch's spectral_norm iterates, and writes its buffers, whenever its weight is read in train mode
    source: Any = copy_model(main) if parametrize.is_parametrized(main) else main
    weight = source.weight.detach().clone()
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    if weight.is_complex():
        raise ModelError(name, "weights must be real", str(weight.dtype), "Split real and imaginary parts")
    _check_finite(weight, name)
    weight = weight.double()  # folding in the layer's precision would move the norm
    for number, part in enumerate(parts):
        if part is not main:
            weight = fold_channels(main, weight, stored_affine(part)[0], after=number > place)
    size = _spatial_size(main, input_shape)
    channels = main.in_features if isinstance(main, nn.Linear) else main.in_channels
    try:
        operator = linalg.Convolution.of(main, size, weight)
    except InputError as error:
        raise InputError(str(error).replace("Convolution", f"operator_norm of {name}", 1)) from error
    return LinearMap(name, (channels, *size), weight, operator, dtype)


def _parts(layer: nn.Module) -> list[nn.Module]:
    return [part for child in layer for part in _parts(child)] if isinstance(layer, nn.Sequential) else [layer]


def _describe(layer: Any) -> str:
    kind = type(layer).__name__.removeprefix("Parametrized")
    if isinstance(layer, nn.Linear):
        return f"{kind}({layer.in_features}, {layer.out_features})"
    if isinstance(layer, _BatchNorm):
        return f"{kind}({layer.num_features})"
    return f"{kind}({layer.in_channels}, {layer.out_channels}, {'x'.join(str(k) for k in layer.kernel_size)})"


def _check_finite(weight: Tensor, name: str) -> None:
    if not bool(torch.isfinite(weight).all()):
        step = "Look at the step that made them, or at the running variance"
        raise NonFiniteError(f"operator_norm of {name}", "weights must be finite", "inf or nan", step)


def _spatial_size(layer: Any, input_shape: Sequence[int] | None) -> tuple[int, ...]:
    """Return the spatial part of an input shape given with or without channels and batch."""
    name, shape = f"operator_norm of {_describe(layer)}", None if input_shape is None else tuple(input_shape)
    if isinstance(layer, nn.Linear):
        if shape is not None and shape[-1:] != (layer.in_features,):
            rule = f"its input ends with {layer.in_features} features"
            raise InputError(name, rule, f"input_shape {shape}", "Leave input_shape out")
        return ()
    axes, channels = len(layer.kernel_size), layer.in_channels
    example = f"input_shape=({channels}, {', '.join(['32'] * axes)})"
    if shape is None:
        rule = "the norm of a convolution depends on the size of its input"
        raise InputError(name, rule, "input_shape=None", f"Pass {example}, as the layer sees it in the network")
    valid = len(shape) in (axes, axes + 1, axes + 2) and (len(shape) == axes or shape[-axes - 1] == channels)
    if not valid or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        rule = f"input_shape is {axes} sizes, or {channels} channels and {axes} sizes"
        raise InputError(name, rule, str(shape), f"Pass for example {example}")
    return shape[-axes:]


def bracket_of(
    map_: LinearMap, kind: BracketKind, *, steps: int | None, delta: float, start: Any = None, seed: int = 0
) -> Bracket:
    """Return the bracket of a linear map that has been read from a layer."""
    operator, options = map_.operator, {"steps": steps, "delta": delta, "start": start, "seed": seed}
    largest = float(map_.weight.abs().max())
    if operator is None:
        ends = largest * (1 - _SLACK), largest * (1 + _SLACK)
        return Bracket(*ends, "certified", "exact: diagonal", map_.name, map_.input_shape)
    largest = float(operator.weight.abs().max())
    if not _SQUARES[0] < largest < _SQUARES[1] and 0 < largest < math.inf:
        factor = 2.0 ** (math.frexp(largest)[1] - 1)  # a power of two: nothing is rounded
        small = replace(map_, weight=map_.weight / factor, operator=operator.divided_by(factor))
        bracket = bracket_of(small, kind, **options)
        return replace(bracket, **{name: getattr(bracket, name) * factor for name in ("lower", "upper", "reshaped")})
    flat = map_.weight.to(map_.dtype).flatten(1)
    _check_finite(flat, map_.name)
    exact = _exact_norm(operator) if largest else (0.0, "exact: zero weight", 0)
    if exact is None:
        return replace(_bracket(map_, operator, kind, **options), reshaped=_spectral(flat))
    value, method, frequencies = exact
    ends = value * (1 - 2 * _SLACK), value
    known = Bracket(*ends, "certified", method, map_.name, map_.input_shape)
    return replace(known, reshaped=_spectral(flat), frequencies=frequencies)


def _spectral(matrix: Tensor) -> float:
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0.0).sqrt())


def _exact_norm(operator: linalg.Convolution) -> tuple[float, str, int] | None:
    """Return the norm where it can be had exactly at once: a small matrix, or a symbol whose bound is attained."""
    if linalg.symbol_is_exact(operator):
        bound = linalg.symbol_bound(operator)
        return bound.value, "exact: symbol", bound.frequencies
    rows, columns = operator.shape
    if min(rows, columns) > _DENSE or rows * columns > _DENSE_ENTRIES:
        return None
    matrix = operator.matmat(torch.eye(columns, dtype=torch.float64, device=operator.device))
    return _spectral(matrix) * (1 + _SLACK), DENSE, 0


def _bracket(
    map_: LinearMap, operator: linalg.Convolution, kind: BracketKind, *, steps: Any, delta: float, start: Any, seed: int
) -> Bracket:
    vector = _start_vector(start, operator)
    if vector is not None and kind == "probabilistic":
        step = "Leave start out, or ask for kind='certified' or 'estimate'"
        raise InputError("operator_norm", "a probabilistic bound needs a random start", "start=", step)
    small = operator.shape[1] <= _SMALL
    count = steps or (5 if vector is not None else 60 if small or kind == "probabilistic" else 30)
    pair = linalg.top_singular_pair(operator, steps=count, start=vector, seed=seed, dtype=map_.dtype)
    lower = pair.rayleigh * (1 - _SLACK)
    if kind == "estimate":
        upper, method, factor, frequencies = pair.ritz + pair.residual, "Ritz value plus residual", 1.0, 0
        upper = max(upper, pair.rayleigh)
    else:
        side = operator @ pair.vector if operator.transposed else pair.vector
        bound = linalg.symbol_bound(operator, avoid=linalg.peak_frequency(operator, side), at_least=lower)
        upper, method, factor, frequencies = bound.value, "symbol on a torus", bound.factor, bound.frequencies
    if kind == "probabilistic":
        slack = _SINGLE_SLACK if map_.dtype == torch.float32 else _SLACK
        chance = linalg.random_start_bound(pair.ritz, operator.shape[1], count, delta) * (1 + slack)
        if chance < upper:
            upper, method, factor = chance, "Lanczos from a random start", 1.0
    if kind == "certified" and lower > upper:
        rule = "no vector is stretched by more than the certified bound, so there is no bracket"
        got = f"{pair.rayleigh:.9g} and {upper:.9g} by the {method}"
        step = "Ask for kind='estimate', and report the layer"
        raise CertificateError(f"operator_norm of {map_.name}", rule, got, step)
    bracket = Bracket(lower, upper, kind, method, map_.name, map_.input_shape, factor=factor, steps=pair.steps)
    return replace(
        bracket, delta=delta if kind == "probabilistic" else None, frequencies=frequencies, vector=pair.vector
    )


def _start_vector(start: Bracket | Tensor | None, operator: linalg.Convolution) -> Tensor | None:
    vector = start.vector if isinstance(start, Bracket) else start
    size = operator.shape[1]
    if vector is not None and (vector.numel() != size or not bool(torch.isfinite(vector).all()) or not vector.any()):
        rule = f"a start must be a finite, nonzero vector of {size} entries, the layer's input"
        step = "Start from a bracket of the same layer and input_shape, or leave start out"
        raise InputError("operator_norm", rule, f"{vector.numel()} entries", step)
    return vector
