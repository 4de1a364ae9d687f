"""Geometry of spheres in closed form: every function acts on the last axis, and leading axes are a batch of spheres.

The radius of a sphere is the norm of the point it is asked about, so nothing but the point has to be carried along.
"""

from __future__ import annotations

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
    """Return `|x| (x + v) / |x + v|`: a step along the tangent `v`, brought back to the sphere.

    Agrees with `exp(x, v)` up to an angle of `(|v| / |x|)^3 / 3`.

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


def log(x: Tensor, y: Tensor) -> Tensor:
    """Return the tangent at `x` with `exp(x, v) = y`; undefined where `y = -x`.

    Examples:
        >>> x, v = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 0.3])
        >>> bool((log(x, exp(x, v)) - v).abs().max() < 1e-6)
        True
    """
    across = tangent(x, y)
    size = norm(across)
    # the angle from sine and cosine: acos alone loses half the digits near 0 and gives nan just above 1
    angle = torch.atan2(size * norm(x), inner(x, y))
    return across * (angle * norm(x) / size.clamp_min(torch.finfo(x.dtype).tiny))


def distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the length of the shorter arc from `x` to `y`, one number per sphere.

    Examples:
        >>> round(distance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item(), 4)
        1.5708
    """
    return norm(x) * torch.atan2(norm(tangent(x, y)) * norm(x), inner(x, y))


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
