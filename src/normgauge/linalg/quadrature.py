"""Random quadrature of a self-adjoint operator: spectral measures by Lanczos, traces by Hutchinson."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from normgauge.errors import InputError, offer_partial
from normgauge.linalg._basis import inner
from normgauge.linalg._lanczos_iteration import Sequences
from normgauge.linalg._operator import Operator
from normgauge.rng import generator

Heard = Callable[[int, list[float]], None]


@dataclass(frozen=True)
class Nodes:
    """The Gauss quadrature of one probe's spectral measure: z^T f(A) z / n = sum_i weights_i f(values_i)."""

    values: tuple[float, ...]  # Ritz values, ascending
    weights: tuple[float, ...]  # which sum to one
    residuals: tuple[float, ...]  # |A v - value v| of each Ritz pair


def rademacher(size: int, draw: torch.Generator) -> Tensor:
    """Return a vector of random signs: of all distributions with E z z^T = I the one of least variance."""
    return torch.randint(0, 2, (size,), generator=draw, dtype=torch.int8).mul_(2).sub_(1)


def spectral_nodes(
    operator: Operator,
    *,
    probes: int = 1,
    steps: int = 50,
    seed: int = 0,
    progress: Heard | None = None,
    enough: Callable[[list[Nodes]], bool] | None = None,
) -> list[Nodes]:
    """Return the quadrature of `probes` random spectral measures, by `steps` Lanczos steps each; fewer when `enough`.

    Every basis is kept orthogonal to the square root of the precision: without that, converged eigenvalues return as
    copies ("ghosts") and take weight from their neighbours' places.

    Kind: unbiased: E sum_i weights_i p(values_i) = tr p(A) / n for polynomials p of degree below 2 steps.
    Cost: probes * steps products (fewer where a Krylov space closes), one basis of `steps` vectors. Ctrl-C carries the
    probes that were finished.

    References: ubaru2017, simon1984.
    """
    _check(operator, probes=probes, steps=steps)
    size = operator.shape[0]
    draw = generator(seed)
    heard = None if progress is None else (lambda products, _: progress(products, []))
    sequences = Sequences(
        operator,
        top=1,
        bottom=0,
        tol=-1.0,  # never converged: every probe takes all its steps
        capacity=min(steps + 1, size),
        budget=0,
        generator=draw,
        progress=heard,
        partial=True,
    )
    result: list[Nodes] = []
    with offer_partial(lambda _: list(result)):
        for _ in range(probes):
            sequences.budget = sequences.matvecs + min(steps, size)
            sequences.run(rademacher(size, draw).to(device=operator.device, dtype=operator.dtype))
            values, residuals, vectors = sequences.ritz
            parts = values, vectors[0] ** 2, residuals
            result.append(Nodes(*(tuple(part.tolist()) for part in parts)))
            sequences.reset()
            if enough is not None and enough(result):
                break
    return result


@dataclass(frozen=True)
class TraceEstimate:
    """A trace, its standard error, and the number of probes."""

    value: float
    standard_error: float
    probes: int


def hutchinson(
    operator: Operator,
    *,
    relative_error: float = 0.05,
    probes: int = 1000,
    seed: int = 0,
    progress: Heard | None = None,
) -> TraceEstimate:
    """Return tr A by random signs z: E z^T A z = tr A, until the standard error is `relative_error` of the value.

    Kind: unbiased, up to the stopping rule, which waits for ten probes before it believes a standard error.
    Cost: one product per probe, at most `probes`. Ctrl-C carries the estimate so far, `None` before two probes.

    References: hutchinson1989.
    """
    _check(operator, probes=probes, steps=1)
    if not relative_error > 0.0:
        raise InputError("trace", "relative_error must be positive", f"{relative_error:g}", "Ask for 0.05, say")
    draw = generator(seed)
    mean, spread = 0.0, 0.0
    estimate = TraceEstimate(0.0, float("inf"), 0)
    with offer_partial(lambda _: estimate if estimate.probes > 1 else None):
        for count in range(1, probes + 1):
            z = rademacher(operator.shape[0], draw).to(device=operator.device, dtype=operator.dtype)
            sample = inner(z, operator.matvec(z))
            step = sample - mean
            mean += step / count  # Welford's running mean and sum of squares
            spread += step * (sample - mean)
            error = (spread / (count - 1) / count) ** 0.5 if count > 1 else float("inf")
            estimate = TraceEstimate(mean, error, count)
            if progress is not None:
                progress(count, [error / abs(mean) if mean else float("inf")])
            if count >= 10 and error <= relative_error * abs(mean):
                break
    return estimate


def _check(operator: Operator, *, probes: int, steps: int) -> None:
    operator.require_self_adjoint("quadrature")
    if min(probes, steps) < 1:
        got = f"probes={probes}, steps={steps}"
        raise InputError("quadrature", "probes and steps are at least 1", got, "Raise them")
