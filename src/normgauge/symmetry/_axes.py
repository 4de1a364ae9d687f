"""Slots: the ways an index can run over a tensor (rows, columns, groups, heads, pieces of a concatenation)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from torch import Tensor

from normgauge.symmetry._trace import Hints

Shape = tuple[int, ...]
_MOST_VIEWS = 6  # refined views per axis; more only adds columns that are never null


@dataclass(frozen=True)
class Slot:
    """An index over the slices of a tensor: narrow it, view it, keep some axes; the kept ones are the index.

    Args:
        name: the parameter.
        view: the shape the (narrowed) parameter is viewed as.
        keep: the axes of the view that form the index; `()` means the whole tensor.
        narrow: `(axis, start, length)` of the part that is meant, or `None` for all of it.
        first: the shape the parameter is viewed as before narrowing, or `None` for its own.
    """

    name: str
    view: Shape
    keep: tuple[int, ...]
    narrow: tuple[int, int, int] | None = None
    first: Shape | None = None

    @property
    def size(self) -> int:
        """The number of slices."""
        return math.prod(self.view[k] for k in self.keep)

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return the part of the tensor that is meant, in the view's shape."""
        if self.narrow is None:
            return tensor.reshape(self.view)
        return (tensor if self.first is None else tensor.reshape(self.first)).narrow(*self.narrow).reshape(self.view)

    def gather(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over each slice: one number per index."""
        drop = [axis for axis in range(len(self.view)) if axis not in self.keep]
        part = self.view_of(tensor)
        return (part.sum(drop) if drop else part).reshape(-1)

    def spread(self, values: Tensor, shape: Shape, outside: float = 0.0) -> Tensor:
        """Write one number per index onto the tensor's shape, with `outside` where the slot does not reach."""
        kept = [self.view[axis] if axis in self.keep else 1 for axis in range(len(self.view))]
        inner = values.reshape(kept).expand(self.view)
        if self.narrow is None:
            return inner.reshape(shape)
        result = values.new_full(self.first or shape, outside)
        part = result.narrow(*self.narrow)
        part.copy_(inner.reshape(part.shape))
        return result.reshape(shape)

    @cache  # noqa: B019 - slots are few and small
    def along(self, shape: Shape) -> tuple[int, Slot] | None:
        """Return the one axis of the tensor that the index runs over, and the slot of the sums over all other axes."""
        for axis in range(len(shape)):
            after = len(shape) - axis - 1
            spans = [range(axis, len(view) - after) for view in (self.view, self.first or shape)]
            cut = [(*view[:axis], *view[len(view) - after :]) for view in (self.view, self.first or shape)]
            inside = set(self.keep) <= set(spans[0]) and (self.narrow is None or self.narrow[0] in spans[1])
            if inside and cut[0] == cut[1] == (*shape[:axis], *shape[axis + 1 :]):
                view, first = (
                    tuple(v[k] for k in span) for v, span in zip((self.view, self.first or shape), spans, strict=True)
                )
                narrow = None if self.narrow is None else (self.narrow[0] - axis, *self.narrow[1:])
                return axis, Slot(self.name, view, tuple(k - axis for k in self.keep), narrow, first)
        return None

    @property
    def whole(self) -> bool:
        """Whether the index is trivial: the slice is the whole tensor."""
        return not self.keep and self.narrow is None

    def describe(self) -> str:
        """Say which slices are meant in a few letters: `[i, :]` for rows, `[8:16 i, :]` for part of the rows."""
        if self.whole:
            return ""
        marks = ["i" if axis in self.keep else ":" for axis in range(len(self.view))]
        if self.narrow is not None:
            axis, start, length = self.narrow
            if self.first is None:
                marks[axis] = f"{start}:{start + length}" + (" i" if axis in self.keep else "")
            else:
                marks.insert(axis, str(start))
        return f"[{', '.join(marks)}]"


def parameter_slots(name: str, shape: Shape, hints: Hints) -> Iterator[Slot]:
    """Yield the slots of one parameter that may carry a coupled symmetry, plain axes first."""
    kernel = hints.kernel_axes(shape)
    for axis, size in enumerate(shape):
        if size > 1 and axis not in kernel:
            yield Slot(name, shape, (axis,))
    groups = hints.conv_groups(shape)
    if groups > 1:
        view = (groups, shape[0] // groups, *shape[1:])
        yield Slot(name, view, (0,))
        if shape[1] > 1:
            yield Slot(name, view, (0, 2))
    yield from _pieces(name, shape, hints, kernel)
    for axis, size in enumerate(shape):
        for factors in () if axis in kernel else refinements(size, hints):
            yield from _packed_slots(name, (*shape[:axis], *factors, *shape[axis + 1 :]), axis, factors)
    for axis, size in enumerate(shape):
        for start, length in () if axis in kernel else [(0, size), *sorted(hints.pieces.get(size, ()))]:
            for factors in refinements(length, hints):
                view = (*shape[:axis], *factors, *shape[axis + 1 :])
                for keep in _subsets(axis, len(factors)):
                    yield Slot(name, view, keep, None if length == size else (axis, start, length))


def _pieces(name: str, shape: Shape, hints: Hints, kernel: range) -> Iterator[Slot]:
    """Yield the parts of axes that were sliced off or joined; they come first, so that sums of them come out last."""
    for axis, size in enumerate(shape):
        for start, length in () if axis in kernel else sorted(hints.pieces.get(size, ())):
            if length > 1:
                part = (*shape[:axis], length, *shape[axis + 1 :])
                yield Slot(name, part, (axis,), (axis, start, length))
                yield Slot(name, part, (), (axis, start, length))


def _packed_slots(name: str, view: Shape, axis: int, factors: Shape) -> Iterator[Slot]:
    """Yield the parts of an axis that packs two or three things (queries, keys, values; gates), wherever they lie."""
    for place, count in enumerate(factors):
        if count not in (2, 3):
            continue
        left = (*factors[:place], *factors[place + 1 :])
        rest = (*view[:axis], *left, *view[axis + len(factors) :])
        for number in range(count):
            narrow = (axis + place, number, 1)
            yield Slot(name, rest, tuple(range(axis, axis + len(left))), narrow, view)
            for keep in _subsets(axis, len(left)):
                yield Slot(name, rest, keep, narrow, view)


def _subsets(axis: int, count: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, count):
        for chosen in combinations(range(count), size):
            yield tuple(axis + c for c in chosen)


def refinements(size: int, hints: Hints) -> list[Shape]:
    """Return the finest factorizations of an axis that the traced reshapes suggest."""
    done: list[Shape] = []
    queue: list[Shape] = [(size,)]
    while queue and len(done) < _MOST_VIEWS:
        factors = queue.pop(0)
        finer = [
            (*factors[:k], *split, *factors[k + 1 :])
            for k, factor in enumerate(factors)
            for split in sorted(hints.factors.get(factor, ()))
            if len(factors) + len(split) <= 6
        ]
        if finer:
            queue.extend(item for item in finer if item not in queue)
        elif len(factors) > 1 and factors not in done:
            done.append(factors)
    return done


def shift_slots(name: str, shape: Shape, hints: Hints) -> Iterator[Slot]:
    """Yield the slots along which a constant may be added: every index with one averaged axis, or one kept axis."""
    views: list[Shape] = [shape]
    for axis, size in enumerate(shape):
        if axis not in hints.kernel_axes(shape):
            views.extend((*shape[:axis], *f, *shape[axis + 1 :]) for f in refinements(size, hints))
    pairs: set[tuple[Shape, tuple[int, ...]]] = set()
    for view in views:
        axes = [axis for axis, size in enumerate(view) if size > 1]
        for axis in axes:
            for keep in (tuple(a for a in axes if a != axis), (axis,)):
                if keep and len(keep) < len(axes) and (view, keep) not in pairs:
                    pairs.add((view, keep))
                    yield Slot(name, view, keep)


def whole_slot(name: str, shape: Shape) -> Slot:
    """Return the slot of the whole tensor."""
    return Slot(name, shape if shape else (1,), ())


def element_slot(name: str, shape: Shape) -> Slot:
    """Return the slot whose slices are the single entries."""
    view = shape if shape else (1,)
    return Slot(name, view, tuple(range(len(view))))
