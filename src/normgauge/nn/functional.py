"""Pure forward maps of the normalizers and their closed-form backward maps, on tensors alone.

Arguments everywhere: `x` is `(batch, channels, *space)` for maps over channels, any tensor for maps over its `trailing`
axes; `gamma` (None for 1) and `beta` (None for 0) are per channel or entry; `eps` is added to what is under the root;
`grad` is the gradient with respect to the output; `v` is `[rows, ...]` with one `g` per row; `p` is at least 1 or inf.

Batch, layer, group and RMS normalization are `y = gamma * (x - beta(x)) / scale(x) + beta` on blocks of `n` entries, by
`decompose`. With `h = gamma * grad`, means over the block and `xhat = (x - mean) / scale`, the backward map is

    dx = (h - mean(h) - xhat * mean(h * xhat)) / scale,      scale = sqrt(var + eps),

for every eps, since `d scale / d x_k = xhat_k / n`. Without centring the term `mean(h)` is absent. Weight normalizers
(rows are slices of axis 0) keep the direction of a row and fix its mean or length, so every backward map of theirs is:
project the incoming gradient on the tangent space of that sphere, divide by the old length.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.nn._layout import per_channel, reduced_axes

Gradients = tuple[Tensor, Tensor, Tensor]


class Decomposition(NamedTuple):
    """The three parts of `v = gamma * direction + beta`."""

    gamma: Tensor
    direction: Tensor
    beta: Tensor


def decompose(v: Tensor, dim: int = -1) -> Decomposition:
    r"""Split vectors into standard deviation, standardized direction and mean: `v = gamma * direction + beta`.

    With n entries along `dim`: `beta = sum(v) / n`, `gamma = ||v - beta|| / sqrt(n)`, `direction = (v - beta) / gamma`.
    The parts are orthogonal and `||direction|| = sqrt(n)`, `sum(direction) = 0`, so `||v||^2 = n (gamma^2 + beta^2)`:
    the direction lies on an (n - 2)-sphere. A constant vector has no direction: `gamma = 0`, `direction = 0`. `gamma`
    and `beta` keep `dim` with size 1, so that they broadcast.

    Deviations: sun2020 Lemma 1 (4) prints `N(alpha v + t e) = N(v)` for all real alpha; a negative alpha flips the
        direction (the error of the print is `||2 N(v)|| / ||N(v)|| = 2`), and alpha = 0 leaves none. Its proof of (3)
        prints `||P v|| / n` for gamma, too small by the factor `sqrt(n)`, and drops the square of the variance's
        summands, which makes that sum zero.

    Examples:
        >>> gamma, direction, beta = decompose(torch.tensor([1.0, 5.0]))
        >>> gamma.item(), direction.tolist(), beta.item()
        (2.0, [-1.0, 1.0], 3.0)
        >>> decompose(torch.tensor([-1.0, -5.0])).direction.tolist()  # a negative factor flips the direction
        [1.0, -1.0]

    References: sun2020.
    """
    if v.dim() == 0 or v.shape[dim] == 0:
        rule = "v needs at least one entry along dim"
        raise InputError("decompose", rule, f"shape {tuple(v.shape)}", "Give vectors with entries")
    beta = v.mean(dim, keepdim=True)
    centred = v - beta
    squared = centred.square().mean(dim, keepdim=True)
    flat = squared == 0
    # sqrt has no derivative at 0: a constant vector takes gamma = 0 from the branch without a root.
    gamma = torch.where(flat, torch.zeros_like(squared), torch.where(flat, torch.ones_like(squared), squared).sqrt())
    direction = centred / torch.where(flat, torch.ones_like(gamma), gamma)
    return Decomposition(gamma, direction, beta)


def batch_norm(x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    r"""Normalize each channel (axis 1) by mean and variance over batch and space.

    `y = gamma[c] * (x - mean[c]) / sqrt(var[c] + eps) + beta[c]`, with the biased variance.

    Examples:
        >>> batch_norm(torch.tensor([[1.0], [5.0]]), eps=0.0).flatten().tolist()
        [-1.0, 1.0]

    References: ioffe2015, santurkar2018.
    """
    xhat, _ = _standardize(x, reduced_axes(x), eps)
    return _affine(xhat, _channel(gamma, x), _channel(beta, x))


def batch_norm_backward(grad: Tensor, x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5) -> Gradients:
    r"""Return the gradients of `batch_norm` with respect to x, gamma and beta in closed form.

    `dx = gamma / sqrt(var + eps) * (grad - mean(grad) - xhat * mean(grad * xhat))`, means over batch and space;
    `dgamma = sum(grad * xhat)`, `dbeta = sum(grad)`.

    Deviations: akbar2025 eq. (1) takes `grad` to be the gradient of the output and omits gamma: its dx is wrong by the
        factor 1 / gamma (relative error 0.5 at gamma = 2, below). Its App. A.1.1 prints the Jacobian with
        `(z_n - mean)(z_k - mean) / s^3`, without 1 / m: on 8 samples the error is 7 times that term.

    Examples:
        >>> g, x, gamma = torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([2.0])
        >>> right = batch_norm_backward(g, x, gamma, eps=0.0)[0]
        >>> printed = batch_norm_backward(g, x, None, eps=0.0)[0]
        >>> round(float((printed - right).norm() / right.norm()), 6)
        0.5

    References: akbar2025, batchnorm_article, santurkar2018.
    """
    axes = reduced_axes(x)
    xhat, scale = _standardize(x, axes, eps)
    dx = _standardize_backward(_multiply(grad, _channel(gamma, x)), xhat, scale, axes)
    return dx, (grad * xhat).sum(axes), grad.sum(axes)


def layer_norm(
    x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5, *, trailing: int = 1
) -> Tensor:
    r"""Normalize each sample by mean and variance over its trailing axes.

    `y = gamma * (x - mean) / sqrt(var + eps) + beta`, gamma and beta of the shape of the trailing axes.

    Examples:
        >>> layer_norm(torch.tensor([[1.0, 5.0]]), eps=0.0).tolist()
        [[-1.0, 1.0]]

    References: ba2016, sun2020.
    """
    xhat, _ = _standardize(x, _last_axes(x, trailing), eps)
    return _affine(xhat, gamma, beta)


def layer_norm_backward(
    grad: Tensor, x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5, *, trailing: int = 1
) -> Gradients:
    r"""Return the gradients of `layer_norm` with respect to x, gamma and beta in closed form.

    With `h = gamma * grad`: `dx = (h - mean(h) - xhat * mean(h * xhat)) / sqrt(var + eps)`, means over the trailing
    axes; `dgamma = sum(grad * xhat)`, `dbeta = sum(grad)` over the samples.

    Deviations: akbar2025 sec. 3.2 prints `xhat_j` with the summed index j where the free index i belongs (relative
        error 1.53 on six Gaussian entries, and a gradient that no longer sums to zero), and omits gamma, which here
        differs from entry to entry and cannot be put right by a factor.

    Examples:
        >>> dx, _, dbeta = layer_norm_backward(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 5.0]]), eps=0.0)
        >>> dx.tolist(), dbeta.tolist()  # two entries: the output is (-1, 1) whatever x is
        ([[0.0, 0.0]], [1.0, 0.0])

    References: akbar2025, ba2016.
    """
    axes = _last_axes(x, trailing)
    xhat, scale = _standardize(x, axes, eps)
    dx = _standardize_backward(_multiply(grad, gamma), xhat, scale, axes)
    samples = tuple(range(x.dim() - trailing))
    return dx, _sum(grad * xhat, samples), _sum(grad, samples)


def group_norm(
    x: Tensor, groups: int, gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    r"""Normalize each sample by mean and variance over the channels of a group and space.

    `y = gamma[c] * (x - mean[i, g]) / sqrt(var[i, g] + eps) + beta[c]`; one group is layer normalization with channels
    first, as many groups as channels is instance normalization.

    Examples:
        >>> group_norm(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), 2, eps=0.0).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]

    References: wu2018.
    """
    xhat, _ = _standardize(_split_groups(x, groups), (2,), eps)
    return _affine(xhat.reshape(x.shape), _channel(gamma, x), _channel(beta, x))


def group_norm_backward(
    grad: Tensor, x: Tensor, groups: int, gamma: Tensor | None = None, eps: float = 1e-5
) -> Gradients:
    r"""Return the gradients of `group_norm` with respect to x, gamma and beta in closed form.

    With `h = gamma * grad`: `dx = (h - mean(h) - xhat * mean(h * xhat)) / sqrt(var + eps)`, means per sample and group;
    `dgamma = sum(grad * xhat)`, `dbeta = sum(grad)` over batch and space.

    Examples:
        >>> x = torch.tensor([[1.0, 5.0, 2.0, 4.0]])
        >>> group_norm_backward(torch.ones(1, 4), x, 2, eps=0.0)[0].tolist()  # a common shift changes nothing
        [[0.0, 0.0, 0.0, 0.0]]

    References: wu2018.
    """
    xhat, scale = _standardize(_split_groups(x, groups), (2,), eps)
    h = _split_groups(_multiply(grad, _channel(gamma, x)), groups)
    dx = _standardize_backward(h, xhat, scale, (2,)).reshape(x.shape)
    axes = reduced_axes(x)
    return dx, (grad * xhat.reshape(x.shape)).sum(axes), grad.sum(axes)


def rms_norm(x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5, *, trailing: int = 1) -> Tensor:
    r"""Divide each sample by its root mean square over the trailing axes.

    `y = gamma * x / sqrt(mean(x^2) + eps)`.

    Examples:
        >>> rms_norm(torch.tensor([[3.0, 3.0]]), eps=0.0).tolist()
        [[1.0, 1.0]]

    References: zhang2019.
    """
    scale = (x.square().mean(_last_axes(x, trailing), keepdim=True) + eps).sqrt()
    return _multiply(x / scale, gamma)


def rms_norm_backward(
    grad: Tensor, x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5, *, trailing: int = 1
) -> tuple[Tensor, Tensor]:
    r"""Return the gradients of `rms_norm` with respect to x and gamma in closed form.

    With `h = gamma * grad` and `xhat = x / scale`: `dx = (h - xhat * mean(h * xhat)) / scale`.

    Examples:
        >>> dx, _ = rms_norm_backward(torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, 3.0]]), eps=0.0)
        >>> dx.tolist()  # along x nothing changes
        [[0.0, 0.0]]

    References: zhang2019.
    """
    axes = _last_axes(x, trailing)
    scale = (x.square().mean(axes, keepdim=True) + eps).sqrt()
    xhat = x / scale
    h = _multiply(grad, gamma)
    dx = (h - xhat * (h * xhat).mean(axes, keepdim=True)) / scale
    return dx, _sum(grad * xhat, tuple(range(x.dim() - trailing)))


def _standardize(x: Tensor, axes: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    centred = x - x.mean(axes, keepdim=True)
    scale = (centred.square().mean(axes, keepdim=True) + eps).sqrt()
    return centred / scale, scale


def _standardize_backward(h: Tensor, xhat: Tensor, scale: Tensor, axes: tuple[int, ...]) -> Tensor:
    return (h - h.mean(axes, keepdim=True) - xhat * (h * xhat).mean(axes, keepdim=True)) / scale


def _affine(xhat: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    scaled = _multiply(xhat, gamma)
    return scaled if beta is None else scaled + beta


def _multiply(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else x * gamma


def _sum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.sum(axes) if axes else x  # torch sums everything when it is given no axis


def _last_axes(x: Tensor, trailing: int) -> tuple[int, ...]:
    if not 1 <= trailing <= x.dim():
        rule = "trailing is between 1 and the number of axes"
        raise InputError("functional", rule, str(trailing), "Count the averaged axes")
    return tuple(range(x.dim() - trailing, x.dim()))


def _channel(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    return None if parameter is None else per_channel(parameter, x)


def _split_groups(x: Tensor, groups: int) -> Tensor:
    if groups < 1 or x.shape[1] % groups:
        got = f"{groups} groups for {x.shape[1]} channels"
        raise InputError("group_norm", "groups divides the channels", got, "Choose a divisor")
    return x.reshape(x.shape[0], groups, -1)


def lp_norm(x: Tensor, p: float, gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    r"""Centre each channel (axis 1) and divide it by the l_p average of its uncentred values.

    `y = gamma[c] * (x - mean[c]) / s[c] + beta[c]` with `s = (mean(|x|^p) + eps)^(1/p)` over batch and space, and
    `s = max|x| + eps` for p = inf. The average is taken before the mean is removed, so the output is invariant to
    the scale of x but not to its shift.

    Examples:
        >>> lp_norm(torch.tensor([[1.0], [3.0]]), 1, eps=0.0).flatten().tolist()  # (1 - 2) / 2 and (3 - 2) / 2
        [-0.5, 0.5]

    References: santurkar2018.
    """
    scale = lp_root(lp_moment(x, p), p, eps)
    xhat = (x - x.mean(reduced_axes(x), keepdim=True)) / per_channel(scale, x)
    return _affine(xhat, _channel(gamma, x), _channel(beta, x))


def lp_norm_backward(grad: Tensor, x: Tensor, p: float, gamma: Tensor | None = None, eps: float = 1e-5) -> Gradients:
    r"""Return the gradients of `lp_norm` with respect to x, gamma and beta in closed form.

    With `h = gamma * grad`, `xhat = (x - mean) / s` and means over batch and space:
    `dx = (h - mean(h) - mean(h * xhat) * s^(1-p) |x|^(p-1) sign(x)) / s`. For p = inf the last product is
    `sum(h * xhat) * sign(x) / t` at the t values where `|x|` is largest, and zero elsewhere.

    Examples:
        >>> x = torch.tensor([[1.0], [2.0], [6.0]])
        >>> dx, _, _ = lp_norm_backward(torch.tensor([[1.0], [0.0], [0.0]]), x, 2, eps=0.0)
        >>> bool((dx * x).sum().abs() < 1e-6)  # scale invariance: the gradient is orthogonal to x
        True

    References: santurkar2018.
    """
    axes = reduced_axes(x)
    scale = per_channel(lp_root(lp_moment(x, p), p, eps), x)
    xhat = (x - x.mean(axes, keepdim=True)) / scale
    h = _multiply(grad, _channel(gamma, x))
    along = (h * xhat).mean(axes, keepdim=True)
    if math.isinf(p):
        top = x.abs() == x.abs().amax(axes, keepdim=True)
        count = x.numel() // x.shape[1]
        slope = torch.where(top, x.sign(), torch.zeros_like(x)) * (count / top.sum(axes, keepdim=True))
    else:
        slope = scale.pow(1 - p) * x.abs().pow(p - 1) * x.sign()
    dx = (h - h.mean(axes, keepdim=True) - along * slope) / scale
    return dx, (grad * xhat).sum(axes), grad.sum(axes)


def lp_moment(x: Tensor, p: float) -> Tensor:
    """Return `mean(|x|^p)` per channel over batch and space, or `max|x|` for p = inf."""
    check_power(p)
    axes = reduced_axes(x)
    if math.isinf(p):
        return x.abs().amax(axes)
    return (x.square() if p == 2 else x.abs() if p == 1 else x.abs().pow(p)).mean(axes)


def lp_root(moment: Tensor, p: float, eps: float) -> Tensor:
    """Return the scale of a moment: `(moment + eps)^(1/p)`, or `moment + eps` for p = 1 and p = inf."""
    if math.isinf(p) or p == 1:
        return moment + eps
    return (moment + eps).sqrt() if p == 2 else (moment + eps).pow(1 / p)


def check_power(p: float) -> None:
    """Refuse p below 1 and nan: the average of powers is then no norm."""
    if not p >= 1:
        raise InputError("lp_norm", "p is at least 1 (math.inf for the maximum)", repr(p), "Use p=1, 2 or inf")


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
    return (rows * (g.reshape(-1, 1) / _length(rows))).reshape(v.shape)


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
    by_v = (g.reshape(-1, 1) / length) * (incoming - along * unit)
    return by_v.reshape(v.shape), along.reshape(g.shape)


def centered_weight_norm(v: Tensor) -> Tensor:
    """Return rows of mean zero and length one: w_i = (v_i - mean v_i) / ||v_i - mean v_i||.

    Row i lies on the unit sphere S^(n-2) of the hyperplane orthogonal to (1, ..., 1). Needs n >= 2 entries per row, and
    n >= 3 to have any freedom: for n = 2 the sphere is two points.

    Examples:
        >>> centered_weight_norm(torch.tensor([[1.0, 2.0, 2.0, 3.0]]))  # -1, 0, 0, 1 over sqrt(2)
        tensor([[-0.7071,  0.0000,  0.0000,  0.7071]])

    References: huang2017, sun2020.
    """
    rows = _center_rows(v)
    return (rows / _length(rows)).reshape(v.shape)


def weight_standardization(v: Tensor, eps: float = 1e-10) -> Tensor:
    """Return rows of mean zero and variance one: w_i = (v_i - mean v_i) / sqrt(var v_i + eps), var with 1 / n.

    Row i lies on the sphere S^(n-2) of radius sqrt(n var / (var + eps)), which is sqrt(n) for eps = 0: sqrt(n) times
    `centered_weight_norm`. Times gain / sqrt(n) it is scaled weight standardization (brock2021), on radius gain.

    Deviations: qiao2019's code adds eps = 1e-5 to the unbiased standard deviation (1 / (n - 1)); sun2020 (eq. 15) has
    no eps and 1 / n. The default here is small enough not to be seen.

    Examples:
        >>> weight_standardization(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.,  1.]])

    References: qiao2019, sun2020, brock2021.
    """
    rows = _center_rows(v)
    return (rows * (rows.square().mean(1, keepdim=True) + eps).rsqrt()).reshape(v.shape)


def unit_sphere(v: Tensor, radius: float = 1.0) -> Tensor:
    """Return rows of length `radius`: w_i = radius v_i / ||v_i||, a point of the oblique manifold.

    Row i lies on S^(n-1) of that radius; it is `weight_norm` with its lengths held fixed.

    Examples:
        >>> unit_sphere(torch.tensor([[3.0, 4.0]]), radius=5.0)
        tensor([[3., 4.]])

    References: salimans2016, sun2020.
    """
    return weight_norm(v, v.new_full((len(v),), radius))


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


def _length(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, keepdim=True)


def _center_rows(v: Tensor) -> Tensor:
    rows = v.flatten(1)
    if rows.shape[1] < 2:
        rule = "a row needs at least two entries, or nothing is left after its mean"
        step = "Leave this layer (a 1x1 depthwise convolution?) as it is, or use weight_norm"
        raise InputError("centred weights", rule, f"shape {tuple(v.shape)}", step)
    return rows - rows.mean(1, keepdim=True)
