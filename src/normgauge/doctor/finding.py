"""`Finding`: something wrong or worth knowing about a network; `Check`: one question the doctor asks, as data."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import nn

from normgauge.doctor.probes.exam import Affine as Affine
from normgauge.doctor.probes.exam import Exam as Exam
from normgauge.doctor.probes.exam import NormBase as NormBase
from normgauge.doctor.probes.passes import NormCall as NormCall
from normgauge.errors import InputError

Severity = Literal["info", "warning", "error"]
Exactness = Literal["exact", "state_only", "changes_function", "none"]
Need = Literal["model", "data", "gradients", "optimizer", "loader"]
Repair = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Sign:
    """What a check saw in one place, a module or "(model)", with the measured number in a sentence.

    Attributes:
        effect: what ranks it: the measured relative effect on outputs, statistics or steps; 1 is all of it.
        severity: where it is not the check's own.
        repair: changes a copy of the model in place.
    """

    where: str
    evidence: str
    effect: float = 0.0
    severity: Severity | None = None
    repair: Repair | None = None


Signs = Iterator[Sign]


@dataclass(frozen=True)
class Finding:
    """Something wrong or worth knowing about a network.

    Attributes:
        id: of the check, such as "NG07".
        severity: "error" (a number proves the fault), "warning" (very likely) or "info" (contested, or harmless).
        where: the module, or "(model)".
        evidence: what was measured here.
        title: the problem in a few words.
        meaning: why it matters, in two sentences.
        remedy: what to do, with code to paste.
        exactness: of the remedy: "exact" (no output changes), "state_only" (stored numbers or optimizer groups, not
            the trained function), "changes_function", "none" (there is nothing to apply).
        references: where it was met.
        effect: measured; ranks the findings.
        repair: the remedy on a copy of the model, in place; `None` where a person has to decide.
    """

    id: str
    severity: Severity
    where: str
    evidence: str
    title: str
    meaning: str
    remedy: str
    exactness: Exactness
    references: tuple[str, ...] = ()
    effect: float = 0.0
    repair: Repair | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Check:
    """One question the doctor asks: a function that yields signs, with words in its docstring.

    The docstring is `ID: title.`, a paragraph of two sentences, `Fix: ...` with code indented below, `References: ...`.

    Attributes:
        severity: of its findings, unless a sign says otherwise.
        look: yields a `Sign` for every place.
        needs: what it cannot do without; "data" is real inputs.
        exactness: of the remedy.
        slow: left out by `quick`.
    """

    severity: Severity
    look: Callable[[Exam], Iterable[Sign]] = field(repr=False)
    needs: Need = "model"
    exactness: Exactness = "none"
    slow: bool = False

    def __post_init__(self) -> None:
        for word, words in ((self.severity, Severity), (self.needs, Need), (self.exactness, Exactness)):
            if word not in get_args(words):
                raise InputError("check", f"use one of {', '.join(get_args(words))}", repr(word), "Correct it")

    @property
    def words(self) -> dict[str, Any]:
        """Id, title, meaning, remedy and references."""
        head, _, body = (inspect.getdoc(self.look) or "").partition("\n")
        meaning, _, after = body.partition("\nFix: ")
        fix, _, met = after.partition("\nReferences: ")
        name, _, title = head.partition(": ")
        remedy = "\n".join(line.removeprefix("    ") for line in fix.strip().splitlines())
        references = tuple(item.strip(" \n.") for item in met.split(",") if item.strip(" \n."))
        words: dict[str, Any] = {"id": name, "title": title.rstrip("."), "meaning": " ".join(meaning.split())}
        return words | {"remedy": remedy, "references": references}

    def __call__(self, exam: Exam) -> list[Finding]:
        """Return its findings about one network."""
        own = self.words | {"exactness": self.exactness}
        return [Finding(**vars(sign) | own | {"severity": sign.severity or self.severity}) for sign in self.look(exam)]


CHECKS: dict[str, Check] = {}


def check(severity: Severity, **declared: Any) -> Callable[[Callable[[Exam], Iterable[Sign]]], Check]:
    """Register a function that yields signs as a check; see `Check` for the words."""

    def register(look: Callable[[Exam], Iterable[Sign]]) -> Check:
        made = Check(severity, look, **declared)
        name = made.words["id"]
        if name in CHECKS or not name or not made.words["remedy"]:
            rule = "the function's docstring has an id of its own, a title, a meaning and `Fix: ...`"
            raise InputError(f"check {name!r}", rule, repr(made.words["title"]), "Write it")
        CHECKS[name] = made
        return made

    return register


def setting(name: str, **values: Any) -> Repair:
    """Return the repair that sets attributes of a module."""

    def repair(model: nn.Module) -> None:
        for key, value in values.items():
            setattr(model.get_submodule(name), key, value)

    return repair
