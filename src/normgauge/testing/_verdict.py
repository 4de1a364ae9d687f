"""What a check says: the largest deviation it saw, or the law that was broken and by how much."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import NormgaugeError
from normgauge.results import Result


class NonconformingError(NormgaugeError, AssertionError):
    """A normalizer, an optimizer or a result breaks a law it declares, or a rule all of its kind keep."""


#: Relative and absolute tolerance of a comparison in each precision; a batch of two may be badly conditioned.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3, torch.bfloat16: 8e-2}


@dataclass(frozen=True)
class Conformance(Result):
    """The `checks` a normalizer or an optimizer passed: `(check, cases, largest deviation)` of each.

    Attributes:
        name: of the subject.
        laws: how many invariances a normalizer declares, which were all tried.
    """

    name: str
    checks: tuple[tuple[str, int, float], ...]
    kind: str = "normalizer"
    laws: int = 0

    def _title(self) -> str:
        if self.kind == "normalizer" and not self.laws:
            return f"normalizer {self.name!r} keeps the common rules; it declares no invariance, so none was tried"
        return f"{self.kind} {self.name!r} conforms"

    def _rows(self) -> list[dict[str, Any]]:
        return [{"check": check, "cases": cases, "deviation": largest} for check, cases, largest in self.checks]

    def _footer(self) -> str:
        how = "modes train and eval; derandomized"
        if self.kind == "optimizer":
            how = "seed 0; float64 except norm drift (float32)"
        return f"kind lower: no counterexample in these cases; {how}"


class Ledger:
    """The checks made on one subject, with the number of cases and the largest deviation of each.

    `kind`, `name` and `remedy` are how its messages call the subject, and what they advise.
    """

    def __init__(self, name: str, kind: str, remedy: str) -> None:
        self.name, self.kind, self.remedy = name, kind, remedy
        self.cases: dict[str, int] = {}
        self.largest: dict[str, float] = {}

    def require_same(self, check: str, result: Tensor, wanted: Tensor, tolerance: float) -> None:
        """Record that two tensors agree to a tolerance relative to the larger of 1 and the wanted values."""
        if result.shape != wanted.shape:
            self.fail(check, f"shape {tuple(result.shape)} where {tuple(wanted.shape)} was expected")
        size = wanted.detach().double().abs().max().clamp_min(1.0) if wanted.numel() else torch.ones(())
        deviation = ((result - wanted).detach().double().abs().max() / size).item() if wanted.numel() else 0.0
        self.record_pass(check, deviation)
        if not deviation <= tolerance:
            self.fail(check, f"a deviation of {deviation:.3g} above {tolerance:g}")

    def record_pass(self, check: str, deviation: float = 0.0) -> None:
        self.cases[check] = self.cases.get(check, 0) + 1
        self.largest[check] = max(self.largest.get(check, 0.0), deviation)

    def conformance(self, laws: int = 0) -> Conformance:
        checks = tuple((check, cases, self.largest[check]) for check, cases in self.cases.items())
        return Conformance(self.name, checks, self.kind, laws)

    def require(self, check: str, holds: bool, otherwise: str) -> None:
        if not holds:
            self.fail(check, otherwise)
        self.record_pass(check)

    def fail(self, check: str, problem: str) -> None:
        raise NonconformingError(f"{self.kind} {self.name!r}", check, problem, self.remedy)
