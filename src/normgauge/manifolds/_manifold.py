"""Manifolds as objects: one sphere, one sphere per row, flat space, and products by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.manifolds import sphere


@runtime_checkable
class Manifold(Protocol):
    """Where a tensor lives: five operations, and points and tangents have the tensor's own shape."""

    def project(self, x: Tensor) -> Tensor:
        """Return the nearest point."""

    def tangent(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the part of `v` that stays on the manifold to first order."""

    def retract(self, x: Tensor, v: Tensor) -> Tensor:
        """Return a point reached from `x` along the tangent `v`."""

    def transport(self, x: Tensor, v: Tensor, z: Tensor) -> Tensor:
        """Carry the tangent `z` from `x` to where `v` leads."""

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Return the inner product of two tangents, a 0-d tensor."""


@dataclass(frozen=True)
class Euclidean:
    """Flat space: every operation is the obvious one."""

    def project(self, x: Tensor) -> Tensor:
        return x

    def tangent(self, x: Tensor, v: Tensor) -> Tensor:
        return v

    def retract(self, x: Tensor, v: Tensor) -> Tensor:
        return x + v

    exp = retract

    def transport(self, x: Tensor, v: Tensor, z: Tensor) -> Tensor:
        return z

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return (u * v).sum()


@dataclass(frozen=True)
class Oblique:
    """One sphere per row: the slices of the first axis, or `count` equal blocks of them, each of norm `radius`.

    Examples:
        >>> Oblique(2.0).project(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([[1.2000, 1.6000],
                [0.0000, 2.0000]])
    """

    radius: float = 1.0
    count: int | None = None

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise InputError(type(self).__name__, "a radius is positive", str(self.radius), "Pass radius=1.0")

    def _rows(self, x: Tensor) -> Tensor:
        count = self.count if self.count is not None else (x.shape[0] if x.ndim else 1)
        if count < 1 or x.numel() % count or (x.ndim and x.shape[0] % count and count != 1):
            rule = f"{count} spheres need a first axis that divides into {count} blocks"
            raise InputError(type(self).__name__, rule, f"shape {tuple(x.shape)}", "Pass another count")
        return x.reshape(count, -1)

    def project(self, x: Tensor) -> Tensor:
        """Return every row brought to norm `radius`."""
        return sphere.project(self._rows(x), self.radius).view_as(x)

    def tangent(self, x: Tensor, v: Tensor) -> Tensor:
        """Return `v` without its part along each row of `x`."""
        return sphere.tangent(self._rows(x), self._rows(v)).view_as(x)

    def retract(self, x: Tensor, v: Tensor) -> Tensor:
        """Return `x + v` with every row brought back to its norm."""
        return sphere.retract(self._rows(x), self._rows(v)).view_as(x)

    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the end of every row's geodesic."""
        return sphere.exp(self._rows(x), self._rows(v)).view_as(x)

    def transport(self, x: Tensor, v: Tensor, z: Tensor) -> Tensor:
        """Carry `z` along every row's geodesic, an isometry."""
        return sphere.transport(self._rows(x), self._rows(v), self._rows(z)).view_as(x)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Return the Euclidean inner product of two tangents."""
        return Euclidean().inner(x, u, v)


@dataclass(frozen=True)
class Sphere(Oblique):
    """The whole tensor on one sphere of norm `radius`.

    Examples:
        >>> Sphere(5.0).project(torch.tensor([[6.0], [8.0]])).flatten()
        tensor([3., 4.])
    """

    count: int | None = 1


@dataclass(frozen=True)
class Product:
    """Several manifolds at once, by name: points and tangents are dicts of tensors.

    Examples:
        >>> both = Product({"weight": Oblique(), "bias": Euclidean()})
        >>> point = both.project({"weight": torch.tensor([[3.0, 4.0]]), "bias": torch.ones(1)})
        >>> point["weight"].tolist(), point["bias"].tolist()
        ([[0.6000000238418579, 0.800000011920929]], [1.0])
    """

    parts: Mapping[str, Euclidean | Oblique]

    def project(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: part.project(x[name]) for name, part in self.parts.items()}

    def tangent(self, x: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: part.tangent(x[name], v[name]) for name, part in self.parts.items()}

    def retract(self, x: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: part.retract(x[name], v[name]) for name, part in self.parts.items()}

    def exp(self, x: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: part.exp(x[name], v[name]) for name, part in self.parts.items()}

    def transport(self, x: Mapping[str, Tensor], v: Mapping[str, Tensor], z: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: part.transport(x[name], v[name], z[name]) for name, part in self.parts.items()}

    def inner(self, x: Mapping[str, Tensor], u: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([part.inner(x[name], u[name], v[name]) for name, part in self.parts.items()]).sum()
