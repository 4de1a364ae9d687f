"""Complexity measures people compare networks by, each tested: does it move when only the weights' scale does?"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.measure.curvature.edge import bisect
from normgauge.measure.generalization.network_copy import Forward, LayerCalls, strip_normalizers
from normgauge.measure.lipschitz.operator_norm import operator_norm
from normgauge.network import activation_name
from normgauge.objective import call_purely
from normgauge.rng import generator

Verdict = Literal["meaningful", "meaningless here", "untested", "skipped"]
_TOLERANCE = 0.02
_DRAWS = 8
_SIGMAS = (1e-6, 1e3)
_PIECEWISE = ("relu", "leakyrelu", "prelu", "identity")


@dataclass(frozen=True, slots=True)
class Complexity:
    """One measure of one network.

    Args:
        name: of the measure.
        weights: "stored", or "folded" (each BatchNorm multiplied into the layer before it).
        value: the number.
        rescaled: the number after weights before normalizers were multiplied; nan where there are none.
        verdict: "meaningless here" if it moved though the network did not; "untested" without such weights.
        sentence: why it was skipped.
    """

    name: str
    weights: str
    value: float
    rescaled: float
    verdict: Verdict
    sentence: str = ""


@dataclass(frozen=True)
class Network:
    """What the measures look at."""

    model: nn.Module  # a copy
    calls: LayerCalls  # of the copy itself
    forward: Forward
    inputs: Tensor
    score: Callable[[Any], float]
    margin: float  # reached by nine of ten samples; nan where there are no classes
    seed: int

    def scored_with(self, parameters: dict[str, Tensor]) -> float:
        """Return the score of the network with other parameters."""
        with torch.no_grad():
            return self.score(lambda inputs: call_purely(self.model, parameters, lambda m: self.forward(m, inputs)))


def measures(
    stored: Network, stored_rescaled: Network | None, folded: Network | None, folded_rescaled: Network | None
) -> tuple[Complexity, ...]:
    """Return every measure on the stored and, where there are BatchNorms to fold, on the folded weights."""
    complexities = []
    for weights, network, other in (("stored", stored, stored_rescaled), ("folded", folded, folded_rescaled)):
        if network is None:
            continue
        norms, other_norms = _norms(network), None if other is None else _norms(other)
        for name, measure in MEASURES.items():
            value, why = _attempt(measure, network, norms)
            moved = _attempt(measure, other, other_norms)[0]
            complexities.append(Complexity(name, weights, value, moved, _verdict(name, value, moved), why))
    return tuple(complexities)


class _Norms(NamedTuple):
    """Of every layer with weights: the operator norm, the Frobenius norm, sum of row norms, the reshaped norm."""

    spectral: list[float]
    frobenius: list[float]
    two_one: list[float]
    reshaped: list[float]


def _norms(network: Network) -> _Norms:
    norms = _Norms([], [], [], [])
    for call in network.calls.affine:
        weight = call.module.weight.detach().double()  # type: ignore[operator]
        matrix = weight.reshape(weight.shape[0], -1)
        flat = float(torch.linalg.matrix_norm(matrix, 2))
        try:
            shape = None if isinstance(call.module, nn.Linear) else call.input_shape
            spectral = operator_norm(call.module, shape).upper
        except InputError:  # a layer of the user's own with a weight: its matrix is all we know
            spectral = flat
        row = spectral, float(matrix.norm()), call.positions * float(matrix.norm(dim=1).sum()), flat
        for own, value in zip(norms, row, strict=True):
            own.append(value)
    return norms


Measure = Callable[[Network, _Norms], float]


class _Skip(Exception):
    """The measure is not defined here; the message says why."""


def _attempt(measure: Measure, network: Network | None, norms: _Norms | None) -> tuple[float, str]:
    try:
        return (math.nan, "") if network is None or norms is None else (measure(network, norms), "")
    except _Skip as reason:
        return math.nan, str(reason)


def _verdict(name: str, value: float, moved: float) -> Verdict:
    if math.isnan(value) or math.isnan(moved):
        return "skipped" if math.isnan(value) else "untested"
    scale = 1.0 if name.startswith("log10") else max(abs(value), 1e-300)
    return "meaningful" if abs(moved - value) <= _TOLERANCE * scale else "meaningless here"


def _log_product(values: list[float]) -> float:
    if not values:
        raise _Skip("no layer with weights was called")
    return sum(math.log10(value) if value > 0 else -math.inf for value in values)


def _spectral_complexity(network: Network, norms: _Norms) -> float:
    """Return log10 of `prod s_i (sum (b_i/s_i)^(2/3))^(3/2)`, reference matrices 0, biases left out."""
    product = _log_product(norms.spectral)
    if product == -math.inf:
        return product
    ratios = sum((b / s) ** (2 / 3) for b, s in zip(norms.two_one, norms.spectral, strict=True))
    return product + 1.5 * math.log10(ratios)


def _margin(network: Network) -> float:
    if not network.margin > 0:
        raise _Skip("fewer than nine of ten samples have a positive margin, or there are no classes")
    return network.margin


def _path_norm(network: Network, norms: _Norms) -> float:
    """Return log10 of the root of the sum over paths of the squared products of weights along them (neyshabur2015).

    One forward pass with squared weights on inputs of ones, normalizers left out; pooling counts as it is.
    """
    kinds = [activation_name(module) for module in network.model.modules()]
    if bent := [kind for kind in kinds if kind and kind not in _PIECEWISE]:
        raise _Skip(f"paths have no products through {bent[0]}")
    normalizers = [type(network.model.get_submodule(name)).__name__ for name in network.calls.normalizers]
    if not all("BatchNorm" in kind for kind in normalizers):
        raise _Skip("a normalizer by sample is no weight on a path")
    twin = strip_normalizers(network.model).double()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.square_()
        output = network.forward(twin, torch.ones_like(network.inputs[:1], dtype=torch.float64))
    value: Any = getattr(output, "logits", output)
    total = float(value.sum())
    return 0.5 * math.log10(total) if total > 0 else -math.inf


def _stable_rank(network: Network, norms: _Norms) -> float:
    if not norms.reshaped or min(norms.reshaped) == 0:
        raise _Skip("a layer has zero weights")
    return sum((f / s) ** 2 for f, s in zip(norms.frobenius, norms.reshaped, strict=True))


def _pac_bayes(network: Network, norms: _Norms) -> float:
    """Return 1/sigma^2 for the largest noise on the weights that costs at most 0.1 of the score, as in jiang2020.

    The same draws serve every sigma; the score is accuracy, or minus the loss over C where there are no classes.
    """
    origin = {name: value.detach() for name, value in network.model.named_parameters()}
    source = generator(network.seed)
    draws = [
        {name: torch.randn(v.shape, generator=source, dtype=torch.float64).to(v) for name, v in origin.items()}
        for _ in range(_DRAWS)
    ]

    def score(sigma: float) -> float:
        moved = ({name: origin[name] + sigma * draw[name] for name in origin} for draw in draws)
        return sum(network.scored_with(parameters) for parameters in moved) / len(draws)

    wanted = score(0.0) - 0.1
    if score(_SIGMAS[1]) >= wanted:
        raise _Skip("no noise costs a tenth of the score")
    return bisect(lambda sigma: score(sigma) >= wanted, *_SIGMAS, tol=0.01)[0] ** -2


MEASURES: dict[str, Measure] = {
    "log10 product of spectral norms": lambda network, norms: _log_product(norms.spectral),
    "log10 product of Frobenius norms": lambda network, norms: _log_product(norms.frobenius),
    "log10 path norm": _path_norm,
    "log10 spectral complexity (2,1)": _spectral_complexity,
    "log10 spectral complexity (2,1) / margin": lambda n, norms: (
        _spectral_complexity(n, norms) - math.log10(_margin(n))
    ),
    "sum of squared Frobenius norms": lambda network, norms: sum(value**2 for value in norms.frobenius),
    "sum of stable ranks": _stable_rank,
    "PAC-Bayes 1/sigma^2": _pac_bayes,
    "inverse squared margin": lambda network, norms: _margin(network) ** -2,
}
