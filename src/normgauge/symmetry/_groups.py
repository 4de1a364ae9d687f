"""`param_groups`: parameter groups by symmetry and role, with the table that says where decay belongs and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from normgauge.errors import InputError, unknown_name
from normgauge.network import Network, owner_of
from normgauge.objective import Objective
from normgauge.records import Reading
from normgauge.results import Result, instrument
from normgauge.symmetry._discover import symmetries as find_symmetries
from normgauge.symmetry._family import Family
from normgauge.symmetry._result import Symmetries

if TYPE_CHECKING:
    import altair

DECAY_OFF = 0.0
UNPROBED = "role unknown"
SHOWN = 4  # names printed per reason
ROLES = ("scale_invariant", "affine", "dead", "rest")
_ADVICE = {
    "scale_invariant": "decay sets the effective learning rate, not the capacity; keep it, or put it on the sphere",
    "affine": "gains and shifts of a normalization: decay shrinks what the normalization restored; off",
    "dead": "no effect on the function: decay only drains it; off (or remove it)",
    "rest": "decay limits the function: here it belongs",
}
_VECTOR_ADVICE = "a bias or gain outside a normalization: decay is rarely wanted; off"


@dataclass(frozen=True)
class ParamGroups(Result, Sequence[dict[str, Any]]):
    """Groups ready for a torch optimizer: `torch.optim.AdamW(ng.param_groups(objective, optimizer_defaults=...))`.

    Attributes:
        groups: dicts with `params` and `name`, `weight_decay` where it is off or was given, and what overrides added.
        reasons: parameter name -> (role, group's name, weight decay or `None` for the optimizer's own, why).
    """

    groups: tuple[dict[str, Any], ...]
    reasons: dict[str, tuple[str, str, float | None, str]]

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, position: Any) -> Any:
        return self.groups[position]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield a copy of each group: an optimizer writes its defaults into what it is given."""
        return iter([dict(group) for group in self.groups])

    def _title(self) -> str:
        return f"{len(self.groups)} parameter groups"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"parameter": name, "group": group, "weight_decay": decay, "why": why}
            for name, (_, group, decay, why) in self.reasons.items()
        ]

    def _shown_rows(self) -> list[dict[str, Any]]:
        """Return one row per reason; `frame()` has one per parameter."""
        names: dict[tuple[str, float | None, str], list[str]] = {}
        for name, (_, group, decay, why) in self.reasons.items():
            names.setdefault((group, decay, why), []).append(name)
        return [
            {
                "group": group,
                "weight_decay": "optimizer's" if decay is None else decay,
                "tensors": len(same),
                "parameters": _list_some(same),
                "why": why,
            }
            for (group, decay, why), same in names.items()
        ]

    def readings(self) -> tuple[Reading, ...]:
        """Return how many tensors are in each group."""
        return tuple(Reading(f"tensors in {group['name']}", len(group["params"])) for group in self.groups)

    def _meaning(self) -> str:
        off = [name for name, (_, _, decay, _) in self.reasons.items() if decay == DECAY_OFF]
        free = sum(role == "scale_invariant" for role, *_ in self.reasons.values())
        return (
            f"{len(self.reasons)} tensors in {len(self.groups)} groups, {len(off)} of them without weight decay "
            f"({DECAY_OFF:g}); of {free} scale-invariant ones decay sets the effective rate, not the capacity. "
            f"{self._unsure()}Pass them to any torch optimizer."
        )

    def _unsure(self) -> str:
        asked = [name for name, (_, _, _, why) in self.reasons.items() if UNPROBED in why]
        return f"{len(asked)} could not be probed, {asked[0]!r} first: look whether they are gains. " if asked else ""

    def _notes(self) -> str:
        return "by certified symmetries; overrides={'pattern': {...}} puts parameters elsewhere"

    def chart(self) -> altair.TopLevelMixin:
        """Return bars: entries per group (needs the `lab` extra)."""
        from normgauge.charts import bars

        rows = [
            {"group": group["name"], "entries": sum(param.numel() for param in group["params"]), "series": "entries"}
            for group in self.groups
        ]
        return bars(rows, x="group", y="entries", title="entries per parameter group")


@instrument
def param_groups(
    objective: Objective,
    optimizer_defaults: Mapping[str, Any] | None = None,
    *,
    symmetries: Symmetries | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    geometry: bool = False,
    seed: int = 0,
) -> ParamGroups:
    """Sort the parameters into groups by what their symmetries say about weight decay.

    A matrix every slice of which can be scaled freely, alone or with its bias, goes to `scale_invariant`; gains and
    shifts of normalizations, found by what they do to their module's output, to `affine`; entries without effect to
    `dead`; the rest to `rest`, its vectors without decay. A tensor whose free scale is only joint with others (a
    residual stream) stays in `rest`.

    Args:
        objective: the model whose trainable parameters are grouped.
        optimizer_defaults: the options every group starts with, such as `{"lr": 0.1, "weight_decay": 5e-4}`. Without a
            weight decay here, groups where it belongs take the one the optimizer is made with.
        symmetries: found before; found now when `None`.
        overrides: glob of parameter names -> options; each pattern makes a group of its own.
        geometry: whether to say where each group lives, for `ng.optim`: `geometry="sphere"` with `granularity="row"`
            or "tensor" and no decay for `scale_invariant` tensors scaled freely that way, "euclidean" for all others.
        seed: of the search when `symmetries` is `None`.

    Returns:
        `ParamGroups`: a sequence of dicts for any torch optimizer; printed, the table of reasons.

    Raises:
        UnknownNameError: an override that matches no parameter.
        InputError: an override that names `params`.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        >>> data = (torch.randn(16, 3), torch.randn(16, 2))
        >>> groups = param_groups(Objective(model, nn.functional.mse_loss, data, mode="train"), {"weight_decay": 0.1})
        >>> {group["name"]: group["weight_decay"] for group in groups}
        {'scale_invariant': 0.1, 'affine': 0.0, 'dead': 0.0, 'rest': 0.1, 'rest_vectors': 0.0}
        >>> optimizer = torch.optim.SGD(groups, lr=0.1)

    References: sun2020.
    """
    symmetries = find_symmetries(objective, seed=seed) if symmetries is None else symmetries
    defaults = dict(optimizer_defaults or {})
    tensors = dict(objective.model.named_parameters())
    chosen = _match_overrides(objective.names, overrides or {})
    roles = _roles(objective, symmetries)
    groups: dict[str, dict[str, Any]] = {}
    reasons: dict[str, tuple[str, str, float | None, str]] = {}
    for name in objective.names:
        role, why = roles[name]
        vector = sum(size > 1 for size in tensors[name].shape) <= 1
        label = "rest_vectors" if role == "rest" and vector else role
        options = defaults if label in ("scale_invariant", "rest") else {**defaults, "weight_decay": DECAY_OFF}
        why = _VECTOR_ADVICE if label == "rest_vectors" and UNPROBED not in why else why
        if name in chosen:
            pattern, extra = chosen[name]
            label, options, why = f"override {pattern}", {**options, **extra}, f"override {pattern!r}"
        if geometry:
            options = dict(options)
            granularity = _SPHERES.get(_free_axes(symmetries, name)) if label == "scale_invariant" else None
            options.setdefault("geometry", "sphere" if granularity else "euclidean")
            if granularity:  # decay cannot act on a sphere, so it is not asked for
                label, options["granularity"], options["weight_decay"] = f"{label} {granularity}s", granularity, 0.0
        group = groups.setdefault(label, {"params": [], "name": label, **options})
        group["params"].append(tensors[name])
        reasons[name] = (role, label, group.get("weight_decay"), why)
    order = sorted(groups.values(), key=lambda g: _place(g["name"]))
    return ParamGroups(tuple(order), reasons)


# What is scaled freely -> how our optimizers call such spheres; other axes (columns) stay Euclidean.
_SPHERES: dict[tuple[int, ...] | None, str] = {(0,): "row", (): "tensor"}


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= SHOWN else f"{', '.join(names[: SHOWN - 1])}, ..., {names[-1]}"


def _place(label: str) -> int:
    return next((k for k, role in enumerate(ROLES) if label.startswith(role)), len(ROLES))


def _match_overrides(
    names: Sequence[str], overrides: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[str, Mapping[str, Any]]]:
    chosen: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for pattern, extra in overrides.items():
        if "params" in extra:
            raise InputError(
                "param_groups", "an override gives options, not params", repr(pattern), "Name lr, weight_decay, ..."
            )
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise unknown_name("parameter pattern", pattern, names)
        chosen.update(dict.fromkeys(matching, (pattern, extra)))
    return chosen


def _roles(objective: Objective, symmetries: Symmetries) -> dict[str, tuple[str, str]]:
    roles = dict.fromkeys(objective.names, ("rest", _ADVICE["rest"]))
    sizes = {name: value.numel() for name, value in objective.parameters.items()}
    for family in symmetries.families:
        if family.status == "undecided" or not family.counted:
            continue
        if family.kind == "dead" and len(family) == sizes[family.parameters[0]]:
            roles[family.parameters[0]] = ("dead", _ADVICE["dead"])
        elif family.kind == "scale" and _covers(family):
            for name in family.parameters:
                joint = [other for other in family.parameters if other != name]
                why = _ADVICE["scale_invariant"] + (f" (jointly with {', '.join(joint)})" if joint else "")
                if sum(size > 1 for size in symmetries.shapes[name]) > 1:
                    roles[name] = ("scale_invariant", why)
    for role in Network.of(objective).roles.values():
        for name in {role.parameter, *role.tied} & set(roles):
            if roles[name][0] == "rest" and role.kind in ("gain", "shift"):  # by what they do to their module's outputs
                roles[name] = ("affine", _ADVICE["affine"])
            elif roles[name][0] == "rest" and role.why:
                roles[name] = ("rest", f"{UNPROBED}: {role.why}; what its shape says")
    return roles


def _covers(family: Family) -> bool:
    """Tell whether a free scale is one layer's own: all of its slices, and no tensor of another module."""
    whole = all(term.slot.narrow is None for term in family.terms) and family.indices is None
    return whole and len({owner_of(name) for name in family.parameters}) == 1


def _free_axes(symmetries: Symmetries, name: str) -> tuple[int, ...] | None:
    """Return the axes whose slices scale freely (none for the whole tensor), or `None` if it does not alone."""
    for family in symmetries.families:
        if family.kind == "scale" and family.parameters == (name,) and _covers(family):
            return tuple(family.terms[0].slot.keep)
    return None
