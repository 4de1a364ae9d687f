"""Who writes into, reads from and normalizes the stream of a network: values on one graph, joined by what keeps axes.

A value is a tensor some step made. Steps that move data without touching the last axis, multiply by one number, or add
values to each other pass a change of basis of that axis on; linear maps and embeddings begin and end it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normgauge.network import Graph, Made, Step, replaced
from normgauge.surgery._maps import LinearMap, Norm, Site, is_tied, read_map, read_norm, read_table, set_parameter
from normgauge.surgery._operate import Patient

_SUMS = ("add", "sub", "__add__", "__radd__", "__sub__", "__iadd__", "add_", "iadd")
_MULTIPLES = ("mul", "div", "neg", "__mul__", "__rmul__", "__truediv__", "true_divide", "mul_", "div_", "__neg__")


def width_of(step: Step) -> int:
    """Return the size of the last axis of what a step reads first."""
    return step.inputs[0][-1] if step.inputs and step.inputs[0] else 0


def moves_only(step: Step) -> bool:
    """Tell whether a function hands on its first argument with the last axis as it was: asked by its own indices."""
    if step.module is not None and not isinstance(step.module, (nn.Identity, nn.Dropout)):
        return False
    one = len(step.outputs) == 1 and bool(step.outputs[0]) and step.outputs[0][-1] == width_of(step) > 0
    if not one or "float" not in step.dtype or step.module is not None:
        return one and "float" in step.dtype
    several = len(set(step.values)) > 1
    return all(_hands_on(step, size, int(several and size < 0)) for size in (1.0, -1.0, 1e12))


def _hands_on(step: Step, size: float, other: int) -> bool:
    """Tell whether each last axis comes out as it went in, whatever else (zeros, or ones) the function reads."""
    shapes = list(step.inputs)
    codes = torch.arange(width_of(step), dtype=torch.float64)
    codes = size * (codes + 1.5) * (-1) ** codes

    def stand_in(_: Made) -> Tensor:
        shape = shapes.pop(0) if shapes else (1,)
        first = len(shapes) == len(step.inputs) - 1
        return codes.expand(shape).clone() if first else torch.full(shape, other)

    try:
        args, kwargs = replaced((step.args, dict(step.kwargs)), Made, stand_in)
        result = step.function(*args, **kwargs)
    except Exception:  # noqa: BLE001 (any function may be asked)
        return False
    fits = isinstance(result, Tensor) and tuple(result.shape) == step.outputs[0]
    return fits and bool(result.numel()) and bool((result == codes).all())


def combines(step: Step) -> list[Made]:
    """Return the values a step adds up, or the one it multiplies by a number; none for other steps."""
    if step.module is not None:
        return []
    made = [value for value in step.args if isinstance(value, Made)]
    others = [value for value in step.args if not isinstance(value, Made)]
    if step.kind in _SUMS and len(made) == 2 and not others and len({s[-1] if s else 0 for s in step.inputs}) == 1:
        return made
    numbers = all(isinstance(v, (int, float)) or (isinstance(v, Tensor) and v.numel() == 1) for v in others)
    if step.kind in _MULTIPLES and len(made) == 1 and numbers and len(others) <= 1:
        reciprocal = step.kind in ("div", "true_divide", "__truediv__") and step.args[0] is not made[0]
        return [] if reciprocal else made
    return []


@dataclass
class Stream:
    """Values joined to one: a change of basis of one is a change of basis of all."""

    values: set[Made]  # joined
    writers: dict[str, Site] = field(default_factory=dict)  # the matrix of each step that writes them, by its name
    readers: dict[str, Site] = field(default_factory=dict)  # likewise
    norms: dict[str, Norm] = field(default_factory=dict)  # normalizers that read them, by name of their step
    problems: list[tuple[str, str]] = field(default_factory=list)  # steps that can neither change nor pass it on, why


class Anatomy:
    """A graph with the maps and normalizers among its steps, each asked once."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.model, self.graph = model, graph
        self.norms: dict[int, Norm] = {}
        self.maps: dict[int, LinearMap] = {}
        self.tables: dict[int, Site] = {}
        for step in (step for step in graph.steps if step.module is not None):
            module, width = model.get_submodule(step.name.removeprefix("(model)")), width_of(step)
            made = step.outputs[0][-1] if step.outputs and step.outputs[0] else 0
            if (table := read_table(module, made)) is not None:
                self.tables[step.number] = table
            elif (mapping := read_map(module, width)) is not None:
                self.maps[step.number] = mapping
            elif (norm := read_norm(module, width)) is not None:
                self.norms[step.number] = norm
        self._moving = {step.number for step in graph.steps if moves_only(step)}

    def passes(self, step: Step) -> list[Made]:
        """Return the values a step passes on."""
        if step.number in self._moving:
            return [step.values[0]]
        return combines(step)

    def reading_site(self, step: Step) -> Site | None:
        """Return where a step multiplies what it reads by a matrix; attention does where it reads one value alone."""
        mapping, alone = self.maps.get(step.number), len(set(step.values)) == 1
        return mapping.reads if mapping and (alone or not isinstance(step.module, nn.MultiheadAttention)) else None

    def readers_of(self, value: Made) -> list[Step]:
        """Return the steps that read one value."""
        return [step for step in self.graph.steps if value in set(step.values)]

    def origin(self, step: Step) -> Norm | None:
        """Return the normalizer whose output a step reads, through steps that only move it."""
        while True:
            sources = set(step.values)
            if len(sources) != 1 or step.values[0].step < 0:
                return None
            step = self.graph.steps[step.values[0].step]
            if step.number in self.norms:
                return self.norms[step.number]
            if step.number not in self._moving:
                return None

    def streams(self, *, through_norms: bool) -> list[Stream]:
        """Return the joined values that a normalizer reads, the one with most of them first."""
        parent: dict[Made, Made] = {}

        def root(value: Made) -> Made:
            while parent.setdefault(value, value) != value:
                value = parent[value]
            return value

        def join(first: Made, others: Iterable[Made]) -> None:
            for other in others:
                parent[root(other)] = root(first)

        for step in self.graph.steps:
            join(Made(step.number), self.passes(step))
            if through_norms and step.number in self.norms:
                join(Made(step.number), step.values)
            for value in step.values:
                root(value)
        groups: dict[Made, set[Made]] = {}
        for value in list(parent):
            groups.setdefault(root(value), set()).add(value)
        streams = [self._describe(values, through_norms) for values in groups.values()]
        return sorted((s for s in streams if s.norms), key=lambda stream: -len(stream.norms))

    def _describe(self, values: set[Made], through_norms: bool) -> Stream:
        stream = Stream(values)
        for step in self.graph.steps:
            taken = values & set(step.values)
            made = Made(step.number) in values
            normal = step.number in self.norms
            if (not taken and not made) or (self.passes(step) and not (normal and not through_norms)):
                continue
            if step.module is not None and self.graph.times(step.name) > 1:
                stream.problems.append((step.name, "it is called several times"))
                continue
            mapping, reads = self.maps.get(step.number), self.reading_site(step)
            if taken and normal:
                stream.norms[step.name] = self.norms[step.number]
            elif taken and reads is not None:
                stream.readers[step.name] = reads
            elif taken:
                stream.problems.append((step.name, f"it reads the stream and is no linear map ({step.kind})"))
            if made and not (normal and through_norms):
                if step.number in self.tables or mapping is not None:
                    stream.writers[step.name] = self.tables.get(step.number) or mapping.writes  # type: ignore[union-attr]
                else:
                    kind = "normalizer" if normal else step.kind
                    stream.problems.append((step.name, f"it writes into the stream and is no linear map ({kind})"))
        for value in values:
            if value.step < 0:
                stream.problems.append(("(input)", "the model's input is part of the stream"))
            elif value.place:
                stream.problems.append((self.graph.steps[value.step].name, "it makes several values"))
        if any(end in values for end in self.graph.ends):
            stream.problems.append(("(output)", "the stream is an output of the model"))
        return stream


def fold_gains(patient: Patient, anatomy: Anatomy, *, untie: bool, only: Collection[str] | None = None) -> None:
    """Put gains and shifts of normalizers over the last axis into the maps that read them, or refuse."""
    for number, norm in anatomy.norms.items():
        step = anatomy.graph.steps[number]
        if norm.is_plain() or (only is not None and step.name not in only):
            continue
        readers = _reading_maps(anatomy, step)
        if isinstance(readers, str):
            patient.refuse(step.name, readers)
            continue
        tied = [name for name in readers if is_tied(patient.model, name)]
        if tied and not untie:
            patient.refuse(step.name, f"the weight of {tied[0]} is tied to another layer; untie=True gives it its own")
            continue
        scale, shift = norm.scale(), getattr(norm.module, norm.shift).detach() if norm.shift else None
        lacking = [name for name, site in readers.items() if site.offset is None and not site.grows]
        if shift is not None and bool(shift.any()) and lacking:
            patient.refuse(step.name, f"{lacking[0]} has no bias and cannot get one")
            continue
        for name in tied:
            give_own_weight(patient.model, readers[name])
        for site in readers.values():
            matrix, offset = site.matrix, site.offset
            added = None if shift is None or not bool(shift.any()) else matrix @ shift
            if added is not None and offset is not None:
                added = offset.detach() + added
            site.set(matrix if scale is None else matrix * scale, added)
        norm.reset()
        what = "gain" if shift is None else "gain and shift"
        patient.did(step.name, f"{what} folded into {', '.join(readers)}")


def give_own_weight(model: nn.Module, site: Site) -> None:
    """Cut a tie; Hugging Face's config is told, or loading would tie again."""
    set_parameter(site.module, site.weight, site.parameter)
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False


def _reading_maps(anatomy: Anatomy, step: Step) -> dict[str, Site] | str:
    """Return the maps that read a normalizer's output, and nothing else does; or who stands in the way."""
    graph = anatomy.graph
    if graph.times(step.name) > 1:
        return "it is called several times"
    readers: dict[str, Site] = {}
    waiting = [Made(step.number)]
    while waiting:
        value = waiting.pop()
        if value in graph.ends:
            return "its output is an output of the model"
        for reader in anatomy.readers_of(value):
            if reader.number in anatomy.maps and graph.times(reader.name) > 1:
                return f"{reader.name}, which reads it, is called several times"
            if (site := anatomy.reading_site(reader)) is not None:
                readers[reader.name] = site
            elif reader.number in anatomy._moving and anatomy.passes(reader)[0] == value:
                waiting.append(Made(reader.number))
            else:
                what = "added to other values" if reader.kind in _SUMS else f"read by {reader.name}, no linear map"
                return f"its output is {what}"
    return readers or "nothing reads it"
