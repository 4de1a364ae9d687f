"""Sentences a practitioner understands, one group per layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from normgauge.network import owner_of
from normgauge.symmetry._family import Family

_NUMBER = re.compile(r"\d+")
_STATUS = {
    "exact": "",
    "exact_here": " (at these parameter values only)",
    "exact_without_eps": " (up to the normalization's eps{eps})",
    "batch_statistics_only": " (with batch statistics only; not in eval mode)",
    "undecided": " (undecided: null to first order, not certified as a finite change)",
}


def sentences(families: Sequence[Family], unobserved: Mapping[str, int], mode: str) -> list[str]:
    """Return one line per family, and one per parameter without gradient; what repeats over layers is one line."""
    groups: dict[tuple[object, ...], list[Family]] = {}
    for family in families:
        names = tuple(_NUMBER.sub("*", name) for name in family.parameters)
        key = (names, family.kind, len(family), family.size, family.group, family.status, family.counted)
        groups.setdefault((*key, tuple(_NUMBER.sub("*", t.describe()) for t in family.terms)), []).append(family)
    lines = []
    for group in groups.values():
        text = f"{_sentence(group[0])}{_caveat(group[0])}."
        titles = {same[0]: _shared(same) for same in zip(*(family.parameters for family in group), strict=True)}
        for name in sorted(titles, key=len, reverse=True):
            text = text.replace(name, titles[name])
        first = titles[group[0].parameters[0]]
        lines.append(f"{owner_of(first) or first}{f' ({len(group)} times)' if len(group) > 1 else ''}: {text}")
    for name, count in unobserved.items():
        lines.append(f"{name}: {count} entries had no gradient in this data; nothing is known about them.")
    return lines or [f"no symmetry was found in mode {mode!r}."]


def _shared(names: Sequence[str]) -> str:
    """Return names that differ by numbers as one, with a star for the numbers that differ."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(same[0] if len(set(same)) == 1 else "*" for same in parts)


def _caveat(family: Family) -> str:
    effect = family.certificate.get("eps_effect")
    text = _STATUS[family.status]
    return text.format(eps="" if effect is None else f", which moves the outputs by {effect:.1e} here")


def _names(family: Family) -> str:
    names = list(family.parameters)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _sentence(family: Family) -> str:
    count = len(family)
    if family.kind == "dead":
        if not family.counted:
            return f"{count} unit{_plural(count)} of {_names(family)} never active on this data"
        which = "has" if count == family.size else f"has {count} entries with"
        what = "no effect" if which == "has" else "no effect; the others count"
        return f"{family.parameters[0]} {which} {what}; it can be removed, and decaying it does nothing"
    if family.kind == "scale":
        if len(family.terms) > 1 or family.size == 1:
            joint = "the joint scale" if count == 1 else f"{count} joint scales"
            return (
                f"{joint} of {_names(family)} {'is' if count == 1 else 'are'} free; "
                "weight decay there sets the learning rate, not the capacity"
            )
        return (
            f"{count} free scale{_plural(count)} in {_names(family)}; "
            "weight decay here sets the learning rate, not the capacity"
        )
    if family.kind == "shift":
        if len(family.terms) == 1 or family.terms[0].role == "centred":
            return f"{count} free shift{_plural(count)} of {family.describe()}: a constant added there is centred away"
        absorbers = ", ".join(family.parameters[1:])
        return f"{count} shift{_plural(count)} of {family.parameters[0]} can be absorbed by {absorbers}"
    if family.kind == "rescale":
        up = [t.parameter for t in family.terms if t.coefficient > 0]
        down = [t.parameter for t in family.terms if t.coefficient < 0]
        return (
            f"{count} scale{_plural(count)} can move between {', '.join(dict.fromkeys(up))} and "
            f"{', '.join(dict.fromkeys(down))}; only their product counts, so the norm of one alone means nothing"
        )
    if family.kind == "fibre":
        return (
            f"{family.size} more directions of {_names(family)} change nothing; they have no closed form and are "
            "followed step by step, in small networks only"
        )
    group = {"GL": "any invertible change of basis", "O": "any rotation", "O1": "any rotation that fixes the mean"}
    return f"{group[family.group]} of {count} block{_plural(count)} of {family.block} between {_names(family)}"


def _plural(count: int) -> str:
    return "" if count == 1 else "s"
