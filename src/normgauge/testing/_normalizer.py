"""`check_normalizer`: every declared law and every rule of normalizers, tried on random cases."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from normgauge.errors import require
from normgauge.nn import registry
from normgauge.nn.registry import Declaration, Invariance
from normgauge.results import Result
from normgauge.rng import preserved_rng, seed_everything
from normgauge.testing import _contract
from normgauge.testing._cases import Case, builder, strategy
from normgauge.testing._laws import check_conventions, check_law
from normgauge.testing._verdict import Ledger, NonconformingError

__all__ = ["Conformance", "NonconformingError", "check_normalizer"]

Factory = Callable[[int, int], torch.nn.Module]


@dataclass(frozen=True)
class Conformance(Result):
    """The checks a normalizer passed, with the number of cases and the largest deviation of each.

    Args:
        name: of the normalizer.
        checks: `(check, cases, largest deviation)`.
        laws: how many invariances were declared, and so tried.
    """

    name: str
    checks: tuple[tuple[str, int, float], ...]
    laws: int = 0

    def _title(self) -> str:
        if not self.laws:
            return f"normalizer {self.name!r} keeps the common rules; it declares no invariance, so none was tried"
        return f"normalizer {self.name!r} conforms"

    def _rows(self) -> list[dict[str, Any]]:
        return [{"check": check, "cases": cases, "deviation": largest} for check, cases, largest in self.checks]

    def _footer(self) -> str:
        return "kind lower: no counterexample in these cases; modes train and eval; derandomized"


def check_normalizer(
    subject: str | Declaration | Factory,
    *,
    invariances: Iterable[Invariance] = (),
    smallest: int = 1,
    spatial: tuple[int, ...] = (0, 1, 2, 3),
    twin: _contract.Twin | None = None,
    examples: int = 12,
) -> Conformance:
    """Run the conformance suite on a normalizer: yours or one of the register.

    Hypothesis draws shapes, dtypes (float64, float32, bfloat16), memory formats, batch sizes and eps. Tried are every
    declared invariance (those that hold only for eps = 0 with an eps of 1e-300) and the sign they promise; the declared
    place of gain and eps; shape,
    dtype and precision; state_dict round trip and deep copies; torch.func against autograd, forward over reverse;
    bfloat16 autocast; first and second derivatives against a twin; empty inputs, which raise any error or give an
    empty output and leave the state finite; and one value per channel, on which training raises an error where
    `smallest` says so. All checks run, and all that failed are named. Without declared invariances the result says that
    none was tried.

    Args:
        subject: a name, a declaration, or a factory `(channels, spatial) -> Module`.
        invariances: the laws of a factory; a declaration has its own.
        smallest: the fewest values per channel a factory's layers train on; fewer must be refused.
        spatial: the numbers of spatial axes a factory's layers take.
        twin: `(module, x) -> y`, a naive implementation of the module's map in training; without it second
            derivatives are compared with differences of first ones.
        examples: cases per check.

    Returns:
        A `Conformance`, to print.

    Raises:
        NonconformingError: naming every broken law and rule, one per line, with the deviation.
        MissingExtraError: if Hypothesis is not installed.

    Examples:
        >>> report = check_normalizer("rms", examples=3)
        >>> report.name, all(cases > 0 for _, cases, _ in report.checks)
        ('rms', True)
    """
    require("hypothesis", "dev", "check_normalizer")
    declaration = _find_declaration(subject, tuple(invariances), smallest, spatial)
    ledger = Ledger(declaration.name)
    with preserved_rng():  # initial weights come from the global stream: pinned here, and put back
        seed_everything(0)
        failures = _run_all(declaration, twin, examples, ledger)
    if failures:
        raise NonconformingError("\n".join(failures))
    checks = tuple((check, ledger.cases[check], ledger.largest[check]) for check in ledger.cases)
    return Conformance(declaration.name, checks, len(declaration.invariances))


def _run_all(declaration: Declaration, twin: _contract.Twin | None, examples: int, ledger: Ledger) -> list[str]:
    """Run every check, whether others failed or not; return what failed."""
    build = builder(declaration)
    inner = 3 if declaration.placement == "weights" else None
    axes, few = declaration.spatial, max(2, examples // 3)

    def on_cases(check: Callable[[Case], None], examples: int, *, small: bool = False) -> Callable[[], None]:
        return lambda: _run_cases(check, axes, examples, small=small)

    checks = {
        str(law): on_cases(functools.partial(check_law, declaration, law, ledger), examples)
        for law in declaration.invariances
    }
    checks |= {
        "output": on_cases(lambda case: _contract.check_output(build, case, inner, ledger), examples),
        "state": on_cases(lambda case: _contract.check_state(build, case, inner, ledger), few),
        "torch.func": on_cases(lambda case: _contract.check_transforms(build, case, inner, ledger), few, small=True),
        "autocast": on_cases(lambda case: _contract.check_autocast(build, case, inner, ledger), few),
    }
    if twin or not declaration.detached:  # differences see what the gradient leaves out
        checks["derivatives"] = on_cases(
            lambda case: _contract.check_derivatives(build, case, inner, twin, ledger), few, small=True
        )
    if declaration.gain or declaration.eps_place:
        checks["gain and eps"] = on_cases(functools.partial(check_conventions, declaration, ledger), few)
    if declaration.placement == "activation":
        checks["small inputs"] = lambda: _contract.check_refusals(declaration, ledger)
    failures = []
    for name, check in checks.items():
        try:
            check()
        except NonconformingError as error:
            failures.append(str(error))
        except Exception as error:  # noqa: BLE001 (whatever the layer raised is named, and the other checks run)
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return failures


def _find_declaration(
    subject: str | Declaration | Factory, laws: tuple[Invariance, ...], smallest: int, spatial: tuple[int, ...]
) -> Declaration:
    if isinstance(subject, str):
        return registry.get(subject)
    if isinstance(subject, Declaration):
        return subject
    return Declaration(
        name=getattr(subject, "__name__", type(subject).__name__),
        title="",
        placement="activation",
        axes="",
        statistics="none",
        behaviour="",
        formula="",
        cite=(),
        invariances=laws,
        make=subject,
        spatial=spatial,
        smallest=smallest,
    )


def _run_cases(check: Callable[[Case], None], spatial: tuple[int, ...], examples: int, *, small: bool = False) -> None:
    import hypothesis
    from hypothesis import strategies

    dtypes = (torch.float64,) if small else (torch.float64, torch.float32, torch.bfloat16)
    axes = tuple(axis for axis in spatial if axis < 3) if small else spatial
    quick = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
    )

    @quick
    @hypothesis.given(strategy(strategies, axes, dtypes))
    def run(case: Case) -> None:
        check(case)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        run()
