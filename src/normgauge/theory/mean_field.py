"""Wide networks at initialization: what one layer does to signal and gradient, for any activation.

A unit's values on a batch have one law for all units. Linear maps with independent weights make it Gaussian; batch
normalization of B exchangeable Gaussian samples makes it uniform on the sphere of radius sqrt(B) without the mean.
In both cases the means below need one entry `y` (Gauss-Legendre panels against its density) and two entries, whose mean
of products is a sum over the orthonormal polynomials p_k of that density (Hermite or Gegenbauer; Funk and Hecke),

    E f(y_1) g(y_2) = sum_k <f, p_k> <g, p_k> r_k,   r_k = rho^k (Gaussian), p_k(-1 / (B - 1)) / p_k(1) (sphere).

For `h^{l+1} = W phi(BN(h^l))` with weights of variance 1 / width, q = E phi(y_1)^2, c = E phi(y_1) phi(y_2),
D = diag(phi'(y)), G = I - 1 1^T / B, P = G - y y^T / B, and the mean 1 / (B - 3) of 1 / chi^2 with B - 1 degrees,

    square growth      lambda = B / ((q - c)(B - 3)) * E tr(P D G D) / (B - 1),

the factor of the **squared** gradient norm with respect to `h`, per layer towards the input. It belongs to the fixed
point that treats all samples alike, which attracts only where `symmetry_stability` is at most 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy import special

from normgauge.errors import InputError, unknown_name

Curve = Callable[[np.ndarray], np.ndarray]
_TAIL, _PANEL, _PER_PANEL, _TERMS = 12.0, 0.25, 8, 48  # reach and panel in y, nodes per panel, polynomials


def _normal(y: np.ndarray) -> np.ndarray:
    return np.exp(-y * y / 2) / math.sqrt(2 * math.pi)


_CURVES: dict[str, tuple[Curve, Curve]] = {  # name -> phi, phi'
    "identity": (lambda y: y, np.ones_like),
    "relu": (lambda y: np.maximum(y, 0), lambda y: (y > 0) * 1.0),
    "leaky_relu": (lambda y: np.maximum(y, 0.01 * y), lambda y: np.where(y > 0, 1.0, 0.01)),
    "tanh": (np.tanh, lambda y: 1 / np.cosh(y) ** 2),
    "erf": (special.erf, lambda y: 2 / math.sqrt(math.pi) * np.exp(-y * y)),
    "gelu": (lambda y: y * special.ndtr(y), lambda y: special.ndtr(y) + y * _normal(y)),
}
ACTIVATIONS = tuple(_CURVES)


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
        stability: factor per layer of a difference between the samples' variances; the fixed point repels above 1.
    """

    activation: str
    batch: float
    square_growth: float
    second_moment: float
    overlap: float
    pre_variance: float
    stability: float

    @property
    def norm_growth(self) -> float:
        """Factor of the gradient norm itself: the square root of `square_growth`."""
        return math.sqrt(self.square_growth)


@dataclass(frozen=True, eq=False)
class Law:
    """The law of one entry of a unit's batch, standard Gaussian (`batch` inf) or normalized: nodes y, their weights."""

    batch: float
    y: np.ndarray
    weight: np.ndarray

    @cached_property
    def _polynomials(self) -> tuple[np.ndarray, np.ndarray]:
        """Orthonormal polynomials at the nodes (three-term recurrence) and r_k of two samples of a batch."""
        root = math.sqrt(self.batch - 1)
        points = np.append(self.y, [0.0, 0.0] if math.isinf(root) else [-1 / root, root])
        weight = np.append(self.weight, [0.0, 0.0])
        table, before, off = [np.ones_like(points)], np.zeros_like(points), 0.0
        for _ in range(min(_TERMS, len(self.y) // 2) - 1):
            last = table[-1]
            following = (points - weight @ (points * last * last)) * last - off * before
            off = math.sqrt(weight @ following**2)
            before = last
            table.append(following / off)
        basis = np.stack(table)
        return basis[:, :-2], basis[:, -2] / np.where(basis[:, -1] == 0, 1.0, basis[:, -1])

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return E f(y) from the values at the nodes, which lie along the last axis."""
        return values @ self.weight

    def coefficients(self, values: np.ndarray) -> np.ndarray:
        """Return the coefficients `<f, p_k>`, and the rest of the norm as if it were one more."""
        heads = (values * self.weight) @ self._polynomials[0].T
        rest = np.sqrt(np.maximum(self.mean(values**2) - (heads**2).sum(-1), 0))
        return np.concatenate([heads, rest[..., None]], -1)

    def pair(self, values: np.ndarray, correlation: float = 0.0) -> np.ndarray:
        """Return E f(y_1) f(y_2); `correlation` is that of a Gaussian pair, a normalized batch has its own."""
        squares = self.coefficients(values) ** 2
        if math.isinf(self.batch):
            return squares @ np.power(float(correlation), np.arange(squares.shape[-1]))
        return squares[..., :-1] @ self._polynomials[1]


@lru_cache(maxsize=64)
def law_of(batch: float = math.inf) -> Law:
    """Return the law of an entry of a normalized batch of `batch` exchangeable samples; standard normal for inf."""
    reach = math.pi / 2 if batch < 4 + _TAIL**2 else math.asin(_TAIL / math.sqrt(batch - 1)) if batch < 1e12 else 0.0
    span = reach * math.sqrt(batch - 1) if reach else _TAIL
    edges = np.linspace(-1, 1, 2 * math.ceil(span / _PANEL) + 1)
    points, shares = np.polynomial.legendre.leggauss(_PER_PANEL)
    x = (edges[:-1, None] + np.diff(edges)[:, None] * (points + 1) / 2).ravel()
    share = np.tile(shares, len(edges) - 1)
    if not reach:
        y, density = _TAIL * x, _normal(_TAIL * x)
    else:  # y = sqrt(B - 1) sin(angle): the density is a power of the cosine
        y, density = math.sqrt(batch - 1) * np.sin(reach * x), np.cos(reach * x) ** (batch - 3)
    return Law(math.inf if not reach else batch, y, share * density / (share @ density))


def symmetry_stability(values: np.ndarray, slopes: np.ndarray) -> float:
    """Return `E y (phi - E phi) phi' / var phi` for a standard normal y, from values at the nodes of `law_of()`.

    It is the factor per layer of a small difference between the variances of a batch's samples, for large batches: 1
    for homogeneous phi of degree one, p for degree p. Above 1 the fixed point that treats all samples alike repels.

    Examples:
        >>> y = law_of().y
        >>> round(symmetry_stability(y**3, 3 * y**2), 6), round(symmetry_stability(np.maximum(y, 0), (y > 0) * 1.0), 6)
        (3.0, 1.0)

    References: yang2019
    """
    law = law_of()
    centred = values - law.mean(values)[..., None]
    return float(np.mean(law.mean(law.y * centred * slopes)) / np.mean(law.mean(centred**2)))


def batchnorm_backward(law: Law, values: np.ndarray, slopes: np.ndarray) -> tuple[float, float]:
    """Return what BN, then phi, makes of gradient covariances I and 1 1^T: their factors of G, times (q - c).

    `B / (B - 3) / (B - 1)` times `E tr(P D^2)` and `E d^T P d` with d = phi'(y); units lie along the first axes.
    """
    dd, ydd = (float(np.mean(law.mean(part**2))) for part in (slopes, law.y * slopes))
    if math.isinf(law.batch):
        return dd, 0.0
    B, d12, yd12 = law.batch, float(np.mean(law.pair(slopes))), float(np.mean(law.pair(law.y * slopes)))
    ones, along = B * dd + B * (B - 1) * d12, B * ydd + B * (B - 1) * yd12  # E (1 . d)^2, E (y . d)^2
    scale = B / ((B - 3) * (B - 1))
    return scale * ((B - 1) * dd - ydd), scale * (B * dd - ones / B - along / B)


def batchnorm_layer(
    activation: str | tuple[Curve, Curve], batch: float, *, gain: float = 1.0, shift: float = 0.0
) -> MeanField:
    """Return what one layer of an infinitely wide batch-normalized network does, at batch size `batch`.

    Kind: exact at infinite width for the fixed point that treats all samples alike, up to the quadrature: relative
    error below 1e-8 for smooth phi, 1e-3 where phi has a kink (1e-2 for batches under 8).

    Args:
        activation: identity, relu, leaky_relu, tanh, erf or gelu, or functions phi and phi' of arrays.
        batch: at least 4 (below, the mean square of the gradient is infinite), or `math.inf`.
        gain: of the normalizer.
        shift: of the normalizer.

    Deviations: S3 says that the gradient *norm* grows by pi / (pi - 1) = 1.467 per layer for ReLU and large batches;
        this is the factor of the *square*, and the norm grows by its root, 1.211.

    Examples:
        The linear network grows by (B - 2) / (B - 3), ReLU at large batches by pi / (pi - 1):

        >>> round(batchnorm_layer("identity", 8).square_growth, 10)
        1.2
        >>> round(batchnorm_layer("relu", math.inf).square_growth - math.pi / (math.pi - 1), 10)
        0.0

    References: yang2019, batchnorm_article.
    """
    if isinstance(activation, str) and activation not in _CURVES:
        raise unknown_name("activation", activation, ACTIVATIONS)
    if not batch >= 4 or (math.isfinite(batch) and batch != int(batch)):
        rule = "batch must be a whole number of at least 4, or inf: 1 / (B - 3) is the mean of the inverse variance"
        raise InputError("mean_field.batchnorm_layer", rule, f"{batch:g}", "Use larger batches")
    name, (phi, slope) = (activation, _CURVES[activation]) if isinstance(activation, str) else ("", activation)
    law, normal = law_of(batch), law_of()
    values, slopes = phi(gain * law.y + shift), gain * slope(gain * law.y + shift)
    q, c = float(law.mean(values**2)), float(law.pair(values))
    alone, together = batchnorm_backward(law, values, slopes)
    stability = symmetry_stability(phi(gain * normal.y + shift), gain * slope(gain * normal.y + shift))
    B = law.batch
    growth = (alone - (0.0 if math.isinf(B) else together / B)) / (q - c)
    moments = {"second_moment": q, "overlap": c, "pre_variance": (q - c) * (1 - 1 / B)}
    return MeanField(name, batch, square_growth=growth, stability=stability, **moments)
