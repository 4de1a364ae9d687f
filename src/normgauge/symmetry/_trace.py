"""One traced forward: which axes are viewed, split, joined and grouped, so that finer indices can be tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from normgauge.errors import DataError
from normgauge.network import Operations

Shape = tuple[int, ...]
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
        """Return the groups of a convolution with a kernel of this shape."""
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
    """Add what one operation suggests."""
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
