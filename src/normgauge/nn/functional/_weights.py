"""Weight normalizers on tensors: forward maps and their closed-form backward maps; rows are slices of axis 0.

With S4 Lemma 1, v = gamma N(v) + beta e: a row splits into its mean (beta), its spread (gamma) and a direction N(v) on
the sphere of radius sqrt(n) orthogonal to e = (1, ..., 1). Every map here keeps the direction and fixes the rest, so
every backward map is: project the incoming gradient on the tangent space of that sphere, divide by the old length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normgauge.errors import InputError


def weight_norm(v: Tensor, g: Tensor) -> Tensor:
    """Return rows of length `g` in the direction of the rows of `v`: w_i = g_i v_i / ||v_i||.

    Row i lies on the sphere S^(n-1) of radius |g_i|, n entries per row.

    Deviations: akbar2025 (Prop. 4.3, Table 1) states invariance under (v, g) -> (a v, g / a). The map is invariant
    under (v, g) -> (a v, g) for a > 0; the printed change divides w by a. The example shows it.

    Examples:
        >>> v, g = torch.tensor([[3.0, 4.0]]), torch.tensor([10.0])
        >>> weight_norm(v, g), weight_norm(2 * v, g), weight_norm(2 * v, g / 2)
        (tensor([[6., 8.]]), tensor([[6., 8.]]), tensor([[3., 4.]]))

    References: salimans2016, sun2020, akbar2025.
    """
    rows = v.flatten(1)
    return (rows * (_column(g) / _length(rows))).reshape(v.shape)


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `weight_norm` with respect to `v` and `g`, from `grad` with respect to w.

    With u = v / ||v||: dL/dg = <grad, u> and dL/dv = (g / ||v||) (grad - <grad, u> u), per row.

    Deviations: akbar2025 (sec. 3.2) prints dL/dv_k = dL/dw_k dw_k/dv_k, the diagonal of the Jacobian alone; the true
    one is full. It also prints dL/dg with an extra factor 1 / ||v||, and a gradient parallel to v (sec. 4.3 and 3.2);
    it is orthogonal to v, as the example shows.

    Examples:
        >>> v = torch.tensor([[3.0, 4.0]])
        >>> by_v, by_g = weight_norm_backward(torch.tensor([[1.0, 0.0]]), v, torch.tensor([10.0]))
        >>> by_g, abs(float((by_v * v).sum())) < 1e-6
        (tensor([0.6000]), True)

    References: salimans2016, sun2020.
    """
    rows, incoming = v.flatten(1), grad.flatten(1)
    length = _length(rows)
    unit = rows / length
    along = (incoming * unit).sum(1, keepdim=True)
    by_v = (_column(g) / length) * (incoming - along * unit)
    return by_v.reshape(v.shape), along.reshape(g.shape)


def centered_weight_norm(v: Tensor) -> Tensor:
    """Return rows of mean zero and length one: w_i = (v_i - mean v_i) / ||v_i - mean v_i||.

    Row i lies on the unit sphere S^(n-2) of the hyperplane orthogonal to (1, ..., 1). Needs n >= 2 entries per row, and
    n >= 3 to have any freedom: for n = 2 the sphere is two points.

    Raises:
        InputError: when rows have a single entry.

    Examples:
        >>> centered_weight_norm(torch.tensor([[1.0, 2.0, 2.0, 3.0]]))  # -1, 0, 0, 1 over sqrt(2)
        tensor([[-0.7071,  0.0000,  0.0000,  0.7071]])

    References: huang2017, sun2020.
    """
    rows = _center_rows(v)
    return (rows / _length(rows)).reshape(v.shape)


def centered_weight_norm_backward(grad: Tensor, v: Tensor) -> Tensor:
    """Return the gradient of `centered_weight_norm` with respect to `v`, from `grad` with respect to w.

    dL/dv = (P grad - <grad, w> w) / ||P v|| per row, with P the centring of Lemma 1.

    References: huang2017, sun2020.
    """
    rows = _center_rows(v)
    length = _length(rows)
    unit = rows / length
    incoming = _center_rows(grad)
    along = (incoming * unit).sum(1, keepdim=True)
    return ((incoming - along * unit) / length).reshape(v.shape)


def weight_standardization(v: Tensor, eps: float = 1e-10) -> Tensor:
    """Return rows of mean zero and variance one: w_i = (v_i - mean v_i) / sqrt(var v_i + eps), var with 1 / n.

    Row i lies on the sphere S^(n-2) of radius sqrt(n var / (var + eps)), which is sqrt(n) for eps = 0: sqrt(n) times
    `centered_weight_norm`. Times gain / sqrt(n) it is scaled weight standardization (brock2021), on radius gain.

    Raises:
        InputError: when rows have a single entry.

    Deviations: qiao2019's code adds eps = 1e-5 to the unbiased standard deviation (1 / (n - 1)); sun2020 (eq. 15) has
    no eps and 1 / n. The default here is small enough not to be seen.

    Examples:
        >>> weight_standardization(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.,  1.]])

    References: qiao2019, sun2020, brock2021.
    """
    rows = _center_rows(v)
    return (rows * (rows.square().mean(1, keepdim=True) + eps).rsqrt()).reshape(v.shape)


def weight_standardization_backward(grad: Tensor, v: Tensor, eps: float = 1e-10) -> Tensor:
    """Return the gradient of `weight_standardization` with respect to `v`, from `grad` with respect to w.

    dL/dv = (P grad - w <grad, w> / n) / sqrt(var v + eps) per row, with P the centring of Lemma 1.

    References: qiao2019, sun2020.
    """
    rows = _center_rows(v)
    scale = (rows.square().mean(1, keepdim=True) + eps).rsqrt()
    unit = rows * scale
    incoming = _center_rows(grad)
    along = (incoming * unit).mean(1, keepdim=True)
    return ((incoming - along * unit) * scale).reshape(v.shape)


def unit_sphere(v: Tensor, radius: float = 1.0) -> Tensor:
    """Return rows of length `radius`: w_i = radius v_i / ||v_i||, a point of the oblique manifold.

    Row i lies on S^(n-1) of that radius; it is `weight_norm` with its lengths held fixed.

    Examples:
        >>> unit_sphere(torch.tensor([[3.0, 4.0]]), radius=5.0)
        tensor([[3., 4.]])

    References: salimans2016, sun2020.
    """
    rows = v.flatten(1)
    return (rows * (radius / _length(rows))).reshape(v.shape)


def unit_sphere_backward(grad: Tensor, v: Tensor, radius: float = 1.0) -> Tensor:
    """Return the gradient of `unit_sphere`: (radius / ||v||) (grad - <grad, u> u) per row, with u = v / ||v||."""
    return weight_norm_backward(grad, v, v.new_full((v.shape[0],), radius))[0]


def spectral_norm(matrix: Tensor) -> Tensor:
    """Return the matrix divided by its largest singular value: W / sigma(W), of norm one.

    The whole matrix lies on the unit sphere of the spectral norm. Axes after the first are joined; for a convolution
    this is *not* division by the norm of the layer: `normgauge.nn.spectral_norm` is.

    Examples:
        >>> spectral_norm(torch.diag(torch.tensor([4.0, 2.0])))
        tensor([[1.0000, 0.0000],
                [0.0000, 0.5000]])

    References: miyato2018, sun2020.
    """
    return matrix / torch.linalg.matrix_norm(matrix.flatten(1), ord=2)


def spectral_norm_backward(grad: Tensor, matrix: Tensor) -> Tensor:
    """Return the gradient of `spectral_norm`: (grad - <grad, W / sigma> u v^T) / sigma, u and v the top singular pair.

    Holds where the largest singular value is simple; where it is not, the norm has no gradient and this is one of its
    subgradients.

    Deviations: miyato2018 holds u and v from power iterations; here they are the exact ones.

    References: miyato2018.
    """
    rows, incoming = matrix.flatten(1), grad.flatten(1)
    left, values, right = torch.linalg.svd(rows, full_matrices=False)
    sigma = values[0]
    along = (incoming * rows).sum() / sigma
    return ((incoming - along * torch.outer(left[:, 0], right[0])) / sigma).reshape(matrix.shape)


def _column(g: Tensor) -> Tensor:
    return g.reshape(-1, 1)


def _length(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, keepdim=True)


def _center_rows(v: Tensor) -> Tensor:
    rows = v.flatten(1)
    if rows.shape[1] < 2:
        raise InputError(
            "centred weights",
            "a row needs at least two entries, or nothing is left after its mean",
            f"shape {tuple(v.shape)}",
            "Leave this layer (a 1x1 depthwise convolution?) as it is, or use weight_norm",
        )
    return rows - rows.mean(1, keepdim=True)
