"""An orthonormal basis as the rows of one preallocated array, with sums accumulated in float64."""

import torch
from torch import Tensor

from normgauge.errors import OutOfMemoryError, explain

# Plain float32 sums over ten million entries lose half their digits; sums over chunks of this length, added up
# in float64, do not, and a chunk of a few rows stays in the cache.
CHUNK = 1 << 16


def inner(a: Tensor, b: Tensor) -> float:
    """Return <a, b> of two flat vectors, accumulated in float64 over chunks.

    Examples:
        >>> abs(inner(torch.full((10**6,), 0.1), torch.ones(10**6)) / 1e5 - 1) < 1e-4
        True
    """
    if a.dtype == torch.float64:
        return float(a @ b)
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), CHUNK):
        total += a[start : start + CHUNK] @ b[start : start + CHUNK]
    return float(total)


def norm(a: Tensor) -> float:
    """Return |a|, accumulated in float64 over chunks."""
    return inner(a, a) ** 0.5


class Basis:
    """Orthonormal vectors as the filled rows of a `[capacity, length]` array, whose unused pages cost nothing."""

    def __init__(self, capacity: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        try:
            self.rows = torch.empty(capacity, length, dtype=dtype, device=device)
        except RuntimeError as error:  # torch's out-of-memory error on CPU and CUDA alike
            cause = str(error).splitlines()[0]
            raise OutOfMemoryError(out_of_memory_message(capacity, length, dtype, cause)) from error
        self.count = 0

    @property
    def capacity(self) -> int:
        return self.rows.shape[0]

    @property
    def filled(self) -> Tensor:
        """The vectors so far, one per row."""
        return self.rows[: self.count]

    def append(self, vector: Tensor, length: float) -> None:
        """Add `vector / length`, which the caller has made orthogonal to the others."""
        torch.mul(vector, 1.0 / length, out=self.rows[self.count])
        self.count += 1

    def coefficients(self, vector: Tensor, first: int = 0) -> Tensor:
        """Return the products of the rows from `first` on with a vector, in float64."""
        filled = self.rows[first : self.count]
        if vector.dtype == torch.float64:
            return filled @ vector
        total = torch.zeros(len(filled), dtype=torch.float64, device=vector.device)
        for start in range(0, vector.numel(), CHUNK):
            total += filled[:, start : start + CHUNK] @ vector[start : start + CHUNK]
        return total

    def subtract(self, vector: Tensor, shares: Tensor, first: int = 0) -> None:
        """Take the combination of the rows from `first` on with the given coefficients off a vector, in place."""
        vector.addmv_(self.rows[first : self.count].T, shares.to(vector.dtype), alpha=-1.0)

    def remove(self, vector: Tensor, but: slice | None = None) -> tuple[Tensor, float]:
        """Make `vector` orthogonal to all rows, or all but some, in place; return what was removed and the norm left.

        Classical Gram-Schmidt, repeated where a pass took more than three quarters of the square ("twice is enough").
        """
        removed = torch.zeros(self.count, dtype=torch.float64, device=vector.device)
        length = norm(vector) if self.count == 0 else 0.0
        for _ in range(3 if self.count else 0):
            shares = self.coefficients(vector)
            if but is not None:
                shares[but] = 0.0
            self.subtract(vector, shares)
            removed += shares
            length = norm(vector)
            if 3.0 * length**2 > float(shares @ shares):
                break
        return removed, length

    def combine(self, weights: Tensor) -> Tensor:
        """Return the linear combinations `weights.T @ rows`, one per column of `weights`."""
        return weights.to(self.rows).T @ self.rows[: len(weights)]

    def compress(self, start: int, weights: Tensor) -> None:
        """Replace the rows from `start` on by their combinations, chunk by chunk, without a second array."""
        weights = weights.to(self.rows)
        kept = weights.shape[1]
        for first in range(0, self.rows.shape[1], 16 * CHUNK):
            columns = slice(first, first + 16 * CHUNK)
            self.rows[start : start + kept, columns] = weights.T @ self.filled[start:, columns]
        self.count = start + kept


def out_of_memory_message(rows: int, length: int, dtype: torch.dtype, cause: str) -> str:
    """Compose the message for a basis that does not fit."""
    size = rows * length * torch.empty(0, dtype=dtype).element_size()
    rule = f"{rows} vectors of {length} entries need {size / 2**30:.3g} GiB"
    step = f"Ask for fewer eigenvalues, select fewer parameters, or pass memory={size} where the machine has it"
    return explain("Lanczos", rule, cause, step)
