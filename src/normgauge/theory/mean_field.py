"""Batch-normalized networks at infinite width and batch size B: what one layer does to signal and gradient.

The network is `h^{l+1} = W phi(BN(h^l))` with independent weights of variance `sigma^2 / width`, BN over B samples
with gain 1, bias 0 and eps = 0. At infinite width each unit's batch is Gaussian with a B x B covariance common to all
units. At the fixed point that treats all samples alike, the centred batch is isotropic, so the normalized batch `y` is
uniform on the sphere of radius sqrt(B) in the complement of 1 (dimension B - 1) and independent of its length. Hence

    variance(phi)      q = E phi(y_1)^2,   c = E phi(y_1) phi(y_2)
    square growth      lambda = B / ((q - c)(B - 3)) * E tr(P D G D) / (B - 1),

with D = diag(phi'(y)), G = I - 1 1^T / B and P = G - y y^T / B; the factor 1 / (B - 3) is the mean of 1 / chi^2 with
B - 1 degrees of freedom. lambda is the largest eigenvalue of the map of gradient covariances: a positive map has a
positive eigenvector, whose average over permutations of the batch is a multiple of G.

`lambda` belongs to the **squared** norm of the gradient with respect to `h`, per layer towards the input; the norm
itself grows by its square root.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from normgauge.errors import InputError, explain, unknown_name

Curve = Callable[[np.ndarray], np.ndarray]


def _normal(y: np.ndarray) -> np.ndarray:
    return np.exp(-y * y / 2) / math.sqrt(2 * math.pi)


# name -> (phi, phi'), smooth ones; the piecewise linear ones have closed forms below
_SMOOTH: dict[str, tuple[Curve, Curve]] = {
    "tanh": (np.tanh, lambda y: 1 / np.cosh(y) ** 2),
    "erf": (special.erf, lambda y: 2 / math.sqrt(math.pi) * np.exp(-y * y)),
    "gelu": (lambda y: y * special.ndtr(y), lambda y: special.ndtr(y) + y * _normal(y)),
}
_SLOPES = {"identity": 1.0, "relu": 0.0, "leaky_relu": 0.01}
ACTIVATIONS = (*_SLOPES, *_SMOOTH)


@dataclass(frozen=True, slots=True)
class MeanField:
    """One layer of a wide batch-normalized network at its fixed point.

    Args:
        activation: the name of phi.
        batch: the batch size B; `math.inf` for the limit.
        square_growth: factor of the squared gradient norm with respect to pre-activations, per layer to the input.
        second_moment: q = E phi(y)^2.
        overlap: c = E phi(y_1) phi(y_2), of two samples of the batch.
        pre_variance: mean batch variance before the next normalizer, for sigma^2 = 1: (q - c)(B - 1) / B.
    """

    activation: str
    batch: float
    square_growth: float
    second_moment: float
    overlap: float
    pre_variance: float

    @property
    def norm_growth(self) -> float:
        """Factor of the gradient norm itself: the square root of `square_growth`."""
        return math.sqrt(self.square_growth)


def activation_values(activation: str, y: np.ndarray) -> np.ndarray:
    """Return phi(y).

    Examples:
        >>> activation_values("relu", np.array([-1.0, 2.0])).tolist()
        [0.0, 2.0]

    Raises:
        UnknownNameError: for another activation.
    """
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)
    if activation in _SMOOTH:
        return _SMOOTH[activation][0](y)
    return np.maximum(y, 0) + _SLOPES[activation] * np.minimum(y, 0)


def batchnorm_layer(activation: str, batch: float, *, slope: float | None = None, nodes: int = 96) -> MeanField:
    """Return what one layer of an infinitely wide batch-normalized network does, at batch size `batch`.

    Kind: exact at infinite width, for the fixed point that treats all samples alike: closed form for identity, ReLU
    and leaky ReLU, Gauss-Jacobi quadrature (error below 1e-8 for the default nodes) for tanh, erf and GELU.

    Args:
        activation: identity, relu, leaky_relu, tanh, erf or gelu.
        batch: at least 4 (below, the mean square of the gradient is infinite), or `math.inf`.
        slope: of leaky ReLU on negative inputs; 0.01 as in torch when left out.
        nodes: of the quadrature, per axis.

    Raises:
        UnknownNameError: for another activation.
        InputError: for a batch below 4.

    Deviations: S3 says that the gradient *norm* grows by pi / (pi - 1) = 1.467 per layer for ReLU and large batches;
        this is the factor of the *square*, and the norm grows by its root, 1.211.

    Examples:
        The linear network grows by (B - 2) / (B - 3), ReLU at large batches by pi / (pi - 1):

        >>> round(batchnorm_layer("identity", 8).square_growth, 12)
        1.2
        >>> round(batchnorm_layer("relu", math.inf).square_growth - math.pi / (math.pi - 1), 12)
        0.0

    References: yang2019, batchnorm_article.
    """
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)
    if not batch >= 4 or (math.isfinite(batch) and batch != int(batch)):
        raise InputError(
            explain(
                "mean_field.batchnorm_layer",
                "batch must be a whole number of at least 4, or inf: 1 / (B - 3) is the mean of the inverse variance",
                f"{batch:g}",
                "Use larger batches",
            )
        )
    if activation in _SLOPES:
        alpha = _SLOPES[activation] if slope is None or activation != "leaky_relu" else slope
        means = _piecewise_linear(alpha, batch)
    else:
        means = _quadrature(*_SMOOTH[activation], batch, nodes)
    return _assemble(activation, batch, *means)


def _assemble(
    activation: str, batch: float, q: float, c: float, dd: float, d12: float, ydd: float, yd12: float
) -> MeanField:
    """Put the layer together from E phi^2, E phi phi, E phi'^2, E phi' phi', E (y phi')^2 and E (y phi')(y phi')."""
    if math.isinf(batch):
        return MeanField(activation, batch, dd / (q - c), q, c, q - c)
    B = batch
    # tr(P D^2) - tr(P d d^T) / B, with d = phi'(y), written by means over one and two samples
    ones = B * dd + B * (B - 1) * d12  # E (1 . d)^2
    along = B * ydd + B * (B - 1) * yd12  # E (y . d)^2
    trace = (B - 1) * dd - ydd - (B * dd - ones / B - along / B) / B
    growth = B / ((q - c) * (B - 3)) * trace / (B - 1)
    return MeanField(activation, batch, growth, q, c, (q - c) * (B - 1) / B)


def _piecewise_linear(alpha: float, batch: float) -> tuple[float, float, float, float, float, float]:
    """Return the six means for phi(y) = max(y, 0) + alpha min(y, 0).

    phi is homogeneous, and the angle of (y_1, y_2) is distributed as for Gaussians of correlation -1 / (B - 1); so
    the means are the arc-cosine kernels.
    """
    rho = 0.0 if math.isinf(batch) else -1 / (batch - 1)
    angle = math.acos(rho)
    relu = (math.sqrt(1 - rho * rho) + rho * (math.pi - angle)) / (2 * math.pi)  # E relu(y1) relu(y2)
    mixed = rho / 2 - relu  # E relu(y1) min(y2, 0), since relu(y1) y2 has mean rho / 2
    both, apart = (math.pi - angle) / (2 * math.pi), angle / (2 * math.pi)  # equal signs (each), opposite signs (each)
    second = (1 + alpha * alpha) / 2
    overlap = (1 + alpha * alpha) * relu + 2 * alpha * mixed
    slopes = (1 + alpha * alpha) * both + 2 * alpha * apart
    return second, overlap, second, slopes, second, overlap


def _quadrature(phi: Curve, slope: Curve, batch: float, nodes: int) -> tuple[float, float, float, float, float, float]:
    """Return the six means by Gauss quadrature over one and two coordinates of the sphere."""
    first, second, weight = _gaussian_nodes(nodes) if math.isinf(batch) else _sphere_nodes(int(batch), nodes)

    def mean(values: np.ndarray) -> float:
        return float((weight * values).sum())

    f1, f2, d1, d2 = phi(first), phi(second), slope(first), slope(second)
    e1, e2 = first * d1, second * d2
    return mean(f1 * f1), mean(f1 * f2), mean(d1 * d1), mean(d1 * d2), mean(e1 * e1), mean(e1 * e2)


def _gaussian_nodes(nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    return points[:, None], points[None, :], weights[:, None] * weights[None, :]


def _sphere_nodes(batch: int, nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return nodes of (y_1, y_2) for y uniform on the sphere of radius sqrt(B) in the complement of 1."""
    dimension = batch - 1
    t, t_weights = special.roots_jacobi(nodes, (dimension - 3) / 2, (dimension - 3) / 2)
    s, s_weights = special.roots_jacobi(nodes, (dimension - 4) / 2, (dimension - 4) / 2)
    rho = -1 / (batch - 1)
    first = math.sqrt(batch - 1) * t[:, None]
    across = math.sqrt(batch - 1) * np.sqrt(1 - t * t)[:, None] * s[None, :]
    second = rho * first + math.sqrt(1 - rho * rho) * across
    weight = t_weights[:, None] * s_weights[None, :]
    return first + 0 * across, second, weight / weight.sum()
