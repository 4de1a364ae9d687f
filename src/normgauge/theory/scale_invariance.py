"""What follows from a loss that does not see the scale of its weights: derivatives, curvature, redundant directions."""

from itertools import pairwise

import torch
from torch import Tensor

from normgauge.theory.batchnorm_calculus import standardize


def radial_derivative(y: Tensor, g: Tensor, gamma: float | Tensor = 1.0, eps: float = 0.0) -> Tensor:
    """Return `<y, grad_y> = gamma <g, yh> eps / s^2`: what is left of Euler's identity when `eps > 0`.

    `y` is one unit's batch of pre-activations, `g` the loss's gradient at `gamma yh + beta`. Zero for `eps = 0`; the
    same number is `<w, grad_w>` for `y = X w + b`, because the bias has no gradient.

    Examples:
        >>> y, g = torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 1.0])
        >>> radial_derivative(y, g, eps=0.0).item(), radial_derivative(y, g, eps=3.0).item()
        (0.0, 0.375)
    """
    yh, s = standardize(y, eps)
    return gamma * (g @ yh) * eps / s**2


def polar_hessian(slope: float | Tensor, bend: float | Tensor, radius: float | Tensor) -> Tensor:
    """Return the Hessian of `f(theta)` on the plane, in the frame (radial, angular) of unit vectors.

    `[[0, -f'], [-f', f'']] / r^2` with `slope = f'(theta)`, `bend = f''(theta)`. Its eigenvalues are
    `(f'' +- sqrt(f''^2 + 4 f'^2)) / (2 r^2)`: 0 and `f'' / r^2` only where `f' = 0`.

    Examples:
        >>> polar_hessian(1.0, 2.0, radius=2.0).tolist()
        [[0.0, -0.25], [-0.25, 0.5]]

    References: akbar2025
    """
    slope, bend = torch.as_tensor(slope), torch.as_tensor(bend)
    rows = torch.stack([torch.zeros_like(slope), -slope, -slope, bend])
    return rows.reshape(2, 2) / radius**2


def polar_eigenvalues(slope: float | Tensor, bend: float | Tensor, radius: float | Tensor) -> Tensor:
    """Return the two eigenvalues of `polar_hessian`, the smaller first.

    Examples:
        >>> polar_eigenvalues(1.0, 0.0, radius=1.0).tolist()  # where the gradient is not zero, neither is an eigenvalue
        [-1.0, 1.0]
    """
    slope, bend = torch.as_tensor(slope), torch.as_tensor(bend)
    root = (bend**2 + 4 * slope**2).sqrt()
    return torch.stack([bend - root, bend + root]) / (2 * radius**2)


def fit_hessian(w: Tensor, X: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """Return the Hessian in `w` of `mean (gamma yh + beta - t)^2 / 2`, `y = X w`, at a stationary (w, gamma, beta).

    `(gamma / s)^2 (Sigma - Sigma w w^T Sigma / s^2)` with `s^2 = w^T Sigma w`: the covariance of the inputs with one
    direction taken out, not whitened. Its kernel is `w` and the kernel of Sigma, the other eigenvalues interlace
    those of `(gamma / s)^2 Sigma`. Also the Gauss-Newton matrix at any point. The inputs X are `[m, n]`.

    Examples:
        >>> X = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
        >>> fit_hessian(torch.tensor([1.0, 0.0]), X).tolist()
        [[0.0, 0.0], [0.0, 4.0]]

    References: akbar2025
    """
    centred = X - X.mean(0)
    covariance = centred.T @ centred / X.shape[0]
    image = covariance @ w
    squared = w @ image
    return gamma**2 / squared * (covariance - torch.outer(image, image) / squared)


def excess_loss(w: Tensor, X: Tensor, gamma: float | Tensor, slope: Tensor) -> Tensor:
    """Return how far `mean (gamma yh + beta - t)^2 / 2`, `y = X w`, is above its least value, from its gradient in `w`.

    `s^2 / (2 gamma^2) slope^T Sigma^-1 slope` at the best gamma and beta for `w`: so with `gamma != 0` every stationary
    point is a global minimum, and what stays are the points with `gamma = 0`, `cov(X w, t) = 0`. The inputs X are
    `[m, n]`, of regular covariance, and `slope` is the gradient in `w`.

    Examples:
        >>> X = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> excess_loss(torch.tensor([1.0, 0.0]), X, 2.0, torch.zeros(2)).item()
        0.0

    References: akbar2025
    """
    centred = X - X.mean(0)
    covariance = centred.T @ centred / X.shape[0]
    return (w @ covariance @ w) / (2 * gamma**2) * (slope @ torch.linalg.solve(covariance, slope))


def batch_norm_redundancy(units: int, bias: bool = True) -> int:
    """Return how many directions of (W, b) a batch-normalized layer does not see: a scale and a shift per unit.

    Examples:
        >>> batch_norm_redundancy(3), batch_norm_redundancy(3, bias=False)
        (6, 3)
    """
    return units * (2 if bias else 1)


def layer_norm_redundancy(inputs: int, bias: bool = True) -> int:
    """Return how many directions of (W, b) a layer-normalized layer of three or more units does not see.

    One scale of everything, one vector added to all rows of W (`inputs` directions) and one number to all of b.

    Examples:
        >>> layer_norm_redundancy(4), layer_norm_redundancy(4, bias=False)
        (6, 5)
    """
    return 1 + inputs + (1 if bias else 0)


def linear_network_redundancy(widths: tuple[int, ...], scales: bool = False) -> int:
    """Return how many directions a deep linear network does not see: `k^2` per hidden width k, and k more with scales.

    `widths` are input, hidden widths and output; every matrix of full rank, no hidden width above its neighbours, no
    biases. The same `k^2` with batch normalization after the hidden layers (it only rescales rows); its trained scales
    add k.

    Examples:
        >>> linear_network_redundancy((4, 2, 3)), linear_network_redundancy((4, 2, 3), scales=True)
        (4, 6)
    """
    hidden = [width for width, _ in list(pairwise(widths))[1:]]
    return sum(width**2 + (width if scales else 0) for width in hidden)
