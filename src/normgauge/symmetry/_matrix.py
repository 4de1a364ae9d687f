"""Matrix symmetries: GL(d) of linear neighbours and attention heads, rotations of planes and of normalized streams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normgauge.symmetry._family import Family
from normgauge.symmetry._terms import ROLES, Term, Values


@dataclass(frozen=True)
class MatrixTerm(Term):
    """One tensor's share in a change of basis A: writers get A p, readers p A^-1, along the block's index.

    Args of the dataclass beyond `Term`:
        outer: axes of the view that number the blocks.
        inner: axes of the view that form the block's index.
        by: a gain g that stands before this tensor: A becomes diag(g) A diag(1/g).
    """

    outer: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    by: str = ""

    role = "matrix"

    def blocks(self, values: Tensor) -> Tensor:
        """Return a tensor as [blocks, block index, rest]."""
        view = self.slot.view_of(values)
        rest = [axis for axis in range(view.ndim) if axis not in self.outer and axis not in self.inner]
        count = math.prod(view.shape[a] for a in self.outer)
        size = math.prod(view.shape[a] for a in self.inner)
        return view.permute(*self.outer, *self.inner, *rest).reshape(count, size, -1)

    def _unblock(self, blocks: Tensor, values: Tensor) -> Tensor:
        view = self.slot.view_of(values)
        rest = [axis for axis in range(view.ndim) if axis not in self.outer and axis not in self.inner]
        order = [*self.outer, *self.inner, *rest]
        back = blocks.reshape([view.shape[a] for a in order]).permute([order.index(a) for a in range(view.ndim)])
        result = values.clone()
        if self.slot.narrow is None:
            return back.reshape(values.shape)
        wide = result.reshape(self.slot.first or values.shape)
        part = wide.narrow(*self.slot.narrow)
        part.copy_(back.reshape(part.shape))
        return wide.reshape(values.shape)

    def _gain(self, point: Values) -> Tensor | float:
        """Return what the slope is multiplied and the value divided by: the gain before a writer, its inverse else."""
        if not self.by:
            return 1.0
        gain = point[self.by].reshape(1, -1, 1)
        return gain if self.coefficient > 0 else 1 / gain

    def moment(self, point: Values, gradient: Values) -> tuple[Tensor, Tensor]:
        """Return [blocks, m, m] of derivatives along the entries of A at A = 1, and their magnitude."""
        gain = self._gain(point)
        value, slope = self.blocks(point[self.slot.name]) / gain, self.blocks(gradient[self.slot.name]) * gain
        if self.coefficient > 0:
            return slope @ value.mT, slope.square() @ value.square().mT
        return -(value @ slope.mT), value.square() @ slope.square().mT

    def transform(self, point: Values, matrices: Tensor) -> Tensor:
        """Return the tensor after the change of basis [blocks, m, m]."""
        value, gain = point[self.slot.name], self._gain(point)
        blocks, matrices = self.blocks(value) / gain, matrices.to(value)
        after = matrices @ blocks if self.coefficient > 0 else torch.linalg.solve(matrices.mT, blocks)
        return self._unblock(after * gain, value)


ROLES["matrix"] = MatrixTerm


@dataclass(frozen=True)
class MatrixFamily(Family):
    """Blocks of changes of basis. `group` is "GL", "O", or "O1" (rotations that fix the vector of ones)."""

    @property
    def block_dimension(self) -> int:
        """Directions of one block beyond the diagonal ones, which count as rescalings."""
        m = self.block
        return {"GL": m * (m - 1), "O": m * (m - 1) // 2, "O1": (m - 1) * (m - 2) // 2}[self.group]

    def act(self, point: dict[str, Tensor], matrices: Tensor) -> dict[str, Tensor]:
        """Return the parameters after the changes of basis [blocks, m, m]."""
        result = self.coordinates.effective(point)
        for term in self.terms:
            assert isinstance(term, MatrixTerm)
            result[term.parameter] = term.transform(result, matrices)
        return self.coordinates.stored(result)

    def tangents(self, point: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield the tangent vectors of every block, one per direction of the group beyond the diagonal ones."""
        names = {name for term in self.terms for name in term.reads}
        start = {name: point[name].double() for name in self.coordinates.closure([*self.parameters, *names])}
        eye = torch.eye(self.block, dtype=torch.float64).expand(len(self), -1, -1).contiguous()
        for number in range(len(self)):
            for direction in lie_algebra(self.group, self.block):
                step = torch.zeros_like(eye)
                step[number] = direction
                carried: tuple[Any, ...] = torch.func.jvp(lambda a: self.act(start, a), (eye,), (step,))
                yield {name: carried[1][name] for name in self.parameters}

    def act_randomly(self, point: dict[str, Tensor], source: torch.Generator) -> dict[str, Tensor]:
        """Return the parameters after a random change of basis in every block."""
        return self.act(point, random_matrices(self.group, len(self), self.block, source))


def lie_algebra(group: str, size: int) -> Iterator[Tensor]:
    """Yield a basis of the directions in which a group's matrices can move, without the diagonal ones of GL."""
    frame = torch.eye(size, dtype=torch.float64)
    if group == "O1":  # rotations of the complement of the vector of ones
        frame = torch.linalg.qr(torch.cat([torch.ones(size, 1, dtype=torch.float64), frame[:, 1:]], 1)).Q[:, 1:]
    for i in range(frame.shape[1]):
        for j in range(frame.shape[1]):
            if group == "GL" and i != j:
                yield torch.outer(frame[:, i], frame[:, j])
            elif group != "GL" and i < j:
                yield torch.outer(frame[:, i], frame[:, j]) - torch.outer(frame[:, j], frame[:, i])


def random_matrices(group: str, count: int, size: int, source: torch.Generator) -> Tensor:
    """Draw well-conditioned group elements far from the identity."""
    noise = torch.randn(count, size, size, generator=source, dtype=torch.float64)
    if group == "GL":
        return torch.linalg.matrix_exp(0.5 * noise / math.sqrt(size))
    skew = noise - noise.mT
    if group == "O1":
        centre = torch.eye(size, dtype=torch.float64) - 1.0 / size
        skew = centre @ skew @ centre
    return torch.linalg.matrix_exp(skew / math.sqrt(size))


def matrix_family(group: str, terms: tuple[MatrixTerm, ...], blocks: int, block: int, residual: float) -> MatrixFamily:
    """Build a family of changes of basis."""
    return MatrixFamily("matrix", terms, blocks * block, group=group, block=block, residuals=(residual,) * blocks)


def residual_of(
    terms: tuple[MatrixTerm, ...], group: str, point: Values, gradients: Sequence[Mapping[str, Tensor]]
) -> float:
    """Return the norm of the moment map off the diagonal (its relevant part for the group), relative.

    Terms whose blocks have other sizes, such as channels of groups of another convolution, share no basis: infinite.
    """
    worst = 0.0
    for gradient in gradients:
        parts = [term.moment(point, gradient) for term in terms]
        if len({part[0].shape for part in parts}) > 1:
            return math.inf
        total = torch.stack([p[0] for p in parts]).sum(0)
        scale = torch.stack([p[1] for p in parts]).sum(0)
        if group != "GL":
            total, scale = total - total.mT, scale + scale.mT
        if group == "O1":
            centre = torch.eye(total.shape[-1], dtype=total.dtype) - 1.0 / total.shape[-1]
            total = centre @ total @ centre
        total = total - torch.diag_embed(torch.diagonal(total, dim1=1, dim2=2)) if group == "GL" else total
        worst = max(worst, float(total.norm() / scale.sum().sqrt().clamp_min(1e-300)))
    return worst
