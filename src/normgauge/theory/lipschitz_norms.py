"""Lipschitz constants of normalization layers without scale and shift, in the Euclidean norm."""

from collections.abc import Sequence

import torch
from torch import Tensor

from normgauge.theory.batchnorm_calculus import standardize


def batch_norm_constant(variances: Tensor, eps: float) -> Tensor:
    """Return `max_k 1 / sqrt(variances_k + eps)`, the constant of batch normalization with fixed statistics.

    The map is diagonal, so its norm is its largest entry.

    Deviations: S2 Lemma 1 prints the Euclidean norm of the entries, which is too large by up to sqrt(n).

    Examples:
        >>> batch_norm_constant(torch.tensor([4.0, 0.25]), eps=0.0).item()
        2.0

    References: than2025
    """
    return (variances + eps).rsqrt().max()


def layer_norm_jacobian(x: Tensor, eps: float) -> Tensor:
    """Return `(s2 + eps)^(-1/2) (I - y y^T / (|y|^2 + n eps)) (I - 1 1^T / n)`, y the centred x and s2 its variance.

    Examples:
        >>> J = layer_norm_jacobian(torch.tensor([1.0, 2.0, 4.0]), eps=0.1)
        >>> bool((J @ torch.ones(3)).abs().max() < 1e-6)  # a common shift changes nothing
        True

    References: than2025
    """
    n = x.shape[0]
    y = x - x.mean()
    identity = torch.eye(n, dtype=x.dtype, device=x.device)
    scale = (y.square().mean() + eps).rsqrt()
    return scale * (identity - torch.outer(y, y) / (y @ y + n * eps)) @ (identity - 1.0 / n)


def layer_norm_slope(x: Tensor, eps: float) -> Tensor:
    """Return the norm of that Jacobian: `(s2 + eps)^(-1/2)` for n >= 3, `eps (s2 + eps)^(-3/2)` for n = 2.

    Only directions orthogonal to 1 and to x itself pass at full size; with two features there are none.

    Examples:
        >>> layer_norm_slope(torch.tensor([1.0, 3.0]), eps=0.0).item()
        0.0
    """
    s = standardize(x, eps)[1]
    return 1 / s if x.shape[0] > 2 else eps / s**3


def layer_norm_constant(eps: float) -> float:
    """Return `1 / sqrt(eps)`: the constant over all inputs, attained at constant ones, whatever the data are.

    Examples:
        >>> layer_norm_constant(0.25)
        2.0
    """
    return eps**-0.5


def group_norm_slope(x: Tensor, groups: Sequence[Sequence[int]], eps: float) -> Tensor:
    """Return the norm of group normalization's Jacobian at x: the largest over the groups, not their sum.

    Deviations: S2 Lemma 3 bounds it by the sum.
    """
    return torch.stack([layer_norm_slope(x[list(group)], eps) for group in groups]).max()
