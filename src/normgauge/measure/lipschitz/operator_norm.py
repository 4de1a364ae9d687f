"""Norm of a linear layer as an operator, between two numbers that hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from normgauge.errors import CertificateError, InputError, NonFiniteError, unknown_name
from normgauge.linalg import (
    Convolution,
    peak_frequency,
    random_start_bound,
    symbol_bound,
    symbol_is_exact,
    top_singular_pair,
)
from normgauge.measure.lipschitz.linear_layer import LinearMap, read_layer
from normgauge.records import Reading
from normgauge.results import Result, instrument, spend

if TYPE_CHECKING:
    import altair

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


@dataclass(frozen=True)
class Bracket(Result):
    """The norm of a layer lies between `lower` and `upper`.

    Attributes:
        lower: norm of A v for one unit vector v, in float64: always a lower bound.
        upper: what the norm does not exceed, in the sense of `kind`.
        kind: certified (a theorem), probabilistic (fails with probability at most `delta` over the random start) or
            estimate (the Ritz value plus its residual, no guarantee).
        method: how `upper` was found.
        layer: the layer in words.
        input_shape: channels and spatial size the layer was measured on.
        reshaped: largest singular value of the weight as a matrix `[channels out, rest]`, which torch's spectral_norm
            uses; not the norm of a convolution. `None` where there is no weight.
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

    def chart(self) -> altair.TopLevelMixin:
        """Return the bracket as a bar from lower to upper, and the reshaped norm below it."""
        from normgauge.charts import intervals

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

    Returns:
        A `Bracket` with `.lower`, `.upper`, `.kind`.

    Raises:
        InputError: when the layer is not linear, the shape does not fit, or an option is out of range.
        NonFiniteError: when a weight is infinite or not a number.
        CertificateError: when a vector is stretched by more than the bound allows: nothing is certified then.

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


def bracket_of(
    map_: LinearMap,
    kind: BracketKind,
    *,
    steps: int | None,
    delta: float,
    start: Bracket | Tensor | None = None,
    seed: int = 0,
) -> Bracket:
    """Return the bracket of a linear map that has been read from a layer."""
    if map_.diagonal is not None:
        value = float(map_.diagonal.abs().max())
        return Bracket(
            value * (1 - _SLACK), value * (1 + _SLACK), "certified", "exact: diagonal", map_.name, map_.input_shape
        )
    operator = map_.operator
    assert operator is not None  # one of the two, by construction
    largest = float(operator.weight.abs().max())
    if not _SQUARES[0] < largest < _SQUARES[1] and 0 < largest < math.inf:
        factor = 2.0 ** (math.frexp(largest)[1] - 1)  # a power of two: nothing is rounded
        small = replace(map_, weight=map_.weight / factor, operator=operator.divided_by(factor))
        bracket = bracket_of(small, kind, steps=steps, delta=delta, start=start, seed=seed)
        sizes = {name: getattr(bracket, name) * factor for name in ("lower", "upper", "reshaped")}
        return replace(bracket, **sizes)
    reshaped = _reshaped_norm(map_.weight.to(map_.dtype))
    if float(operator.weight.abs().max()) == 0.0:
        return Bracket(
            lower=0.0,
            upper=0.0,
            kind="certified",
            method="exact: zero weight",
            layer=map_.name,
            input_shape=map_.input_shape,
            reshaped=reshaped,
        )
    exact = _exact_norm(operator)
    if exact is not None:
        value, method, frequencies = exact
        return Bracket(
            lower=value * (1 - 2 * _SLACK),
            upper=value,
            kind="certified",
            method=method,
            layer=map_.name,
            input_shape=map_.input_shape,
            reshaped=reshaped,
            frequencies=frequencies,
        )
    return _bracket(map_, operator, reshaped, kind, steps=steps, delta=delta, start=start, seed=seed)


def _exact_norm(operator: Convolution) -> tuple[float, str, int] | None:
    """Return the norm where it can be had exactly at once: a small matrix, or a symbol whose bound is attained."""
    if symbol_is_exact(operator):
        bound = symbol_bound(operator)
        return bound.value, "exact: symbol", bound.frequencies
    rows, columns = operator.shape
    if min(rows, columns) > _DENSE or rows * columns > _DENSE_ENTRIES:
        return None
    matrix = operator.matmat(torch.eye(columns, dtype=torch.float64, device=operator.device))
    gram = matrix @ matrix.T if rows <= columns else matrix.T @ matrix
    top = float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0.0).sqrt())
    return top * (1 + _SLACK), DENSE, 0


def _bracket(
    map_: LinearMap,
    operator: Convolution,
    reshaped: float,
    kind: BracketKind,
    *,
    steps: int | None,
    delta: float,
    start: Bracket | Tensor | None,
    seed: int,
) -> Bracket:
    vector = _start_vector(start, operator)
    if vector is not None and kind == "probabilistic":
        raise InputError(
            "operator_norm",
            "a probabilistic bound needs a random start",
            "start=",
            "Leave start out, or ask for kind='certified' or 'estimate'",
        )
    small = operator.shape[1] <= _SMALL
    count = steps or (5 if vector is not None else 60 if small or kind == "probabilistic" else 30)
    pair = top_singular_pair(operator, steps=count, start=vector, seed=seed, dtype=map_.dtype)
    if kind == "estimate":
        upper, method, factor, frequencies = pair.ritz + pair.residual, "Ritz value plus residual", 1.0, 0
        upper = max(upper, pair.rayleigh)
    else:
        side = operator @ pair.vector if operator.transposed else pair.vector
        bound = symbol_bound(operator, avoid=peak_frequency(operator, side), at_least=pair.rayleigh * (1 - _SLACK))
        upper, method, factor, frequencies = bound.value, "symbol on a torus", bound.factor, bound.frequencies
    if kind == "probabilistic":
        slack = _SINGLE_SLACK if map_.dtype == torch.float32 else _SLACK
        chance = random_start_bound(pair.ritz, operator.shape[1], count, delta) * (1 + slack)
        if chance < upper:
            upper, method, factor = chance, "Lanczos from a random start", 1.0
    if kind == "certified" and pair.rayleigh * (1 - _SLACK) > upper:
        raise CertificateError(
            f"operator_norm of {map_.name}",
            "no vector is stretched by more than the certified bound, so there is no bracket",
            f"{pair.rayleigh:.9g} and {upper:.9g} by the {method}",
            "Ask for kind='estimate', and report the layer",
        )
    return Bracket(
        lower=pair.rayleigh * (1 - _SLACK),
        upper=upper,
        kind=kind,
        method=method,
        layer=map_.name,
        input_shape=map_.input_shape,
        reshaped=reshaped,
        delta=delta if kind == "probabilistic" else None,
        factor=factor,
        steps=pair.steps,
        frequencies=frequencies,
        vector=pair.vector,
    )


def _start_vector(start: Bracket | Tensor | None, operator: Convolution) -> Tensor | None:
    vector = start.vector if isinstance(start, Bracket) else start
    if vector is None:
        return None
    if vector.numel() != operator.shape[1] or not bool(torch.isfinite(vector).all()) or not bool(vector.any()):
        raise InputError(
            "operator_norm",
            f"a start must be a finite, nonzero vector of {operator.shape[1]} entries, the layer's input",
            f"{vector.numel()} entries",
            "Start from a bracket of the same layer and input_shape, or leave start out",
        )
    return vector


def _reshaped_norm(weight: Tensor) -> float:
    matrix = weight.reshape(weight.shape[0], -1)
    if not bool(torch.isfinite(matrix).all()):
        raise NonFiniteError("operator_norm", "weights must be finite", "inf or nan", "Look at the step that made them")
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0.0).sqrt())
