"""Errors that say the rule, what came, and the next step; all descend from `NormgaugeError`."""

import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class NormgaugeError(Exception):
    """Root of every error normgauge raises on purpose: made of a sentence, or of the four parts `explain` takes."""

    def __init__(self, *parts: str) -> None:
        super().__init__(explain(*parts) if len(parts) == 4 else "".join(parts))


class InputError(NormgaugeError, ValueError):
    """An argument breaks a rule of the function it was given to."""


class DataError(InputError):
    """The data cannot be used: empty, one-shot, changing between passes, wrong shape."""


class MissingDataError(DataError):
    """A known dataset is not on this machine: a study that needs it is not run, which is a status and no failure."""


class ModelError(InputError):
    """The model cannot be measured as asked: no parameters, two devices, a layer that refuses the batch."""


class NonFiniteError(NormgaugeError, ArithmeticError):
    """A loss, gradient or product is infinite or not a number."""


class CertificateError(NormgaugeError, ArithmeticError):
    """A measurement contradicts a bound that should be certain: one of them is wrong, and neither is reported."""


class NotDifferentiableError(NormgaugeError, RuntimeError):
    """A derivative was asked of something that does not have one."""


class OutOfMemoryError(NormgaugeError, MemoryError):
    """A measurement needs more memory than it was given or than there is."""


class UnknownNameError(NormgaugeError, ValueError):
    """A name is not registered."""


class MissingExtraError(NormgaugeError, ImportError):
    """An optional dependency is needed and not installed."""


class StoreError(NormgaugeError, OSError):
    """A result store cannot be read or written."""


class ExecutorError(NormgaugeError, RuntimeError):
    """The machinery that runs are sent to is gone or cannot be reached."""


def explain(subject: str, rule: str, got: str, next_step: str) -> str:
    """Compose the one sentence form all messages share: `<subject>: <rule>. Got <got>. <next step>.`.

    Examples:
        >>> explain("Objective", "mode must be 'train' or 'eval'", "'test'", "Pass mode='eval'")
        "Objective: mode must be 'train' or 'eval'. Got 'test'. Pass mode='eval'."
    """
    return f"{subject}: {rule.rstrip('.')}. Got {got.rstrip('.')}. {next_step.rstrip('.')}."


def unknown_name(kind: str, name: str, known: Iterable[str], next_step: str = "") -> UnknownNameError:
    """Build the error for a name that is not registered, with the nearest known names.

    Examples:
        >>> str(unknown_name("normalizer", "layer_nrom", ["batch", "layer_norm"]))
        "unknown normalizer 'layer_nrom'. Did you mean 'layer_norm'? Known: batch, layer_norm."
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    tail = f" {next_step.rstrip('.')}." if next_step else ""
    return UnknownNameError(f"unknown {kind} {name!r}.{guess} Known: {', '.join(names)}.{tail}")


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency or say which install command brings it.

    Args:
        module: the module to import.
        extra: the extra of normgauge that installs it.
        purpose: what it is needed for, as the subject of the message.

    Raises:
        MissingExtraError: naming the command, when the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        rule = f"the package {module.split('.')[0]!r} is needed and is part of the extra {extra!r}"
        step = f"Install it with: pip install 'normgauge[{extra}]'"
        raise MissingExtraError(purpose, rule, str(error) or "no such package", step) from error


@contextmanager
def offer_partial(make: Callable[[Any], Any]) -> Iterator[None]:
    """Let Ctrl-C through, with what there is so far as its `partial`.

    Args:
        make: from the `partial` that the interrupt carries already (`None` without one) makes the one it goes on with.

    Examples:
        >>> try:
        ...     with offer_partial(lambda inner: [inner, 2]):
        ...         raise KeyboardInterrupt
        ... except KeyboardInterrupt as interrupt:
        ...     print(interrupt.partial)
        [None, 2]
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupt.partial = make(getattr(interrupt, "partial", None))  # type: ignore[attr-defined]
        raise


class NormgaugeWarning(UserWarning):
    """Something a user should know that does not stop the work."""
