"""Lanczos sequences on one basis: extend, restart, search the complement for what one sequence cannot see."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normgauge.linalg._basis import Basis, norm
from normgauge.linalg._operator import Operator

# Eigenvalues smaller than this share of the largest are judged against the share: relative to itself, an
# eigenvalue that is zero can never be found.
FLOOR = 1e-3

Progress = Callable[[int, Sequence[float]], None]
Patience = Callable[[Tensor], bool]


class Checkpoint(NamedTuple):
    """What is known after a whole step, set at once, so that an interrupt at any moment finds it whole."""

    values: list[float]  # Ritz values of the finished sequences, their residual norms,
    residuals: list[float]
    weights: Tensor  # and their vectors as columns over the rows of the basis
    running: list[float]  # the same of the running sequence
    remains: list[float]
    running_weights: Tensor


class Sequences:
    """Finished Lanczos sequences and a running one, all orthogonal to each other, as rows of one basis.

    The `top` largest and `bottom` smallest eigenvalues are wanted to a relative residual of `tol`, with a basis of
    `capacity` rows at most and `budget` products. With `partial` the first sequence is reorthogonalized only when its
    drift says so, instead of always.
    """

    def __init__(
        self,
        operator: Operator,
        *,
        top: int,
        bottom: int,
        tol: float,
        capacity: int,
        budget: int,
        generator: torch.Generator,
        progress: Progress | None,
        partial: bool = False,
    ) -> None:
        self.operator, self.top, self.bottom = operator, top, bottom
        self.tol, self.budget = tol, budget
        self.generator, self.progress = generator, progress
        self.basis = Basis(capacity, operator.shape[0], operator.dtype, operator.device)
        self.matvecs = self.restarts = 0
        self.scale = self.asymmetry = 0.0
        self._drift = Drift(operator.dtype) if partial else None
        self.reset()

    def reset(self) -> None:
        """Forget all sequences and keep the array of the basis."""
        self.checkpoint: Checkpoint | None = None  # of the last whole step; `None` while rows are rewritten
        self.basis.count = self.fixed = 0
        self.values: list[float] = []  # of the finished sequences: Ritz values, residual norms,
        self.residuals: list[float] = []
        self.weights = torch.zeros(0, 0, dtype=torch.float64)  # and their vectors as columns over the rows
        self._clear()

    def _clear(self) -> None:
        self.projected = torch.zeros(0, 0, dtype=torch.float64)  # the operator on the running sequence
        self.left, self.gap = torch.empty(0), 0.0  # what the last product left outside the basis, and its norm
        if self._drift is not None:
            self._drift.reset()
        self._link: float | None = None  # the last gap, unless a restart came in between

    @property
    def exhausted(self) -> bool:
        """Whether the budget of products is used up."""
        return self.matvecs >= self.budget

    @property
    def wanted_count(self) -> int:
        """How many different pairs are wanted."""
        return min(self.top + self.bottom, self.operator.shape[0])

    def wanted_indices(self, values: Sequence[float]) -> list[int]:
        """Return the indices of the largest `top` and the smallest `bottom` values, each once."""
        order = sorted(range(len(values)), key=lambda i: -values[i])
        return list(dict.fromkeys(order[: self.top] + (order[-self.bottom :] if self.bottom else [])))

    def yardstick(self, value: float) -> float:
        """Return what the residual of an eigenvalue is measured against."""
        return max(abs(value), FLOOR * self.scale) or 1.0

    def random(self) -> Tensor:
        """Return a random vector, the same on every device."""
        size, dtype = self.operator.shape[0], self.operator.dtype
        return torch.randn(size, generator=self.generator, dtype=dtype).to(self.operator.device)

    def run(self, vector: Tensor, patience: Patience | None = None) -> None:
        """Run a sequence from `vector` until it closes, or the wanted pairs have converged and patience ends.

        Patience is asked after every step with the Ritz values of the sequence.
        """
        _, length = self.basis.remove(vector)
        if not length > 0.0 or self.basis.count >= self.operator.shape[0]:
            return
        self.basis.append(vector, length)
        self.resume(patience)

    def resume(self, patience: Patience | None = None) -> None:
        """Go on with the running sequence; see `run`."""
        while not self.exhausted:
            if self.left.numel():  # the sequence was stopped after a step
                self._grow()
            self._step()
            values, weights = torch.linalg.eigh(self.projected)
            self.scale = max(self.scale, float(values.abs().max()))
            running = self._running_pairs(values, weights)
            self.checkpoint = Checkpoint(self.values, self.residuals, self.weights, *running, weights)
            patient = patience is not None and patience(values)
            if self._closed() or (self._converged(values, weights) and not patient):
                return

    def _grow(self) -> None:
        if self.basis.count == self.basis.capacity:
            self._restart()
        self.basis.append(self.left, self.gap)
        self.left = torch.empty(0)

    def _step(self) -> None:
        """Apply the operator to the last row and make the result orthogonal to the basis."""
        last = self.basis.count - 1
        vector = self.operator.matvec(self.basis.rows[last])
        self.matvecs += 1
        if vector.untyped_storage().data_ptr() == self.basis.rows.untyped_storage().data_ptr():
            vector = vector.clone()  # an operator may hand its argument back; what follows works in place
        # The two large components go first, so that one pass over the whole basis is enough.
        near = max(last - 1, self.fixed)
        shares = self.basis.coefficients(vector, near)
        self.basis.subtract(vector, shares, near)
        column = self._orthogonalize(vector, shares, near)
        self.left = vector
        if self._link is not None:  # <q, A p> and <p, A q> of the last two rows: equal for a self-adjoint operator
            self.asymmetry = max(self.asymmetry, abs(float(column[-2]) - self._link))
        self._link = self.gap
        old, size = self.projected, column.numel()
        self.projected = torch.zeros(size, size, dtype=torch.float64)
        self.projected[:-1, :-1] = old
        self.projected[-1, :] = self.projected[:, -1] = column

    def _orthogonalize(self, vector: Tensor, shares: Tensor, near: int) -> Tensor:
        """Make the new vector orthogonal to all rows where that is needed; return its column of the projection."""
        if self._drift is not None and self.fixed == 0 and self.restarts == 0:
            self.gap = norm(vector)
            column = torch.zeros(self.basis.count, dtype=torch.float64)
            column[near:] = shares.cpu()
            diagonal = torch.cat([self.projected.diagonal(), column[-1:]])
            if self._drift.needs_pass(diagonal, torch.cat([self.projected.diagonal(1), column[-2:-1]]), self.gap):
                _, self.gap = self.basis.remove(vector)  # what goes is drift, not part of the projection
            return column
        removed, self.gap = self.basis.remove(vector)
        removed[near:] += shares
        return removed[self.fixed :].cpu()

    def _closed(self) -> bool:
        """Tell whether the sequence spans an invariant subspace, to the precision of the numbers."""
        full = self.basis.count >= self.operator.shape[0]
        return full or self.gap <= 10 * torch.finfo(self.operator.dtype).eps * self.scale

    def _running_pairs(self, values: Tensor, weights: Tensor) -> tuple[list[float], list[float]]:
        """Return Ritz values and residual norms of the running sequence."""
        gap = 0.0 if self._closed() else self.gap
        return values.tolist(), (gap * weights[-1].abs()).tolist()

    def _converged(self, values: Tensor, weights: Tensor) -> bool:
        running, remains = self._running_pairs(values, weights)
        ritz_values, residuals = self.values + running, self.residuals + remains
        relative = [residuals[i] / self.yardstick(ritz_values[i]) for i in self.wanted_indices(ritz_values)]
        if self.progress is not None:
            self.progress(self.matvecs, relative)
        return len(relative) == self.wanted_count and all(value <= self.tol for value in relative)

    def _restart(self) -> None:
        """Compress the running sequence to its outermost Ritz vectors (thick restart)."""
        _, weights = torch.linalg.eigh(self.projected)
        size = weights.shape[1]
        room = size - self.wanted_count
        upper = self.top + room // 3 if self.top else 0
        lower = self.bottom + room // 3 if self.bottom else 0
        kept = weights[:, [*range(size - upper, size), *range(min(lower, size - upper))]]
        self.checkpoint = None
        self.basis.compress(self.fixed, kept)
        self.projected = kept.T @ self.projected @ kept
        self.restarts += 1
        self._link = None

    def finish(self) -> None:
        """Count the running sequence among the finished ones, so that the next starts in its complement."""
        size = self.projected.shape[0]
        if size == 0:
            return
        self.basis.count = self.fixed + size  # the last row may have no product yet
        values, weights = torch.linalg.eigh(self.projected)
        running, remains = self._running_pairs(values, weights)
        self.values = self.values + running  # new lists: a checkpoint holds the old ones
        self.residuals = self.residuals + remains
        self.weights = torch.block_diag(self.weights, weights)
        self.fixed = self.basis.count
        self._clear()

    def search(self) -> bool:
        """Search the complement of the finished sequences; return whether something wanted turned up there.

        One sequence sees one vector of each eigenspace. A second one, started at random outside the first, finds
        the others. It is given up as soon as its extreme Ritz values, extrapolated by four times their last
        growth, stay short of the wanted eigenvalues: they grow fast where an outlier was missed.
        """
        self.finish()
        if self.basis.count >= self.operator.shape[0]:
            return False
        upper, lower = self._marks()
        complete = len(self.values) >= self.wanted_count
        history: list[float] = []

        def promising(values: Tensor) -> bool:
            if not complete:
                return False
            excess = [float(values[-1]) - upper] if self.top else []
            excess += [lower - float(values[0])] if self.bottom else []
            history.append(max(excess))
            if len(history) < 3:
                return True
            growth = history[-1] - history[-2]
            return growth > slack and history[-1] + 4.0 * growth > slack

        slack = self.tol * FLOOR * self.scale
        self._make_room()
        self.run(self.random(), promising)
        self.finish()
        new_upper, new_lower = self._marks()
        return not complete or new_upper > upper + slack or new_lower < lower - slack

    def _marks(self) -> tuple[float, float]:
        """Return the least of the largest wanted values and the largest of the smallest."""
        values = sorted(self.values, reverse=True)
        upper = values[min(self.top, len(values)) - 1] if self.top else 0.0
        lower = values[-min(self.bottom, len(values))] if self.bottom else 0.0
        return upper, lower

    def _make_room(self) -> None:
        """Keep only wanted vectors of the finished sequences when a new one would not fit beside them all."""
        if self.basis.capacity - self.basis.count >= self.wanted_count + 4:
            return
        chosen = self.wanted_indices(self.values)
        self.checkpoint = None
        self.basis.compress(0, self.weights[:, chosen])
        self.values, self.residuals = ([numbers[i] for i in chosen] for numbers in (self.values, self.residuals))
        self.weights = torch.eye(len(chosen), dtype=torch.float64)
        self.fixed = self.basis.count

    def vectors(self, chosen: Sequence[int]) -> Tensor:
        """Return the Ritz vectors of finished pairs, one per row."""
        return self.basis.combine(self.weights[:, list(chosen)])


class Drift:
    """Simon's recurrence for w_k = <q_{j+1}, q_k>, driven by the projected matrix and rounding.

    Lanczos vectors lose orthogonality slowly at first and fast once an eigenvalue has converged. As long as all |w_k|
    stay below the square root of the precision, the projected matrix is right to the precision itself, so that a pass
    over the whole basis is needed now and then only, for two vectors in a row.

    References: simon1984.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.eps = torch.finfo(dtype).eps
        self.limit = drift_limit(dtype)
        self.reset()

    def reset(self) -> None:
        """Start a new sequence."""
        self.now = torch.zeros(0, dtype=torch.float64)  # <q_j, q_k> for k < j
        self.before = torch.zeros(0, dtype=torch.float64)  # <q_{j-1}, q_k> for k < j - 1
        self.again = False

    def needs_pass(self, diagonal: Tensor, off: Tensor, gap: float) -> bool:
        """Advance by one step and tell whether the new vector must be made orthogonal to the whole basis.

        Given are alpha_0 .. alpha_j, beta_0 .. beta_{j-1}, and beta_j, the norm of the new vector.
        """
        j = len(diagonal) - 1
        noise = 2.0 * self.eps * float(torch.cat([diagonal.abs(), off.abs()]).max())
        # What the neighbours leave is rounding of the product's size: nothing beside a long vector, all of a short one.
        near = max(self.eps, noise / gap) if gap > 0.0 else self.eps
        new = torch.full((j + 1,), near, dtype=torch.float64)
        if j > 1 and gap > 0.0:
            now = torch.cat([self.now, torch.ones(1, dtype=torch.float64)])
            earlier = torch.cat([self.before, torch.ones(1, dtype=torch.float64)])
            total = off * now[1:] + (diagonal[:-1] - diagonal[-1]) * now[:-1] - off[-1] * earlier
            total[1:] += off[:-1] * now[:-2]
            new[:j] = (total + torch.sign(total) * noise) / gap
            new[j - 1] = near  # the two neighbours are removed in every step
        triggered = bool(new.abs().max() > self.limit)
        full = triggered or self.again
        self.again = triggered and not self.again
        if full:
            new.fill_(self.eps)
        self.before, self.now = self.now, new
        return full


def drift_limit(dtype: torch.dtype) -> float:
    """Return the loss of orthogonality that is let happen, a little below the square root of the precision."""
    return torch.finfo(dtype).eps ** 0.6
