"""`Symmetries`: what was found, and what can be done with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normgauge.errors import InputError, StoreError
from normgauge.network import owner_of
from normgauge.records import Reading, plain
from normgauge.results import Cost, Result
from normgauge.symmetry import _gauge
from normgauge.symmetry._family import Family, Generators, family_from_json
from normgauge.symmetry._fibre import FibreFamily
from normgauge.symmetry._matrix import MatrixFamily

if TYPE_CHECKING:
    import altair

    from normgauge.objective import Objective

Vector = Mapping[str, Tensor] | Tensor
FORMAT = 4
_NUMBER = re.compile(r"\d+")
_STATUS = {
    "exact": "",
    "exact_here": " (at these parameter values only)",
    "exact_without_eps": " (up to the normalization's eps{eps})",
    "batch_statistics_only": " (with batch statistics only; not in eval mode)",
    "undecided": " (undecided: null to first order, not certified as a finite change)",
}

_WALKED = {
    True: "directions without closed form were looked for",
    None: "directions without closed form were looked for, how many there are is not settled: a lower bound",
    False: "directions without closed form were not looked for (walk=True, up to 1,500 parameters): a lower bound",
}


@dataclass(frozen=True)
class Symmetries(Result):
    """The parameter changes that leave a function unchanged, with certificates.

    Attributes:
        families: generators that differ by an index only, together.
        dimension: independent scale, shift and rescale directions (entries without effect are shifts).
        matrix_dimension: further directions, reported and not divided out: changes of basis and, with `walk`, those
            of kind "fibre", which have no closed form.
        unobserved: parameter -> number of entries that had no gradient in this data.
        of: "outputs" or "loss".
        shapes: the parameters and their shapes, in order.
        gauge: the name of the canonical gauge.
        walked: whether directions without closed form were looked for; `None` where that did not settle how many.
    """

    families: tuple[Family, ...]
    dimension: int
    matrix_dimension: int
    unobserved: dict[str, int]
    of: str
    shapes: dict[str, tuple[int, ...]]
    gauge: str = "unit-writer"
    walked: bool | None = False
    parameters: dict[str, Tensor] | None = field(default=None, repr=False, compare=False)

    @property
    def generators(self) -> Generators:
        """The generators one by one, as `Symmetry` items (made when looked at)."""
        return Generators(self.families)

    @property
    def fibre_dimension(self) -> int:
        """The directions of `matrix_dimension` that have no closed form."""
        return sum(family.size for family in self.families if family.kind == "fibre")

    # -- acting -------------------------------------------------------------------------------------------------

    def project(self, vector: Vector, parameters: Vector | None = None) -> Any:
        """Remove from a tangent vector everything that moves along a symmetry.

        Args:
            vector: flat, or by parameter name.
            parameters: where; the objective's parameters when `None`.

        Returns:
            The orthogonal projection onto the complement of the generators, in the form `vector` came in.
        """
        point, values = self._point(parameters), self._dict(vector, "project")
        result = _gauge.project(values, _gauge.divisible_families(self.families), point)
        return self._like(result, vector)

    def canonical(self, parameters: Vector | None = None) -> Any:
        """Return the canonical point with the same function: gauge "unit-writer".

        Families that hold only without eps or only with batch statistics are divided out too: the function is
        then the same up to the effect of eps, and in train mode only.
        """
        point = self._point(parameters)
        result = _gauge.canonical(point, _gauge.divisible_families(self.families), list(self.shapes))
        return self._like(result, parameters if parameters is not None else point)

    def distance(self, a: Vector, b: Vector) -> float:
        """Return the Euclidean distance of the canonical points of two parameter settings: zero on one orbit."""
        first, second = self._dict(self.canonical(a), "distance"), self._dict(self.canonical(b), "distance")
        return sum(float((first[name].double() - second[name].double()).square().sum()) for name in first) ** 0.5

    def interpolate(self, a: Vector, b: Vector, t: float) -> Any:
        """Return the point at `t` in [0, 1] on the straight line between the canonical points of `a` and `b`."""
        first, second = self._dict(self.canonical(a), "interpolate"), self._dict(self.canonical(b), "interpolate")
        mixed = {name: torch.lerp(first[name].double(), second[name].double(), t) for name in first}
        return self._like(mixed, a)

    def _point(self, parameters: Vector | None) -> dict[str, Tensor]:
        if parameters is not None:
            return self._dict(parameters, "parameters")
        if self.parameters is None:
            raise InputError(
                "Symmetries",
                "symmetries read from a file do not hold the parameters",
                "none",
                "Pass parameters=dict(objective.parameters), or load with objective=",
            )
        return dict(self.parameters)

    def _dict(self, values: Vector, method: str) -> dict[str, Tensor]:
        if isinstance(values, Tensor):
            sizes = [int(torch.Size(shape).numel()) for shape in self.shapes.values()]
            if values.shape != (sum(sizes),):
                raise InputError(
                    f"Symmetries.{method}",
                    f"a flat vector has shape ({sum(sizes)},)",
                    str(tuple(values.shape)),
                    "Use objective.flatten, or pass a dict by name",
                )
            parts = values.double().split(sizes)
            return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        wrong = [name for name, shape in self.shapes.items() if name not in values or values[name].shape != shape]
        if wrong:
            raise InputError(
                f"Symmetries.{method}",
                f"a tensor of the parameter's shape is needed for each of the {len(self.shapes)} parameters",
                f"none, or one of another shape, for {', '.join(wrong[:3])}",
                "Start from dict(objective.parameters)",
            )
        return {name: values[name].detach().double() for name in self.shapes}

    def _like(self, values: Mapping[str, Tensor], example: Vector) -> Any:
        if isinstance(example, Tensor):
            return torch.cat([values[name].reshape(-1) for name in self.shapes]).to(example)
        return {name: values[name].to(example[name]) for name in self.shapes}

    # -- telling ------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Return sentences per layer: what does not matter there, and what follows for training."""
        return "\n".join(sentences(self.families, self.unobserved, self.mode))

    def _title(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in self._counts().items()) or "none"
        return (
            f"Symmetries of the {self.of}: {self.dimension} directions to divide out, "
            f"{self.matrix_dimension - self.fibre_dimension} more by change of basis"
            + (f", {self.fibre_dimension} without closed form" if self.fibre_dimension else "")
            + f" ({kinds})"
        )

    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for family in (f for f in self.families if f.status not in ("exact_here", "undecided")):
            counts[family.kind] = counts.get(family.kind, 0) + len(family)
        return counts

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "kind": family.kind
                + (f" {family.group}({family.block})" if family.kind == "matrix" else "")
                + (f" of {family.size}" if family.kind == "fibre" else ""),
                "generators": len(family),
                "change": family.describe(),
                "status": family.status,
                "residual": max(family.residuals, default=None),
                "moved": family.certificate.get("moved"),
                "eps_effect": family.certificate.get("eps_effect"),
            }
            for family in self.families
        ]

    def _shown_rows(self) -> list[dict[str, Any]]:
        """Return the rows, with families that differ only by a layer's number on one line."""
        merged: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in self._rows():
            key = (row["kind"], re.sub(r"\d+", "*", row["change"]), row["status"])
            if key not in merged:
                merged[key] = {**row, "layers": 0}
            else:
                merged[key]["change"] = key[1]
                merged[key]["generators"] += row["generators"]
                for name in ("residual", "moved", "eps_effect"):
                    if row[name] is not None:
                        merged[key][name] = max(row[name], merged[key][name] or 0.0)
            merged[key]["layers"] += 1
        rows = []
        for row in merged.values():
            change = row["change"]
            row["change"] = change if len(change) <= 100 else f"{change[:97]}..."
            rows.append({"kind": row["kind"], "generators": row["generators"], "times": row["layers"], **row})
        for row in rows:
            del row["layers"]
        return rows

    def readings(self) -> tuple[Reading, ...]:
        """Return the directions to divide out (what was missed can only add to them), then generators by kind."""
        return (
            Reading("dimension", self.dimension, "lower"),
            Reading("matrix dimension", self.matrix_dimension, "lower"),
            *(Reading(f"{kind} generators", number, "lower") for kind, number in self._counts().items()),
        )

    def _meaning(self) -> str:
        total = sum(torch.Size(shape).numel() for shape in self.shapes.values())
        free = self.dimension + self.matrix_dimension
        if not free:
            return f"No change searched for among {total} parameters leaves the {self.of} as they are: 0 to divide out."
        counts = self._counts()
        said = f"{free} of {total} directions ({free / total:.1%}) change nothing: distances, norms and flatness along "
        said += "them mean nothing."
        if counts.get("scale"):
            said += (
                f" Scales are free for {counts['scale']}: there decay sets the effective rate (see ng.param_groups)."
            )
        if counts.get("dead"):
            said += f" {counts['dead']} entries do nothing and can go."
        return said

    def _notes(self) -> str:
        effects = [f.certificate["eps_effect"] for f in self.families if f.certificate.get("eps_effect") is not None]
        undecided = sum(len(f) for f in self.families if f.status == "undecided")
        silent = sum(self.unobserved.values())
        here = sum(len(f) for f in self.families if f.status == "exact_here")
        notes = (
            "certified by finite changes at redrawn points",
            _WALKED[self.walked],
            f"eps moves the outputs by {max(effects):.1e} at most" if effects else "",
            f"{silent} entries had no gradient in this data" if silent else "",
            f"{undecided} generators undecided" if undecided else "",
            f"{here} more hold at these values only" if here else "",
        )
        return "; ".join(note for note in notes if note)

    def chart(self) -> altair.TopLevelMixin:
        """Return bars: generators per layer, coloured by kind."""
        from normgauge.charts import bars

        sums: dict[tuple[str, str], int] = {}
        for family in self.families:
            key = (family.parameters[0], family.kind)
            sums[key] = sums.get(key, 0) + len(family)
        rows = [{"layer": layer, "kind": kind, "generators": number} for (layer, kind), number in sums.items()]
        return bars(rows, x="layer", y="generators", series="kind", title="generators per layer")

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything but the parameters' values as JSON."""
        data = {
            "format": FORMAT,
            "families": [family.to_json() for family in self.families],
            "unobserved": self.unobserved,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            **{
                name: getattr(self, name)
                for name in ("dimension", "matrix_dimension", "mode", "of", "seed", "gauge", "walked")
            },
            "cost": plain(self.cost),
        }
        Path(path).write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, objective: Objective | None = None) -> Symmetries:
        """Read what `save` wrote; `objective` lends its parameters to `project` and `canonical`.

        Raises:
            StoreError: when the file is missing or is not a file of symmetries.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}")
            families = tuple(_family(entry) for entry in data["families"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"Symmetries.load({str(path)!r})", "the file must be one that save wrote", str(error), "Save again"
            ) from error
        rest = {name: value for name, value in data.items() if name not in ("format", "families", "shapes", "cost")}
        shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
        values = None if objective is None else {n: v.double().clone() for n, v in objective.parameters.items()}
        return cls(families=families, shapes=shapes, parameters=values, cost=Cost(**data["cost"]), **rest)


def _family(entry: Mapping[str, Any]) -> Family:
    names = tuple(entry.get("names", ()))
    family = family_from_json({name: value for name, value in entry.items() if name != "names"})
    values = {name: getattr(family, name) for name in Family.__dataclass_fields__}
    if family.kind == "fibre":
        return FibreFamily(**values, names=names)
    return MatrixFamily(**values) if family.kind == "matrix" else family


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
