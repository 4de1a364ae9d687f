"""Parameters as rows: views where the memory allows it, packed copies where many small tensors gain from one call.

A block is what an update works on: two-dimensional tensors of equal shape, one row per sphere, about `CHUNK` elements
large so that the passes of an update stay in the cache. Big tensors are cut into blocks of rows and changed in place;
small ones of equal row length are gathered into one block and written back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import InputError, explain
from normgauge.optim._sums import Column, numbers

CHUNK = 1 << 19  # elements; 2 MiB of float32 per tensor was the fastest of 64k to 1M on a core with 1 MiB of L2
SMALL = 1 << 15  # below this many elements the calls cost more than the copies


class Pool:
    """Memory for temporaries that an optimizer keeps: fresh pages for each block cost more than the arithmetic."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return uninitialized memory of a shape; the next call with the same name reuses it."""
        size = math.prod(shape)
        key = (name, like.dtype, like.device)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            flat = self._flat[key] = torch.empty(max(size, CHUNK), dtype=like.dtype, device=like.device)
        return flat[:size].view(shape)


@dataclass
class Item:
    """One parameter with its gradient, its number of rows, and the tensors and row numbers of its state."""

    param: Tensor
    grad: Tensor
    rows: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Tensor]

    @property
    def width(self) -> int:
        """The length of a row."""
        return self.param.numel() // self.rows


@dataclass
class Block:
    """Rows to update: `w` and the tensors of `state` are changed in place, `grad` must not be."""

    w: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    numbers: dict[str, Tensor]
    items: list[Item]
    pool: Pool
    last: bool = True  # of its tensors' blocks; packed memory is reused by the block after it
    copies: tuple[tuple[list[Tensor], Tensor], ...] = ()  # what to write back, and where

    @property
    def owners(self) -> int:
        """The number of tensors in the block."""
        return len(self.items)

    @property
    def radius(self) -> Column:
        """The radius of each row."""
        return numbers(self.numbers["radius"])

    def scratch(self, name: str = "scratch") -> Tensor:
        """Return memory of the block's shape for a temporary."""
        return self.pool.take(name, tuple(self.w.shape), self.w)

    def write(self) -> None:
        """Bring packed rows back to the parameters and their states; in-place blocks need nothing."""
        for targets, rows in self.copies:
            torch._foreach_copy_(targets, list(rows.view(len(targets), *targets[0].shape).unbind(0)))


def facing(tensor: Tensor, granularity: str | int) -> Tensor:
    """Return a view whose first axis is cut into spheres: the second axis of the tensor for "column"."""
    if granularity != "column":
        return tensor
    if tensor.ndim < 2:
        raise InputError(
            explain("granularity", "columns need two axes", f"shape {tuple(tensor.shape)}", "Pass 'row' or 'tensor'")
        )
    return tensor.transpose(0, 1)


def count_rows(param: Tensor, granularity: str | int) -> int:
    """Return how many spheres a parameter has: one per slice of its first axis, one, or a number of equal blocks.

    Raises:
        InputError: when the first axis does not divide into that many blocks.
    """
    if granularity == "tensor" or param.ndim == 0:
        return 1
    if granularity in ("row", "column"):
        return param.shape[0]
    if not isinstance(granularity, int) or granularity < 1 or param.shape[0] % granularity:
        raise InputError(
            explain(
                "granularity",
                f"a parameter of shape {tuple(param.shape)} divides into blocks of its first axis",
                repr(granularity),
                "Pass 'row', 'column', 'tensor', or a divisor of the first axis",
            )
        )
    return granularity


def as_rows(tensor: Tensor, rows: int) -> Tensor | None:
    """Return the memory of a tensor as `[rows, width]`, or `None` where rows are not contiguous pieces of it."""
    if tensor.is_contiguous():
        return tensor.view(rows, -1)
    channels_last = (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)) or (
        tensor.ndim == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)
    )
    if channels_last:  # the first axis is still the slowest, so a row is one piece in another order
        width = tensor.numel() // rows
        return tensor.as_strided((rows, width), (width, 1))
    return None


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which rows are summed: half precisions in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def beside(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors, small ones of equal kind moved next to each other, so that a block takes them as they lie."""
    buckets: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel() <= SMALL and tensor.is_contiguous():
            buckets.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(number)
    placed = list(tensors)
    for chosen in buckets.values():
        for number, tensor in zip(chosen, torch.stack([tensors[i] for i in chosen]).unbind(0), strict=True):
            placed[number] = tensor
    return placed


def joined(tensors: list[Tensor], columns: int) -> Tensor | None:
    """Return tensors of equal shape that lie next to each other as rows of their own memory, or `None`."""
    first = tensors[0]
    size, start, step = first.numel(), first.data_ptr(), first.numel() * first.element_size()
    if any(t.data_ptr() != start + i * step or not t.is_contiguous() for i, t in enumerate(tensors)):
        return None
    room = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    if room < size * len(tensors):  # neighbours by chance, each with memory of its own
        return None
    return first.detach().as_strided((size * len(tensors) // columns, columns), (columns, 1))


def blocks(items: Sequence[Item], pool: Pool, *, pack: bool = True) -> Iterator[Block]:
    """Yield blocks over all rows of the items; `pack` joins small tensors of equal shape."""
    buckets: dict[Any, list[Item]] = {}
    for item in items:
        small = pack and item.param.numel() <= SMALL
        key = (item.rows, item.param.shape, item.param.dtype, item.param.device) if small else id(item)
        buckets.setdefault(key, []).append(item)
    for bucket in buckets.values():
        views = _views(bucket[0]) if len(bucket) == 1 else None
        if views is not None:
            yield from _slices(bucket[0], views, pool)
            continue
        most = max(1, CHUNK // max(1, bucket[0].param.numel()))
        for start in range(0, len(bucket), most):
            yield _packed(bucket[start : start + most], pool)


def _views(item: Item) -> list[Tensor] | None:
    everything = [item.param.detach(), item.grad.detach(), *item.tensors.values()]
    strides, dtype = item.param.stride(), working_dtype(item.param.dtype)
    if any(tensor.stride() != strides or tensor.dtype != dtype for tensor in everything):
        return None  # elements would not meet their own gradient, or are too coarse to sum
    views = [as_rows(tensor, item.rows) for tensor in everything]
    return None if any(view is None for view in views) else [view for view in views if view is not None]


def _slices(item: Item, views: list[Tensor], pool: Pool) -> Iterator[Block]:
    step = max(1, CHUNK // max(1, item.width))
    keys = [*item.tensors, *item.numbers]
    views = views + [value.view(item.rows, 1) for value in item.numbers.values()]
    if item.rows <= step:
        parts = [tuple(views)]
    else:
        parts = list(zip(*(view.split(step) for view in views), strict=True))
    for number, (w, grad, *rest) in enumerate(parts):
        named = dict(zip(keys, rest, strict=True))
        numbers_ = {key: named.pop(key) for key in item.numbers}
        yield Block(w, grad, named, numbers_, [item], pool, number == len(parts) - 1)


def _packed(bucket: list[Item], pool: Pool) -> Block:
    first, width = bucket[0].param, bucket[0].width
    dtype = working_dtype(first.dtype)
    copies: list[tuple[list[Tensor], Tensor]] = []

    def gather(name: str, tensors: list[Tensor], columns: int, *, write: bool = True) -> Tensor:
        exact = all(tensor.dtype == dtype for tensor in tensors)
        rows = joined(tensors, columns) if exact else None
        if rows is not None:
            return rows
        if exact:
            rows = torch.stack(tensors, out=pool.take(name, (len(tensors), *tensors[0].shape), first))
        else:
            rows = torch.stack([tensor.to(dtype) for tensor in tensors])
        rows = rows.view(-1, columns)
        if write:
            copies.append((tensors, rows))
        return rows

    w = gather("w", [item.param.detach() for item in bucket], width)
    grad = gather("grad", [item.grad.detach() for item in bucket], width, write=False)
    state = {key: gather(key, [item.tensors[key] for item in bucket], width) for key in bucket[0].tensors}
    row_numbers = {
        key: gather(key, [item.numbers[key] for item in bucket], 1, write=key != "radius") for key in bucket[0].numbers
    }
    return Block(w, grad, state, row_numbers, bucket, pool, copies=tuple(copies))
