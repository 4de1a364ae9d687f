"""Gradient descent in length and direction (GDNP) on `f(wt) = E phi(z^T wt)` for a Gaussian z.

`u = E[z]`, `S = E[z z^T]` (eigenvalues between mu and L), `wt = gamma w / |w|_S`, `rho(w) = -(u^T w)^2 / (w^T S w)`
and `rho* = -u^T S^-1 u` (see `rayleigh`). Everything rests on one identity for Gaussians, `grad f = c1 u + c2 S wt`.
"""

import torch
from torch import Tensor

from normgauge.theory.rayleigh import direction_quotient


def stein_coefficients(slope: Tensor, bend: Tensor, u: Tensor, wt: Tensor) -> tuple[Tensor, Tensor]:
    """Return `c1 = E phi' - E phi'' u^T wt` and `c2 = E phi''`, with `grad f(wt) = c1 u + c2 S wt`.

    `slope` is `E phi'(z^T wt)`, `bend` `E phi''(z^T wt)`.

    References: kohler2019
    """
    return slope - bend * (u @ wt), bend


def direction_weight(slope: Tensor, bend: Tensor, u: Tensor, w: Tensor, gamma: float | Tensor, S: Tensor) -> Tensor:
    """Return `h = c1 u^T w = E phi' u^T w - (gamma / |w|_S) E phi'' (u^T w)^2`.

    With the step `s = -|w|_S^3 / (L gamma h)`, `w - s grad_w f` is the descent step on `rho`, whatever phi is.

    Deviations: S3 prints the second term without `gamma / |w|_S`, which is right only where `wt = w`.

    References: kohler2019
    """
    wt = gamma * w / (w @ S @ w).sqrt()
    return stein_coefficients(slope, bend, u, wt)[0] * (u @ w)


def direction_gradient(c1: Tensor, w: Tensor, gamma: float | Tensor, u: Tensor, S: Tensor) -> Tensor:
    """Return `|w|_S^2 |grad_w f|_{S^-1}^2 = gamma^2 c1^2 (rho(w) - rho*)`: an equality.

    References: kohler2019
    """
    return gamma**2 * c1**2 * (direction_quotient(w, u, S) + u @ torch.linalg.solve(S, u))


def largest_coefficient(steepest: float | Tensor, least: Tensor) -> Tensor:
    """Return `sup|phi'| / sqrt(1 + rho*)`, a bound on `|c1|` over all weights.

    `c1 = E phi'(s) (1 - r x)` with x standard normal and `r^2 <= 1/(1 + rho*) - 1`.

    Deviations: S3 (and its source) use `sup|phi'|` itself, which forgets the second term of `c1`.
    """
    return steepest / (1 + least) ** 0.5


def bisection_bound(halvings: int, smoothness: float | Tensor, width: float, mu: float | Tensor) -> Tensor | float:
    """Return `(2^-halvings smoothness width / mu)^2`, a bound on `(d f / d gamma)^2` after bisection.

    In gamma the slope is `smoothness / mu`-Lipschitz, and a zero lies within `2^-halvings width`.

    Deviations: S3 prints `2^-halvings smoothness width / mu^2`, which scales like f; the left side scales like f^2.

    Examples:
        >>> bisection_bound(1, smoothness=3.0, width=4.0, mu=2.0)
        9.0
    """
    return (2.0**-halvings * smoothness * width / mu) ** 2
