"""The words a judge speaks: `printed`, `corrected`, `conclusion`, `fact`, and the discrepancies they weigh."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normgauge.papers.court.verdict import Evidence, Role

Number = Tensor | float
TOLERANCE = 1e-8
TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Check:
    """One discrepancy on one instance, spoken for one sentence of a claim."""

    role: Role
    name: str
    value: float
    tolerance: float = TOLERANCE


def printed(name: str, discrepancy: float, tolerance: float = TOLERANCE) -> Check:
    """Say how far the statement as printed is from true on this instance."""
    return Check("printed", name, discrepancy, tolerance)


def corrected(name: str, discrepancy: float, tolerance: float = TOLERANCE) -> Check:
    """Say how far the corrected statement (or what holds instead) is from true on this instance."""
    return Check("corrected", name, discrepancy, tolerance)


def conclusion(name: str, discrepancy: float, tolerance: float = TOLERANCE) -> Check:
    """Say how far the conclusion the paper draws, in its own setting, is from true on this instance."""
    return Check("conclusion", name, discrepancy, tolerance)


def fact(name: str, value: Number) -> Check:
    """Show a number worth knowing (the size of a counterexample); it weighs nothing."""
    return Check("fact", name, float(value))


def gap(left: Number, right: Number, scale: Number = 0.0) -> float:
    """Return the discrepancy of `left = right`: `max|left - right| / max(max|left|, max|right|, scale)`.

    Give a `scale` where both sides may vanish, else rounding is compared with rounding.

    Examples:
        >>> gap(2.0, 1.0), gap(0.0, 0.0), gap(1e-17, 0.0, scale=1.0)
        (0.5, 0.0, 1e-17)
    """
    a, b = _tensor(left), _tensor(right)
    if a.shape != b.shape and a.numel() != 1 and b.numel() != 1:
        return math.inf
    if not (a.isfinite().all() and b.isfinite().all() and math.isfinite(scale)):
        return math.inf  # a comparison with `nan` is always false, and a maximum may drop it
    largest = max(_largest(a), _largest(b), float(scale))
    return _largest(a - b) / largest if largest > 0 else 0.0


def excess(left: Number, right: Number, scale: Number = 0.0) -> float:
    """Return the discrepancy of `left <= right`, entry by entry: `max (left - right)_+ / max(|left|, |right|, scale)`.

    Examples:
        >>> excess(1.0, 2.0), excess(2.0, 1.0)
        (0.0, 0.5)
    """
    a, b = torch.broadcast_tensors(_tensor(left), _tensor(right))
    size = torch.maximum(a.abs(), b.abs()).clamp(min=max(float(scale), TINY))
    if not (a.isfinite().all() and not b.isnan().any()):
        return math.inf
    return float(((a - b).clamp(min=0) / size).nan_to_num(nan=0.0).max())


def broken(truth: bool | Tensor) -> float:
    """Return 0 where a predicate is true and 1 where it is not."""
    return 0.0 if bool(truth) else 1.0


def unsaid(text: str, words: Sequence[str]) -> float:
    """Return the share of `words` that a quoted text does not contain (the discrepancy of an attribution).

    Examples:
        >>> unsaid("we prove linear convergence for least squares", ["least squares", "residual network"])
        0.5
    """
    lower = " ".join(text.lower().split())
    return sum(word.lower() not in lower for word in words) / len(words)


def gather(checks: Iterable[Check]) -> tuple[Evidence, ...]:
    """Join the checks of the same role and name over all instances, in order of first appearance.

    The worst instance speaks; of facts the value largest in size.
    """
    groups: dict[tuple[Role, str], list[Check]] = {}
    for check in checks:
        value = math.inf if math.isnan(check.value) and check.role != "fact" else float(check.value)
        groups.setdefault((check.role, check.name), []).append(replace(check, value=value))
    return tuple(
        Evidence(name, role, max((c.value for c in group), key=abs), max(c.tolerance for c in group), len(group))
        for (role, name), group in groups.items()
    )


def _tensor(value: Number) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach()


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0
