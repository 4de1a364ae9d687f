"""Least squares in length and direction: the Rayleigh quotient that is left for the direction, and its descent.

`S = E[x x^T]` (symmetric positive definite, eigenvalues between mu and L), `u = -E[y x]`, `|w|_S = sqrt(w^T S w)`,
`wt = gamma w / |w|_S`.
"""

import torch  # noqa: F401 (the doctests)
from torch import Tensor


def decoupled_least_squares(w: Tensor, gamma: float | Tensor, u: Tensor, S: Tensor) -> Tensor:
    """Return `2 gamma u^T w / |w|_S + gamma^2`, which is `E (y - x^T wt)^2 - E y^2`.

    Deviations: S3 prints `2 gamma u^T w / (|w|_S + gamma^2)`.

    Examples:
        >>> w, u, S = torch.tensor([3.0]), torch.tensor([-2.0]), torch.tensor([[4.0]])
        >>> decoupled_least_squares(w, 1.0, u, S).item()  # wt = 1/2: 2 u wt + S wt^2
        -1.0

    References: kohler2019
    """
    return 2 * gamma * (u @ w) / (w @ S @ w).sqrt() + gamma**2


def best_length(w: Tensor, u: Tensor, S: Tensor) -> Tensor:
    """Return `gamma = -u^T w / |w|_S`, the minimizer of `decoupled_least_squares` for a direction `w`."""
    return -(u @ w) / (w @ S @ w).sqrt()


def direction_quotient(w: Tensor, u: Tensor, S: Tensor) -> Tensor:
    """Return `rho(w) = -(u^T w)^2 / (w^T S w)`: what is left of least squares once the length is best.

    Its minimum is `-u^T S^-1 u`, at the multiples of `S^-1 u`; `rho - rho* = |rho*| sin^2` of the S-angle to them.

    Examples:
        >>> u, S = torch.tensor([1.0, 2.0]), torch.eye(2)
        >>> direction_quotient(-7 * u, u, S).item()
        -5.0

    References: kohler2019
    """
    return -((u @ w) ** 2) / (w @ S @ w)


def direction_step(w: Tensor, u: Tensor, S: Tensor, L: float | Tensor) -> Tensor:
    """Return `w - (S w - k u) / L` with `k = |w|_S^2 / u^T w`: one descent step on `direction_quotient`.

    It is `w - eta grad rho(w)` with `eta = w^T S w / (2 L |rho(w)|)`, and a plain gradient step towards `k S^-1 u`;
    since `w - k S^-1 u` is S-orthogonal to `w`, the sine of the angle shrinks by at least `1 - mu / L`.

    References: kohler2019
    """
    return w - (S @ w - (w @ S @ w) / (u @ w) * u) / L


def quotient(w: Tensor, B: Tensor, A: Tensor) -> Tensor:
    """Return the generalized Rayleigh quotient `w^T B w / w^T A w`."""
    return (w @ B @ w) / (w @ A @ w)


def ascent_factor(values: Tensor, conditioning: float | Tensor = 1.0) -> Tensor:
    """Return `q = 1 - conditioning (v1 - v2) / (v1 - vmin)`, the rate of gradient ascent on a Rayleigh quotient.

    One step `w + (w^T A w / (2 (rho - vmin))) M grad rho` takes `(v1 - rho) / (rho - v2)` to at most `q^2` times itself
    where `rho(w) > v2`; `values` are the eigenvalues of the pencil `(B, A)`. With `M = A^-1` the conditioning is 1 and
    the step a shifted power iteration; with `M = I / L` it is `mu / L`, the extreme eigenvalues of A.

    Deviations: S3 prints eigenvalues of B, no conditioning, and the exponent `2 t` for a single step.

    Examples:
        >>> ascent_factor(torch.tensor([0.0, 1.0, 4.0])).item()
        0.25

    References: kohler2019, knyazev2009
    """
    ordered = values.sort(descending=True).values
    return 1 - conditioning * (ordered[0] - ordered[1]) / (ordered[0] - ordered[-1])
