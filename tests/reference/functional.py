"""Loop twins of the closed-form backward maps: Jacobians entry by entry, and the papers' formulas as printed."""

import math

import torch


def moments(v):
    center = sum(float(x) for x in v) / len(v)
    return center, sum((float(x) - center) ** 2 for x in v) / len(v)


def standardize_jacobian(v, eps):
    """J[n, k] = d xhat_n / d x_k of one block, from the definition."""
    center, var = moments(v)
    scale = math.sqrt(var + eps)
    size = len(v)
    jacobian = torch.zeros(size, size)
    for n in range(size):
        for k in range(size):
            inner = (1.0 if n == k else 0.0) - 1 / size
            jacobian[n, k] = inner / scale - (v[n] - center) * (v[k] - center) / (size * scale**3)
    return jacobian


def printed_jacobian(v, eps):
    """akbar2025 App. A.1.1, without the 1 / m in its last term."""
    center, var = moments(v)
    scale = math.sqrt(var + eps)
    centred = v - center
    return torch.eye(len(v)) / scale - 1 / (len(v) * scale) - torch.outer(centred, centred) / scale**3


def rms_jacobian(v, eps):
    size = len(v)
    scale = math.sqrt(sum(float(x) ** 2 for x in v) / size + eps)
    jacobian = torch.zeros(size, size)
    for n in range(size):
        for k in range(size):
            jacobian[n, k] = (1.0 if n == k else 0.0) / scale - v[n] * v[k] / (size * scale**3)
    return jacobian


def lp_jacobian(v, p, eps):
    size = len(v)
    center = sum(float(x) for x in v) / size
    top = max(abs(float(x)) for x in v)
    if math.isinf(p):
        scale = top + eps
        ties = sum(1 for x in v if abs(float(x)) == top)
        slope = [math.copysign(1 / ties, float(x)) if abs(float(x)) == top else 0.0 for x in v]
    else:
        power = sum(abs(float(x)) ** p for x in v) / size + eps
        scale = power ** (1 / p)
        slope = [power ** (1 / p - 1) * abs(float(x)) ** (p - 1) * math.copysign(1, float(x)) / size for x in v]
    jacobian = torch.zeros(size, size)
    for n in range(size):
        for k in range(size):
            inner = (1.0 if n == k else 0.0) - 1 / size
            jacobian[n, k] = inner / scale - (v[n] - center) / scale**2 * slope[k]
    return jacobian


def backward_by_blocks(grad, x, blocks, jacobian):
    """dx = J^T grad, block by block."""
    dx = torch.zeros_like(x)
    for mask in blocks:
        dx[mask] = jacobian(x[mask]).T @ grad[mask]
    return dx


def printed_layer_backward(grad, x, eps):
    """akbar2025 sec. 3.2: (1/(d s)) [d g_i - sum_j g_j - sum_j xhat_j g_j xhat_j], the index as printed."""
    center = x.mean(-1, keepdim=True)
    scale = ((x - center).square().mean(-1, keepdim=True) + eps).sqrt()
    xhat = (x - center) / scale
    size = x.shape[-1]
    last = (xhat * grad * xhat).sum(-1, keepdim=True)
    return (size * grad - grad.sum(-1, keepdim=True) - last) / (size * scale)
