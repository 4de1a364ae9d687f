"""First and second derivatives through batch normalization of one unit, in closed form.

Throughout, `y` is the batch of one unit's pre-activations (length m), `s = sqrt(var(y) + eps)` with the biased
variance, `yh = (y - mean(y)) / s` and `z = gamma * yh + beta`; `g` and `H` are gradient and Hessian of a loss with
respect to `z`, taken at `z`. All formulas are exact for every `eps >= 0`, because the derivative of `s` is
`yh / m` in both cases; what `eps = 0` adds is `|yh|^2 = m`, which makes `project` a projection.
"""

import torch
from torch import Tensor


def standardize(y: Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return `yh = (y - mean) / s` and `s = sqrt(var + eps)` along the last axis, with the biased variance.

    Examples:
        >>> yh, s = standardize(torch.tensor([1.0, 3.0]))
        >>> yh.tolist(), s.item()
        ([-1.0, 1.0], 1.0)
    """
    centred = y - y.mean(-1, keepdim=True)
    s = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return centred / s, s.squeeze(-1)


def project(yh: Tensor) -> Tensor:
    """Return `P = I - 1 1^T / m - yh yh^T / m`, the map that batch normalization applies to gradients.

    With `eps = 0` it projects onto the complement of `1` and `yh`; for m = 2 it is zero.

    Examples:
        >>> yh, _ = standardize(torch.tensor([1.0, 2.0, 6.0]))
        >>> P = project(yh)
        >>> bool((P @ P - P).abs().max() < 1e-6)
        True
    """
    m = yh.shape[-1]
    identity = torch.eye(m, dtype=yh.dtype, device=yh.device)
    return identity - 1.0 / m - torch.outer(yh, yh) / m


def scale_gradient(yh: Tensor, s: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """Return `d(gamma / s) / dy = -(gamma / (m s^2)) yh`.

    Examples:
        >>> yh, s = standardize(torch.tensor([1.0, 3.0]))
        >>> scale_gradient(yh, s).tolist()
        [0.5, -0.5]
    """
    return -gamma / (yh.shape[-1] * s**2) * yh


def pullback_gradient(y: Tensor, g: Tensor, gamma: float | Tensor = 1.0, eps: float = 0.0) -> Tensor:
    """Return the gradient with respect to `y`: `(gamma / s) (g - mean(g) - yh mean(g yh))`.

    Examples:
        >>> y, g = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 0.0, 0.0])
        >>> v = pullback_gradient(y, g)
        >>> bool(v.sum().abs() < 1e-6), bool((v @ y).abs() < 1e-6)
        (True, True)
    """
    yh, s = standardize(y, eps)
    return (gamma / s) * (g - g.mean() - yh * (g * yh).mean())


def pullback_hessian(y: Tensor, g: Tensor, H: Tensor, gamma: float | Tensor = 1.0, eps: float = 0.0) -> Tensor:
    """Return the Hessian with respect to `y`.

    `(gamma / s)^2 P H P - (gamma / (m s^2)) (gc yh^T + yh gc^T - (3 / m) a yh yh^T + a (I - 1 1^T / m))`
    with `gc = g - mean(g)` and `a = <g, yh>`.

    Examples:
        >>> y, g = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 0.0, -1.0])
        >>> flat = pullback_hessian(y, g, torch.zeros(3, 3)) @ torch.ones(3)
        >>> bool(flat.abs().max() < 1e-6)  # a common shift of y changes nothing
        True
    """
    yh, s = standardize(y, eps)
    m = y.shape[-1]
    P = project(yh)
    a = g @ yh
    centred = g - g.mean()
    cross = torch.outer(centred, yh)
    identity = torch.eye(m, dtype=y.dtype, device=y.device)
    bent = cross + cross.T - (3.0 / m) * a * torch.outer(yh, yh) + a * (identity - 1.0 / m)
    return (gamma / s) ** 2 * (P @ H @ P) - (gamma / (m * s**2)) * bent


def gradient_norm_squared(y: Tensor, g: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """Return `|grad_y|^2 = (gamma / s)^2 (|g|^2 - <1, g>^2 / m - <g, yh>^2 / m)` (eps = 0): an equality.

    Deviations: S1 Theorem 4.1 prints `<=` and `1 / sqrt(m)` in the last term, which is false for m > 1.

    Examples:
        >>> y, g = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 0.5, -1.0])
        >>> v = pullback_gradient(y, g, gamma=2.0)
        >>> bool((gradient_norm_squared(y, g, 2.0) - v @ v).abs() < 1e-5)
        True

    References: santurkar2018
    """
    yh, s = standardize(y)
    m = y.shape[-1]
    return (gamma / s) ** 2 * (g @ g - g.sum() ** 2 / m - (g @ yh) ** 2 / m)


def batch_slope(x: Tensor, gamma: float | Tensor = 1.0, eps: float = 0.0, radius: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return a bracket of the Lipschitz constant of BN as a map of a batch `[m, channels]`, on a ball about it.

    Per channel the Jacobian is `(gamma / s) P` (`project`), with singular values `gamma / s` (m - 2 times),
    `gamma eps / s^3` and 0, and channels do not mix; the largest, `max |gamma| / s`, is attained at `x`: the lower end.
    The deviation of a channel changes by at most `radius / sqrt(m)` on the ball, which gives the upper end,
    `max |gamma| / sqrt(max(sd - radius / sqrt(m), 0)^2 + eps)`: `1 / sqrt(eps)` once the ball holds a constant channel.

    Deviations: S2 section 3.2 takes the statistics for constants, as in evaluation; here they move with the batch.

    Examples:
        >>> x = torch.tensor([[1.0], [3.0], [5.0]])
        >>> [round(end.item(), 4) for end in batch_slope(x, gamma=2.0, radius=0.5)]  # 2 / sd, 2 / (sd - 0.5 / sqrt(3))
        [1.2247, 1.4877]

    References: than2025
    """
    m = len(x)
    deviation = x.var(0, correction=0).sqrt()
    sizes = torch.as_tensor(gamma, dtype=x.dtype).abs().expand_as(deviation)
    s = (deviation.square() + eps).sqrt()
    at = sizes / s if m > 2 else sizes * eps / s**3
    near = (deviation - radius / m**0.5).clamp_min(0.0)
    return at.max(), (sizes / (near.square() + eps).sqrt()).max()
