"""What a pinned section is, how it is computed and compared with the stored one, and how it is written."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
DIGITS = 10  # written; far more than any tolerance asks for
FLOOR = 1e-12  # absolute: what exact arithmetic makes zero


def arithmetic() -> str:
    """Return torch's version and a digest of sums and exponentials in float32: their last bits hang on the processor.

    Training amplifies the last bit: a curve past the edge of stability is another one on another processor.
    """
    x = torch.arange(64 * 96, dtype=torch.float32).reshape(64, 96).mul(0.37).sin()
    y = (x @ x.T).mul(0.05).exp().sum(1).log() + x.mean(1).tanh()
    seen = hashlib.sha256(y.numpy().tobytes()).hexdigest()[:8]
    return f"{'.'.join(torch.__version__.split('.')[:2])} {seen}"


VERSION = arithmetic()

ADVICE = "if this is meant: python tests/golden/write.py, a commit of its own, an entry under Numbers in the changelog"

Values = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """Named numbers of one instrument, and how far they may be from the stored ones.

    Args:
        name: the key in the file of its subject.
        compute: returns the numbers; a nested mapping or sequence is flattened to `a.b.0`.
        rel: relative tolerance of every float; numbers that are whole, words, truths and `None` must be equal.
        elsewhere: the tolerance on another torch or processor than those that wrote the file, where the numbers hang on
            torch's random streams, which may change between versions, or on trained weights; infinite where only the
            keys can be compared, `None` where the numbers hang on neither. A file may name its torch alone.
        loose: a pattern of keys and the tolerance these have instead of `rel`.
    """

    name: str
    compute: Callable[[], Mapping[str, Any]]
    rel: float = 1e-6
    elsewhere: float | None = None
    loose: tuple[str, float] | None = None

    def values(self) -> Values:
        return dict(flatten(self.compute()))

    def tolerance(self, key: str, written_by: str = VERSION) -> float:
        if self.elsewhere is not None and written_by not in (VERSION, VERSION.split()[0]):
            return self.elsewhere
        return self.loose[1] if self.loose and re.search(self.loose[0], key) else self.rel


class Subject(dict[str, Section]):
    """The sections of one file."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.path = FOLDER / f"{name}.json"

    def pin(
        self,
        name: str,
        *,
        rel: float = 1e-6,
        elsewhere: float | None = None,
        loose: tuple[str, float] | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function as a section."""

        def keep(compute: Callable[..., Any]) -> Callable[..., Any]:
            if name in self:
                raise KeyError(f"two sections are called {name}")
            self[name] = Section(name, compute, rel, elsewhere, loose)
            return compute

        return keep

    def stored(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8"))

    def departures(self, name: str, values: Values) -> list[str]:
        """Say where the values of a section are not the stored ones."""
        stored = self.stored()
        tolerance = partial(self[name].tolerance, written_by=stored["torch"])
        told = differences(values, stored["sections"].get(name, {}), tolerance)
        return [*told, ADVICE] if told else []

    def write(self, sections: Mapping[str, Values]) -> None:
        text = json.dumps({"torch": VERSION, "sections": dict(sections)}, indent=1, ensure_ascii=False, allow_nan=False)
        self.path.write_text(text + "\n", encoding="utf-8")


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and sequences as JSON can hold them; tensors become norm and ends.

    Examples:
        >>> dict(flatten({"a": [1, {"b": float("inf")}], "c": None}))
        {'a.0': 1, 'a.1.b': 'inf', 'c': None}
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from flatten(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from flatten(item, f"{path}.{number}")
    elif isinstance(value, torch.Tensor) and value.numel() > 1:
        entries = value.detach().flatten()
        yield from flatten({"norm": entries.norm(), "first": entries[0], "last": entries[-1]}, path)
    else:
        yield path, leaf(value)


def leaf(value: Any) -> Any:
    if hasattr(value, "item"):  # tensors of one element and numpy's numbers
        value = value.item()
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)


def differences(found: Values, stored: Values, tolerance: Callable[[str], float]) -> list[str]:
    """Say what is missing, what is new and what is off by more than its tolerance; nothing where all agree."""
    told = [f"{name}: stored, not computed" for name in stored if name not in found]
    told += [f"{name}: computed, not stored" for name in found if name not in stored]
    for name, value in found.items():
        if name in stored and not agree(value, stored[name], tolerance(name)):
            told.append(f"{name}: {value!r}, stored {stored[name]!r} (relative tolerance {tolerance(name):g})")
    return told


def agree(value: Any, stored: Any, rel: float) -> bool:
    if rel == math.inf:
        return True
    if isinstance(value, float) and isinstance(stored, float):
        return math.isclose(value, stored, rel_tol=rel, abs_tol=FLOOR)
    return type(value) is type(stored) and value == stored
