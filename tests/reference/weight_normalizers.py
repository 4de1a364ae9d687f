"""Naive twins of the weight normalizers: one row, one entry at a time, and full Jacobians."""

import math

import torch


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
