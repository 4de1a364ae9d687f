"""Geometry of a normalized linear layer at a batch: effective weights, their ellipsoid, what the batch cannot see."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import DataError, InputError, NonFiniteError
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument, spend

SAME = 0.05  # relative distance of effective weights: within, batch and weight norm are the same layer in practice
COLLAPSED = 0.5  # share of a row's variance that eps leaves


@dataclass(frozen=True, eq=False)
class LayerGeometry(Result):
    """What batch and layer normalization make of one linear layer on one batch; made by `layer_geometry`.

    Args:
        effective_weights: rows `W'_i = gamma_i W_i / sqrt(W_i S W_i^T + eps)`; batch normalization is `W' x + b'`.
        effective_bias: `b'_i = beta_i - W'_i mean(x)`.
        covariance: S, biased, of the inputs over the batch.
        semi_axes: of the ellipsoid `w S w^T = 1`, in descending order: `1 / sqrt(lambda)` for the eigenvalues
            lambda > 0 of S. For eps = 0, `W'_i / gamma_i` lies on it, up to the kernel of S.
        rank: of S, at most min(n, B - 1): the centring costs one.
        kernel_dimension: n - rank, the directions of weights this batch cannot see.
        kernel_share: per row, `||part of W_i in the kernel||^2 / ||W_i||^2`.
        on_ellipsoid: per row, `W'_i S W'_i^T / gamma_i^2`, which is 1 for eps = 0 and `v / (v + eps)` otherwise; zero
            for a row in the kernel, whose output has collapsed to beta.
        radius: per row, `||BN(Y_i) - beta_i||`; `|gamma_i| sqrt(B)` for eps = 0.
        centred_weights: `W_i - mean of the rows`: what layer normalization after the same weights sees.
        weight_norm_error: the largest relative distance, over rows, of `W'_i` from `gamma_i W_i / ||W_i||`: zero where
            batch normalization is weight normalization on centred inputs, that is where `W_i S W_i^T = ||W_i||^2`.
        whiteness: `||S - I|| / ||I||` in the spectral norm; zero is sufficient for weight_norm_error = 0.
        batch: samples.
        two_valued: True if the batch has two samples, so that every normalized output is -1, 1 or 0 (up to eps) and
            the derivative with respect to weights and inputs vanishes.
        gradient_share: per row, the Frobenius norm of the Jacobian of `BN(Y_i)` with respect to `Y_i` relative to that
            of a fixed division by the same scale; `sqrt((B - 2) / B)` for eps = 0: zero for a batch of two.
        eps: as given.
        kernel_basis: orthonormal columns spanning the kernel of S.
    """

    effective_weights: Tensor = field(repr=False)
    effective_bias: Tensor = field(repr=False)
    covariance: Tensor = field(repr=False)
    semi_axes: Tensor = field(repr=False)
    rank: int
    kernel_dimension: int
    kernel_share: Tensor = field(repr=False)
    on_ellipsoid: Tensor = field(repr=False)
    radius: Tensor = field(repr=False)
    centred_weights: Tensor = field(repr=False)
    weight_norm_error: float
    whiteness: float
    batch: int
    two_valued: bool
    gradient_share: Tensor = field(repr=False)
    eps: float
    kernel_basis: Tensor = field(repr=False)

    def _title(self) -> str:
        rows, width = self.effective_weights.shape
        longest, shortest = (self.semi_axes[0], self.semi_axes[-1]) if self.rank else (float("nan"),) * 2
        sentences = [
            f"layer geometry: {rows} rows of {width} weights, batch of {self.batch}",
            f"covariance of rank {self.rank}, kernel of dimension {self.kernel_dimension}",
            f"ellipsoid with semi-axes {float(longest):.4g} to {float(shortest):.4g}",
            f"distance of batch norm from weight norm {self.weight_norm_error:.4g} (|S - I| = {self.whiteness:.4g})",
        ]
        if self.two_valued:
            sentences.append("a batch of two: outputs are -1 and 1 whatever the weights, and gradients vanish")
        return "\n".join(sentences)

    def _rows(self) -> list[dict[str, Any]]:
        columns = {
            "effective_norm": self.effective_weights.norm(dim=1),
            "effective_bias": self.effective_bias,
            "on_ellipsoid": self.on_ellipsoid,
            "radius": self.radius,
            "kernel_share": self.kernel_share,
            "centred_norm": self.centred_weights.norm(dim=1),
            "gradient_share": self.gradient_share,
        }
        rows = range(len(self.effective_weights))
        return [{"row": row, **{name: float(values[row]) for name, values in columns.items()}} for row in rows]

    def readings(self) -> tuple[Reading, ...]:
        """Return the distance from weight normalization, rank, kernel, and per row what eps leaves of the ellipsoid."""
        return (
            Reading("distance from weight normalization", self.weight_norm_error),
            Reading("rank of the covariance", self.rank),
            Reading("kernel dimension", self.kernel_dimension),
            Reading("distance of the covariance from identity", self.whiteness),
            *(Reading("on ellipsoid", float(value), layer=str(i)) for i, value in enumerate(self.on_ellipsoid)),
        )

    def _meaning(self) -> str:
        if self.two_valued:
            return "A batch of 2: outputs are -1 and 1 (up to eps) whatever the weights; gradients vanish."
        collapsed = int((self.on_ellipsoid < COLLAPSED).sum())
        if collapsed:
            why = f"eps is over {1 - COLLAPSED:.0%} of their variance on this batch"
            return f"{collapsed} rows have collapsed to their bias ({why}): lower eps, or use a larger batch."
        unseen = f"{self.kernel_dimension} of {self.covariance.shape[0]} directions"
        blind = f"this batch of {self.batch} does not see {unseen}"
        said = f"Batch norm is {self.weight_norm_error:.3g} from weight norm here"
        if self.weight_norm_error <= SAME:
            return f"{said} (under {SAME:g}): dividing by the weight's norm would do the same; {blind}."
        return f"{said} (over {SAME:g}): it also undoes the scales of the inputs' covariance; {blind}."

    def _notes(self) -> str:
        return f"eps {self.eps:g} takes {float(1 - self.on_ellipsoid.min()):.2g} of a row's variance at most"

    def chart(self) -> Chart:
        """Return a chart of the ellipsoid's semi-axes (needs the `lab` extra)."""
        from normgauge.charts import curves

        rows = [{"axis": i, "semi-axis": v, "series": "semi-axis"} for i, v in enumerate(self.semi_axes.tolist(), 1)]
        title = "Semi-axes of the effective weights' ellipsoid"
        return curves(rows, x="axis", y="semi-axis", legend=False, title=title)


@instrument
def layer_geometry(
    weight: Tensor, inputs: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5
) -> LayerGeometry:
    r"""Read the geometry of a linear layer followed by batch (or layer) normalization, at one batch.

    With inputs x of mean m and biased covariance S: `BN(W_i x) = W'_i x + b'_i` on this batch, where
    `W'_i = gamma_i W_i / sqrt(W_i S W_i^T + eps)`, `b'_i = beta_i - W'_i m`. For eps = 0 the rows `W'_i / gamma_i` lie
    on the ellipsoid `w S w^T = 1` of dimension rank(S) - 1 times the kernel of S.

    Kind: exact at this batch, in float64. Cost: one product of weights and inputs, one singular value decomposition.

    Args:
        weight: `(rows, n)`; a convolution's weight is flattened, and its inputs must then be patches.
        inputs: `(B, n)`.
        gamma: gain per row, or None for 1.
        beta: bias per row, or None for 0.
        eps: added to the variance of each row.

    Deviations: sun2020 bounds rank(S) by min(n, B); centring makes it min(n, B - 1). It calls the set of effective
        weights compact: with a kernel, `W'_i` is free in it, and the set is an ellipsoid times that space, unbounded.
        It says a row lies in or near the kernel with high probability when B is small; a random row has the share
        `1 - rank / n` of its square there on average, but is outside it with probability one, and normalization
        divides by the rest. Two samples give -1 and 1 only for eps = 0 and different outputs.

    Examples:
        >>> x = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])  # S is the identity
        >>> reading = layer_geometry(torch.tensor([[3.0, 4.0]]), x, eps=0.0)
        >>> reading.effective_weights.tolist(), reading.rank, round(reading.weight_norm_error, 12)
        ([[0.6, 0.8]], 2, 0.0)

    References: sun2020.
    """
    w, x = _check_layer(weight, inputs)
    gain = torch.ones(len(w), dtype=w.dtype) if gamma is None else _per_row("gamma", gamma, w)
    offset = torch.zeros(len(w), dtype=w.dtype) if beta is None else _per_row("beta", beta, w)
    mean, samples = x.mean(0), len(x)
    centred = x - mean
    _, singular, directions = torch.linalg.svd(centred / samples**0.5, full_matrices=True)
    tolerance = singular.max() * max(x.shape) * torch.finfo(x.dtype).eps if len(singular) else 0.0
    rank = int((singular > tolerance).sum())
    kernel = directions[rank:].T
    spend("forwards")
    outputs = centred @ w.T
    variance = outputs.square().mean(0)
    scale = (variance + eps).sqrt()
    outside_kernel = variance > (tolerance * w.norm(dim=1)).square()  # below, the row is in the kernel up to rounding
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    effective = gain[:, None] * w / divisor[:, None]
    covariance = centred.T @ centred / samples
    standard = gain[:, None] * w / w.norm(dim=1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
    normalized = torch.where(outside_kernel, outputs / divisor, 0 * outputs)
    identity = torch.eye(x.shape[1], dtype=x.dtype)
    return LayerGeometry(
        effective_weights=effective,
        effective_bias=offset - effective @ mean,
        covariance=covariance,
        semi_axes=1 / singular[:rank].flip(0),
        rank=rank,
        kernel_dimension=x.shape[1] - rank,
        kernel_share=(w @ kernel).square().sum(1) / w.square().sum(1).clamp_min(torch.finfo(w.dtype).tiny),
        on_ellipsoid=torch.where(outside_kernel, variance / divisor.square(), 0.0),
        radius=gain.abs() * normalized.norm(dim=0),
        centred_weights=w - w.mean(0),
        weight_norm_error=float(_row_error(effective, standard)),
        whiteness=float(torch.linalg.matrix_norm(covariance - identity, 2)),
        batch=samples,
        two_valued=samples == 2,
        gradient_share=_gradient_share(normalized),
        eps=eps,
        kernel_basis=kernel,
        mode="train",
    )


def _gradient_share(normalized: Tensor) -> Tensor:
    # The Jacobian over the scale is I - 1 1^T / B - y y^T / B with y the normalized row, orthogonal to 1.
    samples = len(normalized)
    along = normalized.square().mean(0)
    squared = (samples - 1) - 2 * along + along.square()
    return (squared.clamp_min(0) / samples).sqrt()


def _row_error(effective: Tensor, standard: Tensor) -> Tensor:
    size = standard.norm(dim=1)
    used = size > 0
    return ((effective - standard).norm(dim=1)[used] / size[used]).max() if bool(used.any()) else torch.zeros(())


def _check_layer(weight: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    w, x = weight.detach().double().cpu().flatten(1), inputs.detach().double().cpu()
    if x.dim() != 2 or x.shape[1] != w.shape[1]:
        rule = "inputs are (B, n) with n the entries of a row of the weight"
        got = f"inputs {tuple(inputs.shape)} and weight {tuple(weight.shape)}"
        step = "Flatten the inputs, or cut a convolution's inputs into patches with torch.nn.functional.unfold"
        raise InputError("layer_geometry", rule, got, step)
    if len(x) < 2:
        raise DataError("layer_geometry", "the batch needs at least two samples", f"{len(x)}", "Give a larger batch")
    if not bool(torch.isfinite(w).all() and torch.isfinite(x).all()):
        rule = "weights and inputs are finite"
        raise NonFiniteError("layer_geometry", rule, "inf or nan", "Look for a diverged layer")
    return w, x


def _per_row(name: str, value: Tensor, weight: Tensor) -> Tensor:
    if value.shape != (len(weight),):
        got = f"shape {tuple(value.shape)} for {len(weight)} rows"
        step = "Pass the normalizer's own parameter"
        raise InputError("layer_geometry", f"{name} has one number per row", got, step)
    return value.detach().double().cpu()
