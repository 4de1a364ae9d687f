"""Largest singular value from below: Golub-Kahan bidiagonalization, and what a random start says from above."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.linalg.convolution import Convolution
from normgauge.rng import generator


@dataclass(frozen=True)
class SingularPair:
    """The best value and right vector of a Krylov space."""

    ritz: float  # largest singular value of the bidiagonal matrix, in the operator's precision
    rayleigh: float  # norm of A v for the unit vector v below, computed in float64: a true lower bound
    residual: float  # norm of A^T u - ritz v for the left vector u: how far from a singular pair
    vector: Tensor  # the right vector v, flat
    steps: int  # how many products with A and with its adjoint were spent


def top_singular_pair(
    operator: Convolution,
    *,
    steps: int = 20,
    start: Tensor | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> SingularPair:
    """Return the largest singular value of an operator from below, by Golub-Kahan bidiagonalization.

    The Krylov space of A^T A and `start` after `steps` products; both bases are reorthogonalized in full, so the
    small bidiagonal matrix keeps its meaning. The same as Lanczos on A^T A without squaring the condition. Without a
    `start` it is Gaussian, from `seed`; `dtype` is the precision of the recursion.

    Kind: lower. Cost: `steps` products with A and as many with its adjoint, one product in float64.

    Examples:
        >>> shift = Convolution(torch.tensor([[[1.0, 1.0]]]), (8,))
        >>> pair = top_singular_pair(shift, steps=8)
        >>> abs(pair.rayleigh - 2 * math.cos(math.pi / 16)) < 1e-6
        True

    References: golub1965, parlett1998.
    """
    working = operator if dtype in (None, operator.dtype) else operator.to(dtype)
    if start is None:
        draw = torch.randn(operator.shape[1], generator=generator(seed), dtype=torch.float64)
        start = draw.to(device=operator.device, dtype=working.dtype)
    start = start.detach().to(device=operator.device, dtype=working.dtype).reshape(-1)
    rights, diagonal, above = _bidiagonalize(working, start, min(steps, operator.shape[1]))
    if not diagonal:
        return SingularPair(0.0, 0.0, 0.0, start, 1)
    size = len(diagonal)
    small = torch.zeros(size, size + 1, dtype=torch.float64)  # one column more than rows: the last right vector is free
    small.diagonal().copy_(torch.tensor(diagonal, dtype=torch.float64))
    small.diagonal(1).copy_(torch.tensor(above, dtype=torch.float64))
    _, values, right = torch.linalg.svd(small, full_matrices=False)
    vector = torch.mv(rights[: size + 1].T, right[0].to(device=rights.device, dtype=rights.dtype))
    vector = vector / torch.linalg.vector_norm(vector)
    # one product in float64 makes the lower bound independent of the rounding of the whole recursion
    image = torch.linalg.vector_norm(operator.to(torch.float64).matvec(vector))
    left, _, _ = torch.linalg.svd(small[:, :-1])
    return SingularPair(
        ritz=float(values[0]),
        rayleigh=float(image / torch.linalg.vector_norm(vector.to(torch.float64))),
        residual=abs(above[-1] * float(left[-1, 0])),
        vector=vector,
        steps=size,
    )


def _bidiagonalize(operator: Convolution, start: Tensor, steps: int) -> tuple[Tensor, list[float], list[float]]:
    rights = start.new_zeros(steps + 1, operator.shape[1])
    lefts = start.new_zeros(steps, operator.shape[0])
    rights[0] = start / torch.linalg.vector_norm(start)
    diagonal: list[float] = []
    above: list[float] = []
    for step in range(steps):
        left = operator.matvec(rights[step])
        scale = float(torch.linalg.vector_norm(left))
        if step:
            left -= above[-1] * lefts[step - 1]
        left = _orthogonalize(left, lefts[:step])
        alpha = float(torch.linalg.vector_norm(left))
        if alpha <= 1e-6 * scale or scale == 0.0:  # the Krylov space is exhausted: it holds the answer already
            break
        lefts[step] = left / alpha
        diagonal.append(alpha)
        right = operator.adjoint(lefts[step])
        scale = float(torch.linalg.vector_norm(right))
        right -= alpha * rights[step]
        right = _orthogonalize(right, rights[: step + 1])
        beta = float(torch.linalg.vector_norm(right))
        above.append(beta)
        if beta <= 1e-6 * scale:
            break
        rights[step + 1] = right / beta
    return rights, diagonal, above


def _orthogonalize(vector: Tensor, basis: Tensor) -> Tensor:
    """Remove what rounding put along a basis; again when much was removed, since the rest is then less accurate."""
    if len(basis) == 0:
        return vector
    length = float(torch.linalg.vector_norm(vector))
    vector = vector - torch.mv(basis.T, torch.mv(basis, vector))
    if float(torch.linalg.vector_norm(vector)) < 0.7 * length:
        vector = vector - torch.mv(basis.T, torch.mv(basis, vector))
    return vector


def random_start_bound(ritz: float, dimension: int, steps: int, delta: float) -> float:
    """Return a number the norm exceeds with probability at most `delta`, after Lanczos from a Gaussian start.

    With k = `steps` and n = `dimension`, P(ritz^2 < (1 - e) norm^2) <= 1.648 sqrt(n) exp(-sqrt(e) (2 k - 1)) for every
    operator; the e that makes the right side `delta` gives the bound ritz / sqrt(1 - e). The probability is over the
    start only: a start taken from an earlier call carries none. `ritz` is of the norm, not its square.

    Kind: upper, with probability 1 - `delta`.

    Examples:
        >>> round(random_start_bound(1.0, 10**4, 80, 1e-10), 3)
        1.016

    References: kuczynski1992.
    """
    if not 0.0 < delta < 1.0:
        raise InputError("random_start_bound", "delta must lie in (0, 1)", repr(delta), "Use for example delta=1e-10")
    root = math.log(1.648 * math.sqrt(dimension) / delta) / (2 * steps - 1)
    if root >= 1.0:
        needed = math.ceil((math.log(1.648 * math.sqrt(dimension) / delta) + 1) / 2) + 1
        rule = f"delta={delta:g} needs at least {needed} steps in dimension {dimension}"
        raise InputError("random_start_bound", rule, f"{steps} steps", "Raise the iterations or delta")
    return ritz / math.sqrt(1.0 - root**2)
