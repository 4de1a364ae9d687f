"""The weights a normalized linear layer really applies, and how far apart two normalized units are.

Shapes follow S4: inputs `X` are `[n, B]` (features, samples), weights `W` are `[m, n]` (units, features).
"""

import torch
from torch import Tensor


def covariance(X: Tensor) -> Tensor:
    """Return `Sigma = (X - mean) (X - mean)^T / B`, the biased covariance of the features.

    Its rank is at most `min(n, B - 1)`: centring costs one dimension.

    Examples:
        >>> covariance(torch.tensor([[1.0, 3.0]])).tolist()
        [[1.0]]
    """
    centred = X - X.mean(1, keepdim=True)
    return centred @ centred.T / X.shape[1]


def effective_weights(
    W: Tensor, X: Tensor, gamma: float | Tensor = 1.0, beta: float | Tensor = 0.0
) -> tuple[Tensor, Tensor]:
    """Return `W'` and `b'` with `BN(W X) = W' X + b'` on this batch (eps = 0).

    `W'_i = gamma W_i / sqrt(W_i Sigma W_i^T)` and `b'_i = beta - W'_i mean(X)`, so `W'_i Sigma W'_i^T = gamma^2`: an
    ellipsoid of dimension n - 1 and compact where Sigma is regular; where it is not, the kernel of Sigma is free.

    Examples:
        >>> W, X = torch.tensor([[5.0]]), torch.tensor([[1.0, 3.0]])
        >>> weights, bias = effective_weights(W, X)
        >>> (weights @ X + bias[:, None]).tolist()
        [[-1.0, 1.0]]

    References: sun2020
    """
    s = ((W @ covariance(X)) * W).sum(1).sqrt()
    weights = (gamma / s)[:, None] * W
    return weights, beta - weights @ X.mean(1)


def unit_distance_squared(first: Tensor, second: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """Return `2 B gamma^2 (1 - rho)`: the squared distance of two normalized units of equal `gamma` and `beta`.

    `rho` is the correlation of their pre-activations over the batch of B; between 0 and `4 B gamma^2`, and nothing
    about it follows from `gamma` and `beta`.

    Examples:
        >>> a = torch.tensor([1.0, 2.0, 4.0])
        >>> unit_distance_squared(a, -a).item()  # opposite units: 4 B
        12.0

    References: sun2020
    """
    rho = torch.corrcoef(torch.stack([first, second]))[0, 1]
    return 2 * first.shape[0] * gamma**2 * (1 - rho)
