"""How far the last Lanczos vectors have drifted from orthogonality: an estimate that costs no vector products."""

from __future__ import annotations

import torch
from torch import Tensor


class Drift:
    """Simon's recurrence for w_k = <q_{j+1}, q_k>, driven by the projected matrix and rounding.

    Lanczos vectors lose orthogonality slowly at first and fast once an eigenvalue has converged. As long as all |w_k|
    stay below the square root of the precision, the projected matrix is right to the precision itself, so that a pass
    over the whole basis is needed now and then only, for two vectors in a row.

    Args:
        dtype: of the vectors.

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

        Args:
            diagonal: alpha_0 .. alpha_j.
            off: beta_0 .. beta_{j-1}.
            gap: beta_j, the norm of the new vector.
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
