"""Geometry of spheres in closed form: every function acts on the last axis, and leading axes are a batch of spheres.

The radius of a sphere is the norm of the point it is asked about, so nothing but the point has to be carried along.
"""

import torch
from torch import Tensor


def inner(u: Tensor, v: Tensor) -> Tensor:
    """Return `<u, v>`, one number per sphere (the last axis stays, with length 1).

    Examples:
        >>> inner(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor([11.])
    """
    return torch.linalg.vecdot(u, v).unsqueeze(-1)


def norm(v: Tensor) -> Tensor:
    """Return `|v|`, one number per sphere (the last axis stays, with length 1)."""
    return torch.linalg.vector_norm(v, dim=-1, keepdim=True)


def project(x: Tensor, radius: float | Tensor = 1.0) -> Tensor:
    """Return `radius x / |x|`, the nearest point of the sphere.

    Examples:
        >>> project(torch.tensor([3.0, 4.0]), 10.0)
        tensor([6., 8.])
    """
    return x * (radius / norm(x))


def tangent(x: Tensor, v: Tensor) -> Tensor:
    """Return `v - x <x, v> / <x, x>`, the part of `v` that moves along the sphere through `x`.

    Examples:
        >>> tangent(torch.tensor([2.0, 0.0]), torch.tensor([5.0, 7.0]))
        tensor([0., 7.])
    """
    return v - x * (inner(x, v) / inner(x, x))


def retract(x: Tensor, v: Tensor) -> Tensor:
    """Return `|x| (x + v) / |x + v|`: a step along the tangent `v`, `exp(x, v)` but for an angle of `(|v|/|x|)^3 / 3`.

    Examples:
        >>> retract(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]))
        tensor([1.8000, 2.4000])
    """
    moved = x + v
    return moved * (norm(x) / norm(moved))


def exp(x: Tensor, v: Tensor) -> Tensor:
    """Return `x cos(a) + v |x| sin(a) / |v|` with `a = |v| / |x|`: the geodesic from `x` along `v`, at time 1.

    Examples:
        >>> quarter = torch.tensor([0.0, torch.pi])  # a quarter turn on a circle of radius 2 is pi long
        >>> bool((exp(torch.tensor([2.0, 0.0]), quarter) - torch.tensor([0.0, 2.0])).abs().max() < 1e-6)
        True
    """
    angle = norm(v) / norm(x)
    return x * torch.cos(angle) + v * torch.sinc(angle / torch.pi)


def transport(x: Tensor, v: Tensor, z: Tensor) -> Tensor:
    """Carry the tangent `z` along the geodesic from `x` with velocity `v`, an isometry to the tangents at `exp(x, v)`.

    `z - <u, z> (x sin(a) / |x| + u (1 - cos(a)))` with `u = v / |v|` and `a = |v| / |x|`.

    Examples:
        >>> x, v = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.5])
        >>> moved = transport(x, v, v)
        >>> bool(inner(moved, exp(x, v)).abs() < 1e-6), bool((norm(moved) - 0.5).abs() < 1e-6)
        (True, True)

    References: cho2017
    """
    radius = norm(x)
    angle = norm(v) / radius
    along = inner(v, z) / radius  # <u, z> |v| / |x|; the division by |v| is inside sinc and its square
    sine = torch.sinc(angle / torch.pi)
    half = torch.sinc(angle / (2 * torch.pi))
    return z - along * (x * (sine / radius) + v * (half.square() / (2 * radius)))
