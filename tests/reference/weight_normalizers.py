"""Naive twins of the weight normalizers: one row, one entry at a time, full Jacobians, and gradients in closed form."""

import math

import torch

from normgauge.nn.functional import weight_norm_backward


def rows_of(weight):
    return [[float(x) for x in row.reshape(-1)] for row in weight]


def loop(kind, weight, **options):
    """Normalize row by row in Python floats."""
    out = []
    for number, row in enumerate(rows_of(weight)):
        n = len(row)
        mean = sum(row) / n
        centred = [x - mean for x in row]
        length = math.sqrt(sum(x * x for x in row))
        spread = math.sqrt(sum(x * x for x in centred))
        if kind == "weight_norm":
            out.append([options["g"][number] * x / length for x in row])
        elif kind == "centered_weight_norm":
            out.append([x / spread for x in centred])
        elif kind == "weight_standardization":
            out.append([x / math.sqrt(spread**2 / n + options["eps"]) for x in centred])
        elif kind == "unit_sphere":
            out.append([options["radius"] * x / length for x in row])
    return torch.tensor(out, dtype=torch.float64).reshape(weight.shape)


def vector_jacobian(function, argument, grad):
    """J^T grad from the full Jacobian by central differences, entry by entry."""
    result = torch.zeros_like(argument)
    step = 1e-6
    for entry in range(argument.numel()):
        bump = torch.zeros_like(argument)
        bump.view(-1)[entry] = step
        change = (function(argument + bump) - function(argument - bump)) / (2 * step)
        result.view(-1)[entry] = (change * grad).sum()
    return result


def center_rows(v):
    rows = v.flatten(1)
    return rows - rows.mean(1, keepdim=True)


def centered_weight_norm_backward(grad, v):
    """Return the gradient of `centered_weight_norm` with respect to `v`, from `grad` with respect to w.

    dL/dv = (P grad - <grad, w> w) / ||P v|| per row, with P the centring of Lemma 1.
    """
    rows = center_rows(v)
    return weight_norm_backward(center_rows(grad), rows, v.new_ones(len(rows)))[0].reshape(v.shape)


def weight_standardization_backward(grad, v, eps=1e-10):
    """Return the gradient of `weight_standardization` with respect to `v`, from `grad` with respect to w.

    dL/dv = (P grad - w <grad, w> / n) / sqrt(var v + eps) per row, with P the centring of Lemma 1.
    """
    rows = center_rows(v)
    scale = (rows.square().mean(1, keepdim=True) + eps).rsqrt()
    unit = rows * scale
    incoming = center_rows(grad)
    along = (incoming * unit).mean(1, keepdim=True)
    return ((incoming - along * unit) * scale).reshape(v.shape)


def unit_sphere_backward(grad, v, radius=1.0):
    """Return the gradient of `unit_sphere`: (radius / ||v||) (grad - <grad, u> u) per row, with u = v / ||v||."""
    return weight_norm_backward(grad, v, v.new_full((v.shape[0],), radius))[0]


def spectral_norm_backward(grad, matrix):
    """Return the gradient of `spectral_norm`: (grad - <grad, W / sigma> u v^T) / sigma, u and v the top singular pair.

    Holds where the largest singular value is simple; where it is not, the norm has no gradient and this is one of its
    subgradients.

    Deviations: miyato2018 holds u and v from power iterations; here they are the exact ones.
    """
    rows, incoming = matrix.flatten(1), grad.flatten(1)
    left, values, right = torch.linalg.svd(rows, full_matrices=False)
    sigma = values[0]
    along = (incoming * rows).sum() / sigma
    return ((incoming - along * torch.outer(left[:, 0], right[0])) / sigma).reshape(matrix.shape)
