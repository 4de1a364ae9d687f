"""`Study`: which knobs are asked about, which are tuned, which are fixed; it expands into runs."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from normgauge.documents import Question
from normgauge.errors import InputError


@dataclass(frozen=True)
class Study:
    """A question put to runs: knobs asked about, knobs tuned per arm, knobs fixed, and seeds.

    Args:
        name: a short name.
        question: what the study answers.
        scientific: knob -> values that are compared; each combination is an arm.
        nuisance: knob -> values that are tuned separately for each arm, so that no arm suffers from another's choice.
        fixed: knob -> value; the caveats of the answer.
        seeds: how many seeds (0, 1, ...), shared by all arms so that differences can be paired.
        tuning_seeds: how many of them every tuned setting is tried on; the others run only at the setting that
            won. `None` tries every setting on every seed.
        held_out: whether the tuning seeds are not judged: those that answer are `seeds` others, numbered after them.
        title: a headline for the report.
        cite: keys of the papers the study is about.

    Raises:
        InputError: when a knob has two roles or no values.

    Examples:
        >>> study = Study("s", "?", scientific={"norm": ["none", "batch"]}, nuisance={"lr": [0.1, 1.0]}, seeds=3)
        >>> len(study.plan())
        12
    """

    name: str
    question: str
    scientific: Mapping[str, Sequence[Any]]
    nuisance: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 3
    tuning_seeds: int | None = None
    held_out: bool = False
    title: str = ""
    cite: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse overlapping roles: a knob that is both compared and tuned makes the answer meaningless."""
        roles = [*self.scientific, *self.nuisance, *self.fixed, "seed"]
        twice = sorted({knob for knob in roles if roles.count(knob) > 1})
        where = f"Study({self.name})"
        if twice:
            raise InputError(where, "each knob has one role", f"two for {', '.join(twice)}", "Remove one")
        empty = [knob for knob, values in {**self.scientific, **self.nuisance}.items() if not list(values)]
        if empty or self.seeds < 1 or not 1 <= self.tried <= self.seeds:
            counts = f"seeds={self.seeds}, tuning_seeds={self.tuning_seeds}"
            problem = f"none for {', '.join(empty)}" if empty else counts
            raise InputError(where, "each knob needs a value, seeds >= tuning_seeds >= 1", problem, "Add one")

    @property
    def tried(self) -> int:
        """How many seeds every tuned setting is tried on."""
        return self.seeds if self.tuning_seeds is None else self.tuning_seeds

    @property
    def judged(self) -> range:
        """The seeds whose runs at the chosen setting answer the question."""
        return range(self.tried, self.tried + self.seeds) if self.held_out else range(self.seeds)

    @property
    def runs(self) -> int:
        """How many runs both rounds have."""
        arms = math.prod(len(list(values)) for values in self.scientific.values())
        return len(self.plan()) + arms * len(set(self.judged) - set(range(self.tried)))

    def plan(self) -> list[dict[str, Any]]:
        """Return the specs of the first round: every arm, at every tuned setting, for every tuning seed."""
        knobs = {**self.scientific, **self.nuisance}
        settings = [dict(zip(knobs, values, strict=True)) for values in itertools.product(*knobs.values())]
        return [{**self.fixed, **setting, "seed": seed} for seed in range(self.tried) for setting in settings]

    def confirmation(self, chosen: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the specs of the second round: each chosen arm and setting for the seeds not tried yet."""
        later = [seed for seed in self.judged if seed >= self.tried]
        return [{**self.fixed, **arm, "seed": seed} for seed in later for arm in chosen]

    def describe(self) -> Question:
        """Return the study as the store and the page know it."""
        told = {item.name: getattr(self, item.name) for item in fields(Question)}
        asked = {role: {k: tuple(v) for k, v in told[role].items()} for role in ("scientific", "nuisance")}
        changed = {"title": self.title or self.name, "fixed": dict(self.fixed), "tuning_seeds": self.tried}
        return Question(**told | asked | changed)
