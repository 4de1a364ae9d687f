"""`Operator`: a matrix known by its products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normgauge.errors import InputError

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


class Operator(ABC):
    """A linear map known by its products with vectors; subclasses set the fields and write `_matvec`."""

    shape: tuple[int, int]  # rows, columns
    dtype: torch.dtype  # of the vectors
    device: torch.device
    self_adjoint: bool = False  # whether the map equals its transpose

    @abstractmethod
    def _matvec(self, vector: Tensor) -> Tensor:
        """Return the product with one vector of length `shape[1]`."""

    def matvec(self, vector: Tensor) -> Tensor:
        """Return the product with one flat vector."""
        return self._matvec(self._fit(vector, self.shape[1], "Use matmat for several vectors as columns"))

    def _rmatvec(self, vector: Tensor) -> Tensor:
        """Return the product of the transpose with one vector; maps that are not self-adjoint write their own."""
        if self.self_adjoint:
            return self._matvec(vector)
        raise NotImplementedError(f"{type(self).__name__} does not know its transpose")

    def rmatvec(self, vector: Tensor) -> Tensor:
        """Return the product of the transpose with one flat vector of length `shape[0]`."""
        return self._rmatvec(self._fit(vector, self.shape[0], "The transpose takes one entry per row of the map"))

    def _fit(self, vector: Tensor, size: int, step: str) -> Tensor:
        if vector.shape != (size,):
            rule = f"a vector must have shape ({size},)"
            raise InputError(type(self).__name__, rule, str(tuple(vector.shape)), step)
        return vector.to(device=self.device, dtype=self.dtype)

    def require_self_adjoint(self, purpose: str) -> None:
        """Raise unless the map is square and equals its transpose, which the algorithm called `purpose` needs."""
        if self.shape[0] != self.shape[1] or not self.self_adjoint:
            got = f"{type(self).__name__} of shape {self.shape}, self_adjoint={self.self_adjoint}"
            step = "Pass a Hessian or Gauss-Newton operator; for the singular values of J use J^T J"
            raise InputError(purpose, "the operator must be square and self-adjoint", got, step)

    def matmat(self, matrix: Tensor) -> Tensor:
        """Return the products with the columns of `[shape[1], k]`."""
        if matrix.ndim != 2 or matrix.shape[0] != self.shape[1]:
            rule = f"matmat takes a matrix with {self.shape[1]} rows"
            raise InputError(type(self).__name__, rule, f"shape {tuple(matrix.shape)}", "Put one vector in each column")
        if matrix.shape[1] == 0:
            return matrix.new_zeros(self.shape[0], 0)
        return torch.stack([self.matvec(column) for column in matrix.unbind(1)], dim=1)

    def __matmul__(self, other: Any) -> Any:
        return self.matvec(other) if other.ndim == 1 else self.matmat(other)

    def to_scipy(self) -> LinearOperator:
        """Return the operator for SciPy's sparse solvers (NumPy vectors in and out)."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator

        def through(product: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
            return lambda array: product(torch.as_tensor(np.ascontiguousarray(array).reshape(-1))).cpu().numpy()

        kind = torch.empty(0, dtype=self.dtype).numpy().dtype
        return LinearOperator(self.shape, matvec=through(self.matvec), rmatvec=through(self.rmatvec), dtype=kind)


class DenseOperator(Operator):
    """A matrix as an operator, for tests and small problems.

    Examples:
        >>> DenseOperator(torch.eye(2)) @ torch.tensor([1.0, 2.0])
        tensor([1., 2.])
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.dtype, self.device = matrix.dtype, matrix.device
        self.self_adjoint = bool(matrix.shape[0] == matrix.shape[1] and torch.equal(matrix, matrix.T))

    def _matvec(self, vector: Tensor) -> Tensor:
        return self.matrix @ vector

    def _rmatvec(self, vector: Tensor) -> Tensor:
        return self.matrix.T @ vector
