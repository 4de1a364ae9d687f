"""Truncation and padding with loops, Jacobians by finite differences: the naive twin of the bad networks."""

import torch


def cascade_output(widths, sizes, x):
    """Return `h_K(x)`: every layer keeps or pads the first entries, times a_k, and drops what is negative."""
    h = [float(v) for v in x]
    for width, size in zip(widths[1:], sizes, strict=True):
        kept = [h[i] if i < len(h) else 0.0 for i in range(width)]
        h = [max(size * v, 0.0) for v in kept]
    return torch.tensor(h)


def slope_by_differences(function, x, step):
    """Return the spectral norm of the Jacobian, by central differences."""
    columns = []
    for i in range(x.numel()):
        e = torch.zeros_like(x)
        e[i] = step
        columns.append((function(x + e) - function(x - e)) / (2 * step))
    return float(torch.linalg.matrix_norm(torch.stack(columns, dim=1).detach(), 2))
