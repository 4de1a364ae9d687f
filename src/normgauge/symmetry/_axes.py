"""Axes: which are viewed, split, joined and grouped in a traced forward, and how an index can run over a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any

from torch import Tensor

from normgauge.errors import DataError
from normgauge.network import Operations

Shape = tuple[int, ...]
_MOST_VIEWS = 6  # refined views per axis; more only adds columns that are never null
FEWEST_VALUES = 4  # per channel; with two, batch normalization gives +-1 whatever the weights are
_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_with_update")


@dataclass
class Hints:
    """What a trace suggests about axes; wrong suggestions cost columns, missing ones cost completeness only.

    Attributes:
        factors: size -> factorizations by views, e.g. 768 -> {(12, 64)}.
        pieces: size -> `(start, length)` of slices and parts of concatenations.
        convolutions: shape of a kernel -> groups.
        few: the batch normalization with too few values per channel, and their number.
    """

    factors: dict[int, set[Shape]] = field(default_factory=dict)
    pieces: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    convolutions: dict[Shape, int] = field(default_factory=dict)
    few: tuple[str, int] | None = None

    def kernel_axes(self, shape: Shape) -> range:
        """Return the spatial axes of a convolution's kernel: they carry no channel."""
        return range(2, len(shape)) if shape in self.convolutions else range(0)

    def conv_groups(self, shape: Shape) -> int:
        return self.convolutions.get(shape, 1)

    def factor(self, size: int, factors: Sequence[int]) -> None:
        """Note that an axis was seen as several."""
        proper = tuple(f for f in factors if f > 1)
        if len(proper) > 1 and math.prod(proper) == size:
            self.factors.setdefault(size, set()).add(proper)

    def piece(self, size: int, start: int, length: int) -> None:
        """Note that a part of an axis was used alone."""
        if 0 < length < size:
            self.pieces.setdefault(size, set()).add((start, length))
            if size % length == 0 and start % length == 0:
                self.factor(size, (size // length, length))


def note(hints: Hints, name: str, args: Sequence[Any], result: Any) -> None:
    if name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        for many, few in align_axes(tuple(args[0].shape), tuple(result.shape)):
            if len(few) == 1:
                hints.factor(few[0], many)
            elif len(many) == 1:
                hints.factor(many[0], few)
            elif len(many) == len(few) == 2:  # (batch, heads * d) -> (batch * heads, d), or back
                for (a, b), (c, d) in ((many, few), (few, many)):
                    if c % a == 0:
                        hints.factor(b, (c // a, d))
    elif name in ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"):
        axis = _axis(args, 2, args[0].ndim)
        _note_pieces(hints, args[0].shape[axis], [part.shape[axis] for part in result])
    elif name == "cat":
        axis = _axis(args, 1, result.ndim)
        parts = [part.shape[axis] for part in args[0] if part.ndim == result.ndim]
        _note_pieces(hints, result.shape[axis], parts)
    elif name == "slice" and isinstance(args[0], Tensor):
        _note_slice(hints, args)
    elif name == "convolution":
        hints.convolutions[tuple(args[1].shape)] = int(args[8])
    elif name == "native_group_norm":
        hints.factor(int(args[4]), (int(args[6]), int(args[4]) // int(args[6])))
    elif name in _BATCH_NORMS:
        _note_batch(hints, name, args)


def _note_batch(hints: Hints, name: str, args: Sequence[Any]) -> None:
    training = name == "_batch_norm_with_update" or any(a is True for a in args[5:6])
    count = args[0].numel() // max(1, args[0].shape[1])
    if training and count < FEWEST_VALUES and (hints.few is None or count < hints.few[1]):
        hints.few = (f"a batch normalization of {args[0].shape[1]} channels", count)


def _note_pieces(hints: Hints, size: int, lengths: Iterable[int]) -> None:
    start = 0
    for length in lengths:
        hints.piece(size, start, length)
        start += length


def _note_slice(hints: Hints, args: Sequence[Any]) -> None:
    axis = _axis(args, 1, args[0].ndim)
    size = args[0].shape[axis]
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    stop = args[3] if len(args) > 3 and args[3] is not None else size
    step = args[4] if len(args) > 4 else 1
    if step > 1:
        hints.factor(size, (size // step, step))
    elif args[0].ndim > 1:
        start, stop = start % size if start < 0 else start, min(size, stop + size if stop < 0 else stop)
        hints.piece(size, start, stop - start)


def _axis(args: Sequence[Any], position: int, ndim: int) -> int:
    return (args[position] if len(args) > position else 0) % max(1, ndim)


def align_axes(first: Shape, second: Shape) -> list[tuple[Shape, Shape]]:
    """Group the axes of two shapes of equal size into runs with equal products.

    Examples:
        >>> align_axes((2, 5, 12), (10, 3, 4))
        [((2, 5), (10,)), ((12,), (3, 4))]
    """
    a = [s for s in first if s != 1]
    b = [s for s in second if s != 1]
    groups: list[tuple[Shape, Shape]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        left, right = [a[i]], [b[j]]
        i, j = i + 1, j + 1
        while math.prod(left) != math.prod(right):
            if math.prod(left) < math.prod(right):
                if i == len(a):
                    return groups
                left.append(a[i])
                i += 1
            else:
                if j == len(b):
                    return groups
                right.append(b[j])
                j += 1
        if len(left) + len(right) > 2:
            groups.append((tuple(left), tuple(right)))
    return groups


def check_enough_samples(hints: Hints, mode: str) -> None:
    """Raise when batch statistics come from so few values that they hide the weights.

    Raises:
        DataError: naming the layer's width and the number of values per channel.
    """
    if hints.few is not None:
        raise DataError(
            f"symmetries in mode={mode!r}",
            f"batch statistics need at least {FEWEST_VALUES} values per channel to tell symmetries apart",
            f"{hints.few[1]} in {hints.few[0]}",
            "Use a larger batch, or mode='eval'",
        )


def trace(forward: Callable[[], object]) -> Hints:
    """Run a forward and collect hints; a failed trace gives none and costs completeness, never correctness."""
    hints = Hints()
    try:
        with Operations(lambda name, args, result: note(hints, name, args, result)):
            forward()
    except (RuntimeError, TypeError, NotImplementedError, AttributeError, IndexError):
        return Hints()
    return hints


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
    return Slot(name, shape if shape else (1,), ())


def element_slot(name: str, shape: Shape) -> Slot:
    """Return the slot whose slices are the single entries."""
    view = shape if shape else (1,)
    return Slot(name, view, tuple(range(len(view))))
