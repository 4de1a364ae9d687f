"""Lanczos sequences on one basis: extend, restart, search the complement for what one sequence cannot see."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normgauge.linalg._basis import Basis, norm
from normgauge.linalg._operator import Operator

# Eigenvalues smaller than this share of the largest are judged against the share: relative to itself, an
# eigenvalue that is zero can never be found.
FLOOR = 1e-3
CHANCE = 1e-3  # of a wanted eigenvalue that stays unseen, over the random vectors a search starts from

Progress = Callable[[int, Sequence[float]], None]


class Ritz(NamedTuple):
    """What the basis says, set at once, so that an interrupt at any moment finds it whole."""

    values: Tensor  # ascending,
    residuals: Tensor
    weights: Tensor  # and their vectors as columns over the rows that have had their product


NOTHING = Ritz(torch.zeros(0), torch.zeros(0), torch.zeros(0, 0))


class Sequences:
    """Lanczos sequences on one orthonormal basis: rows Q that have had their product, then rows P that wait for it.

    A Q^T = Q^T projected + P^T border up to rounding, at first with one waiting row. The `top` largest and `bottom`
    smallest eigenvalues are wanted to a relative residual of `tol`, with at most `capacity` rows and `budget` products.
    With `partial` the first sequence is reorthogonalized only when its drift says so, instead of always.
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
        self.ritz = NOTHING  # also while rows are rewritten
        self.basis.count = 0
        self.projected = self.border = torch.zeros(0, 0, dtype=torch.float64)
        self._alone, self.noise = True, 1.0  # one sequence yet, and the share of its start that was random
        self.sharp = self.tol  # what is asked of residuals: less than `tol` where eigenvalues are close together
        self.counts: dict[int, tuple[float, int]] = {}  # by end: how many eigenvalues lie beyond which number
        if self._drift is not None:
            self._drift.reset()

    @property
    def exhausted(self) -> bool:
        """Whether the budget of products is used up."""
        return self.matvecs >= self.budget

    @property
    def wanted_count(self) -> int:
        """How many different pairs are wanted."""
        return min(self.top + self.bottom, self.operator.shape[0])

    def wanted_indices(self, count: int) -> list[int]:
        """Return the indices of the largest `top` and the smallest `bottom` of ascending values, each once."""
        return list(dict.fromkeys([*range(count)[::-1][: self.top], *range(count)[: self.bottom]]))

    def yardstick(self, value: float) -> float:
        """Return what the residual of an eigenvalue is measured against."""
        return max(abs(value), FLOOR * self.scale) or 1.0

    def random(self) -> Tensor:
        """Return a random vector, the same on every device."""
        size, dtype = self.operator.shape[0], self.operator.dtype
        return torch.randn(size, generator=self.generator, dtype=dtype).to(self.operator.device)

    def run(self, vector: Tensor) -> None:
        """Add a vector to the waiting rows, and go on until the wanted pairs have converged or no row waits."""
        self._wait([vector])
        self.resume()

    def _wait(self, vectors: list[Tensor]) -> None:
        """Let vectors wait for their product, before the rows that do."""
        size = len(self.projected)
        before = self.basis.rows[size : self.basis.count].clone()  # their shares in the images go over to the new rows
        self.basis.count = size
        for vector in [*vectors, *before.clone()]:
            _, length = self.basis.remove(vector)
            if length > self._rounding(1.0) and self.basis.count < self.operator.shape[0]:
                self.basis.append(vector, length)
        turn = self.basis.rows[size : self.basis.count] @ before.T
        self.border = turn.to(self.border) @ self.border

    def resume(self, fresh: int = 0) -> None:
        """Go on where `run` stopped, with the first `fresh` waiting rows."""
        while len(self.border) and not self.exhausted:
            if fresh:
                fresh -= 1
            else:
                self._choose()
            if self.basis.count == self.basis.capacity < self.operator.shape[0]:
                self._restart()
            self._step()
            values, weights = torch.linalg.eigh(self.projected)
            self.scale = max(self.scale, float(values.abs().max()))
            self.ritz = Ritz(values, torch.linalg.vector_norm(self.border @ weights, dim=0), weights)
            if self._converged() and not fresh and self._is_seen():
                return

    def _choose(self) -> None:
        """Bring the waiting row to the front on which most of a wanted residual lies."""
        if len(self.border) < 2:
            return
        chosen = self.wanted_indices(len(self.projected))
        marks = torch.tensor([self.yardstick(float(self.ritz.values[i])) for i in chosen], dtype=torch.float64)
        pick = int(((self.border @ self.ritz.weights)[:, chosen].abs() / marks).amax(1).argmax())
        first = len(self.projected)
        self.border[[0, pick]] = self.border[[pick, 0]]
        self.basis.rows[[first, first + pick]] = self.basis.rows[[first + pick, first]]

    def _product(self, vector: Tensor) -> Tensor:
        image = self.operator.matvec(vector)
        self.matvecs += 1
        if image.untyped_storage().data_ptr() == self.basis.rows.untyped_storage().data_ptr():
            image = image.clone()  # an operator may hand its argument back; what follows works in place
        return image

    def _step(self) -> None:
        """Apply the operator to the first waiting row; what its image has beyond the basis waits in its place."""
        size, waiting = len(self.projected), len(self.border)
        vector = self._product(self.basis.rows[size])
        # The large components go first, so that one pass over the whole basis is enough.
        near = max(size - waiting, 0)
        shares = self.basis.coefficients(vector, near)
        self.basis.subtract(vector, shares, near)
        column, gap = self._orthogonalize(vector, shares, near)
        if near < size:  # <q, A p> and <p, A q>: equal for a self-adjoint operator
            self.asymmetry = max(self.asymmetry, float((column[near:size] - self.border[0, near:]).abs().max()))
        self.projected = bordered(self.projected, column[: size + 1])
        self.border = torch.cat([self.border[1:], column[size + 1 :, None]], 1)
        self.scale = max(self.scale, float(column.abs().max()))
        if self.basis.count < self.operator.shape[0] and gap > self._rounding(self.scale):
            self.basis.append(vector, gap)
            last = torch.zeros(1, size + 1, dtype=torch.float64)
            last[0, -1] = gap
            self.border = torch.cat([self.border, last])

    def _rounding(self, scale: float) -> float:
        return 10 * torch.finfo(self.operator.dtype).eps * scale

    def _orthogonalize(self, vector: Tensor, shares: Tensor, near: int) -> tuple[Tensor, float]:
        """Make a vector orthogonal to all rows where needed; return its column of the projection and its norm."""
        if self._drift is not None and self.restarts == 0:
            gap = norm(vector)
            column = torch.zeros(self.basis.count, dtype=torch.float64)
            column[near:] = shares.cpu()
            diagonal = torch.cat([self.projected.diagonal(), column[-1:]])
            if self._drift.needs_pass(diagonal, torch.cat([self.projected.diagonal(1), column[-2:-1]]), gap):
                _, gap = self.basis.remove(vector)  # what goes is drift, not part of the projection
            return column, gap
        removed, gap = self.basis.remove(vector)
        removed[near:] += shares
        return removed.cpu(), gap

    def _converged(self) -> bool:
        values, residuals, _ = self.ritz
        chosen = self.wanted_indices(len(values))
        relative = [float(residuals[i]) / self.yardstick(float(values[i])) for i in chosen]
        if self.progress is not None:
            self.progress(self.matvecs, relative)
        return len(relative) == self.wanted_count and all(value <= self.sharp for value in relative)

    def _restart(self) -> None:
        """Compress the rows that had their product to their outermost Ritz vectors (thick restart)."""
        size = len(self.projected)
        room = size - self.wanted_count
        upper = self.top + room // 3 if self.top else 0
        lower = self.bottom + room // 3 if self.bottom else 0
        self._compress([*range(size - upper, size), *range(min(lower, size - upper))])
        self.restarts += 1

    def _compress(self, kept: list[int]) -> None:
        """Keep some Ritz vectors and what their images need of the waiting rows."""
        values, weights = torch.linalg.eigh(self.projected)
        weights, self.ritz = weights[:, kept], NOTHING
        turn, border = torch.eye(len(self.border), dtype=torch.float64), self.border @ weights
        if len(border) > len(kept):
            turn, border = torch.linalg.qr(border)
        self.basis.compress(0, torch.block_diag(weights, turn))
        self.projected, self.border = torch.diag(values[kept]), border
        eye = torch.eye(len(kept), dtype=torch.float64)
        order = torch.argsort(values[kept])
        self.ritz = Ritz(values[kept][order], torch.linalg.vector_norm(border, dim=0)[order], eye[:, order])

    def _is_seen(self) -> bool:
        """Tell whether the first sequence would have seen an eigenvalue beyond the one that is wanted at an end.

        An eigenvector v with eigenvalue x has the share <q_m+1, v> gap sum_i y_i1 y_im / (x - value_i) in the start,
        less where x is larger. A random start in n dimensions has less than c with a chance below c sqrt(n).
        """
        if not self._alone or self.restarts:
            return True  # `search` will see
        starts, ends = self.ritz.weights[0], (self.border @ self.ritz.weights).sum(0)
        for end, wanted in ((1, self.top), (-1, self.bottom)):
            if wanted == 1:
                x = float(self._bounds(end, 1)[0])
                share = abs(float((starts * ends / (x - end * self.ritz.values)).sum()))
                if share * math.sqrt(self.operator.shape[0]) > CHANCE * self.noise:
                    return False
                self.counts[end] = x, 0
        return True

    @property
    def sure(self) -> bool:
        """Whether the wanted values are the outermost ones, each to the tolerance, but for the chance."""
        ends = ((1, self.top), (-1, self.bottom))
        return all(self._is_counted(end, n) and self._is_apart(end, n) for end, n in ends if n)

    def search(self) -> bool:
        """Look for what the sequences cannot see; return whether they went on, so that it is worth looking again.

        One sequence sees one vector of each eigenspace, and of eigenvalues close together a mixture. By Sylvester's law
        of inertia as many eigenvalues lie above x as Ritz values do and as B = C + P^T S P has above x, with C = A on
        the complement of Q and S = border (x - projected)^-1 border^T. `_scan` looks for those of B.
        """
        self._drift, self._alone = None, False
        if len(self.projected) < self.wanted_count and not self.exhausted:
            self.run(self.random())
            return True
        for end, wanted in ((1, self.top), (-1, self.bottom)):
            if not wanted or self.exhausted:
                continue
            missed = [] if self._is_counted(end, wanted) else self._scan(end, wanted)
            if missed:
                self._wait(missed)
            elif end not in self.counts or self._is_apart(end, wanted) or self.sharp <= self._rounding(1.0):
                continue
            else:
                self.sharp /= 4
            self.resume(len(missed))
            return True
        return False

    def _lift(self, end: int, x: float) -> Tensor:
        """Return S of `search` for end * A."""
        shares = self.border @ self.ritz.weights
        return (shares / (x - end * self.ritz.values)) @ shares.T

    def _bounds(self, end: int, wanted: int) -> Tensor:
        """Return up to where the wanted eigenvalues of end * A may lie, to the tolerance."""
        values = (end * self.ritz.values).sort(descending=True).values[:wanted]
        return values + torch.tensor([self.tol * self.yardstick(float(value)) for value in values], dtype=torch.float64)

    def _is_counted(self, end: int, wanted: int) -> bool:
        x, count = self.counts.get(end, (math.inf, 0))
        return x <= float(self._bounds(end, wanted)[-1]) and int((end * self.ritz.values >= x).sum()) == count

    def _is_apart(self, end: int, wanted: int) -> bool:
        """Tell whether as many as were counted are right one by one: B at each bound has nothing above it either."""
        x, count = self.counts[end]
        bounds, lift = self._bounds(end, wanted)[:count].tolist(), self._lift(end, x)
        return all(largest(self._lift(end, bound) - lift) <= bound - x for bound in bounds if bound > x)

    def _scan(self, end: int, wanted: int) -> list[Tensor]:
        """Count the eigenvalues of end * A beyond the wanted ones, or return vectors that say there are more.

        Of an eigenvector v of B with an eigenvalue of at least x, the vectors w_j of a sequence have shares that grow
        as long as its Ritz values stay below x: |<w_j+1, v>| >= |<w_j, v>| / (gap_j [(x - T_j)^-1]_jj). None exceeds
        1, so that the first is at most 1 over the whole growth: what a random vector has by chance, as in `_is_seen`.
        """
        if self.basis.count + 2 > self.basis.capacity:
            self._compress(self.wanted_indices(len(self.projected)))
        size, first, rows = len(self.projected), self.basis.count, self.basis.rows
        dimension, waiting = self.operator.shape[0], slice(size, first)
        bound = float(self._bounds(end, wanted)[-1])
        slack = self.tol * self.yardstick(bound)
        x = min((bound - slack * step / 16 for step in range(8)), key=lambda x: largest(self._lift(end, x)) - x)
        lift, count = self._lift(end, x), int((end * self.ritz.values >= x).sum())
        enough = math.log(math.sqrt(dimension) / CHANCE)
        growth = math.inf if size >= dimension else 0.0
        projected, vector, missed = torch.zeros(0, 0, dtype=torch.float64), self.random(), torch.zeros(0, 0)
        _, gap = self.basis.remove(vector, waiting)
        while growth < enough and not len(missed) and not self.exhausted:
            if self.basis.count == self.basis.capacity:
                values, weights = torch.linalg.eigh(projected)
                kept = (len(values) + 1) // 2
                self.basis.compress(first, weights[:, -kept:])
                projected = torch.diag(values[-kept:])
            self.basis.append(vector, gap)
            last = rows[self.basis.count - 1]
            vector = end * self._product(last)
            vector += (lift.to(rows) @ (rows[waiting] @ last)) @ rows[waiting]
            removed, gap = self.basis.remove(vector, waiting)
            projected = bordered(projected, removed[first:].cpu())
            values, weights = torch.linalg.eigh(projected)
            beyond = weights[:, values >= x]
            closed = gap <= self._rounding(self.scale) or size + self.basis.count - first >= dimension
            if not beyond.numel():
                growth = math.inf if closed else growth - math.log(gap * float((weights[-1] ** 2 / (x - values)).sum()))
            elif closed or float(gap * beyond[-1].abs().max()) <= slack:
                beyond = beyond[:, -max(1, self.basis.capacity - first - 1) :]
                missed = beyond.to(rows).T @ rows[first : self.basis.count]
            self._converged()  # tells `progress`
        self.basis.count = first
        if growth >= enough:
            self.counts[end] = x, count
        return list(missed)

    def vectors(self, chosen: Sequence[int]) -> Tensor:
        """Return Ritz vectors, one per row."""
        return self.basis.combine(self.ritz.weights[:, list(chosen)])


def bordered(matrix: Tensor, column: Tensor) -> Tensor:
    """Return a symmetric matrix with one more column, which is one more row."""
    result = torch.zeros(len(column), len(column), dtype=torch.float64)
    result[:-1, :-1] = matrix
    result[-1, :] = result[:, -1] = column
    return result


def largest(matrix: Tensor) -> float:
    """Return the largest eigenvalue of a symmetric matrix, 0 of none."""
    return float(torch.linalg.eigvalsh(matrix)[-1]) if len(matrix) else 0.0


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
