"""`Study`: which knobs are asked about, which are tuned, which are fixed; it expands into runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from normgauge.errors import InputError, explain
from normgauge.store import spec_id


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
        title: a headline for the report.
        cite: keys of the papers the study is about.

    Raises:
        InputError: when a knob has two roles or no values.

    Example:
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
    title: str = ""
    cite: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse overlapping roles: a knob that is both compared and tuned makes the answer meaningless."""
        roles = [*self.scientific, *self.nuisance, *self.fixed, "seed"]
        twice = sorted({knob for knob in roles if roles.count(knob) > 1})
        if twice:
            raise InputError(
                explain(f"Study({self.name})", "each knob has one role", f"two for {', '.join(twice)}", "Remove one")
            )
        empty = [knob for knob, values in {**self.scientific, **self.nuisance}.items() if not list(values)]
        if empty or self.seeds < 1:
            got = f"none for {', '.join(empty)}" if empty else f"seeds={self.seeds}"
            raise InputError(
                explain(f"Study({self.name})", "each knob needs a value and there is at least one seed", got, "Add one")
            )

    def plan(self) -> list[dict[str, Any]]:
        """Return the specs of all runs: every arm, at every tuned setting, for every seed."""
        knobs = {**self.scientific, **self.nuisance}
        return [
            {**dict(self.fixed), **dict(zip(knobs, values, strict=True)), "seed": seed}
            for seed in range(self.seeds)
            for values in itertools.product(*knobs.values())
        ]

    def run_ids(self) -> list[str]:
        """Return the ids the plan's runs have in a store."""
        return [spec_id(spec) for spec in self.plan()]

    def describe(self) -> dict[str, Any]:
        """Return the study as plain data for the store and the report."""
        return {
            "name": self.name,
            "title": self.title or self.name,
            "question": self.question,
            "scientific": {knob: list(values) for knob, values in self.scientific.items()},
            "nuisance": {knob: list(values) for knob, values in self.nuisance.items()},
            "fixed": dict(self.fixed),
            "seeds": self.seeds,
            "cite": list(self.cite),
            "runs": self.run_ids(),
        }
