"""What batch normalization does to gradient size and curvature of the loss, as equalities (S1, corrected).

Symbols as in `batchnorm_calculus`: `y` one unit's batch, `g` and `H` gradient and Hessian of the loss with respect to
`z = gamma yh + beta`, taken at `z`; `eps = 0`.
"""

import torch  # noqa: F401 (the doctests)
from torch import Tensor

from normgauge.theory.batchnorm_calculus import gradient_norm_squared, pullback_gradient, standardize


def curvature_along_gradient(y: Tensor, g: Tensor, H: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """Return `v^T Hhat v` for `v = grad_y Lhat` and `Hhat` the Hessian with respect to `y`.

    `(gamma / s)^2 v^T H v - (gamma / (m s^2)) <g, yh> |v|^2`: an equality, since `v` is orthogonal to `yh` and `1`.

    Deviations: S1 Theorem 4.2 prints `<=`.

    Examples:
        >>> y, g = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 0.0, -1.0])
        >>> curvature_along_gradient(y, g, torch.zeros(3, 3)) > 0  # <g, yh> < 0: BN adds curvature
        tensor(True)

    References: santurkar2018
    """
    yh, s = standardize(y)
    v = pullback_gradient(y, g, gamma)
    return (gamma / s) ** 2 * (v @ H @ v) - gamma / (y.shape[0] * s**2) * (g @ yh) * (v @ v)


def worst_weight_gradient(y: Tensor, g: Tensor, gamma: float | Tensor, radius: float) -> Tensor:
    """Return `max |X^T v|^2` over inputs with spectral norm at most `radius`, `v = grad_y Lhat` held fixed.

    `radius^2 (gamma / s)^2 (|g|^2 - m mean(g)^2 - <g, yh>^2 / m)`, attained by `X = radius v u^T / |v|`, `|u| = 1`.
    Holding `v` fixed is a hypothesis: if `y = X w` moves with `X`, then `s` may tend to 0 and nothing is bounded.

    Deviations: S1 Theorem 4.4 prints the square of `max |grad_W L|^2`, no `radius^2` before the mean, no `1/m`.

    Examples:
        >>> y, g = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 0.5, -1.0])
        >>> v = pullback_gradient(y, g, 2.0)
        >>> bool((worst_weight_gradient(y, g, 2.0, radius=3.0) - 9 * v @ v).abs() < 1e-4)
        True

    References: santurkar2018
    """
    return radius**2 * gradient_norm_squared(y, g, gamma)


def nearest_rescaling(start: Tensor, optimum: Tensor) -> tuple[Tensor, Tensor]:
    """Return `k = <start, optimum> / |optimum|^2` and `|start - k optimum|^2`.

    The distance to the line through `optimum`, that is `|start - optimum|^2 - (|optimum|^2 - <start, optimum>)^2 /
    |optimum|^2`; to the ray of its positive multiples only where `<start, optimum> > 0`.

    Examples:
        >>> k, distance = nearest_rescaling(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.0]))
        >>> k.item(), distance.item()
        (2.0, 1.0)

    References: santurkar2018
    """
    k = (start * optimum).sum() / optimum.square().sum()
    return k, (start - k * optimum).square().sum()
