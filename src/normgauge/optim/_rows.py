"""Parameters as rows: views where the memory allows it, packed copies where many small tensors gain from one call.

A block is what an update works on: two-dimensional tensors of equal shape, one row per sphere, about `CHUNK` elements
large so that the passes of an update stay in the cache. Big tensors are cut into blocks of rows and changed in place;
small ones of equal row length are gathered into one block and written back.

Row sums, and arithmetic on one number per row, are numpy's on a CPU, where a call costs a third of torch's: `vecdot`
runs BLAS's dot product over the rows without writing the products, in half the time of torch's norm. Elsewhere the same
formulas run on tensors of shape `[rows, 1]`; numpy before 2.0 has no `vecdot` and gets torch's sums.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normgauge.errors import InputError

CHUNK = 1 << 19  # elements: of 64k to 2M the fastest or next to it; less costs calls, more leaves a cache of 32 MiB
SMALL = 1 << 15  # below this many elements the calls cost more than the copies

#: A number per row, `[rows, 1]`: a numpy array for rows on a CPU, a tensor elsewhere.
Column = Any

_ON_HOST = (torch.float32, torch.float64)


def numbers(tensor: Tensor) -> Any:
    """Return what numpy or torch calculates with: the same memory as an array, or the tensor itself."""
    return tensor.numpy() if tensor.device.type == "cpu" and tensor.dtype in _ON_HOST else tensor


def sums(a: Any, b: Any) -> Column:
    """Return `<a, b>` per row of two arrays or two tensors."""
    if isinstance(a, Tensor):
        return (a * b).sum(1, keepdim=True)
    if hasattr(np, "vecdot"):
        return np.vecdot(a, b)[:, None]
    return torch.linalg.vecdot(torch.from_numpy(a), torch.from_numpy(b)).unsqueeze(1).numpy()


def column(values: Column) -> Tensor:
    """Return a column as a tensor."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


def functions(values: Column) -> Any:
    """Return the module with `sqrt`, `cos`, `where` and the like for a column."""
    return torch if isinstance(values, Tensor) else np


def vanishes(values: Column, bound: float) -> bool:
    """Tell whether all numbers are within a bound; `False` where they would have to be fetched from a device."""
    return not isinstance(values, Tensor) and bool(values.max() <= bound and values.min() >= -bound)


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
    """One parameter with its number of rows, and the tensors and row numbers of its state."""

    param: Tensor
    rows: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Tensor]

    @property
    def width(self) -> int:
        return self.param.numel() // self.rows


@dataclass
class Block:
    """Rows to update: `w` and the tensors of `state` are changed in place, `grad` must not be."""

    w: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    numbers: dict[str, Tensor]
    pool: Pool
    owners: int = 1  # the number of tensors in the block
    last: bool = True  # of its tensors' blocks; packed memory is reused by the block after it
    copies: tuple[tuple[list[Tensor], Tensor, list[Tensor]], ...] = ()  # tensors, their rows, and those as tensors
    arrays: dict[str, Any] = field(default_factory=dict)  # what `rows` and `columns` keep

    @property
    def radius(self) -> Column:
        return self.rows("radius")

    def rows(self, name: str) -> Any:
        """Return `w`, a tensor of the state or its row numbers as an array (on a CPU; else the tensor)."""
        array = self.arrays.get(name)
        if array is None:
            tensor = self.w if name == "w" else self.numbers[name] if name in self.numbers else self.state[name]
            array = self.arrays[name] = numbers(tensor)
        return array

    def scratch(self, name: str = "scratch") -> Tensor:
        """Return memory of the block's shape for a temporary."""
        return self.pool.take(name, tuple(self.w.shape), self.w)

    def write(self) -> None:
        """Bring packed rows back to the parameters and their states; in-place blocks need nothing."""
        for tensors, _, parts in self.copies:
            torch._foreach_copy_(tensors, parts)


def orient(tensor: Tensor, granularity: str | int) -> Tensor:
    """Return a view whose first axis is cut into spheres: the second axis of the tensor for "column"."""
    if granularity != "column":
        return tensor
    if tensor.ndim < 2:
        got = f"shape {tuple(tensor.shape)}"
        raise InputError("granularity", "columns need two axes", got, "Pass 'row' or 'tensor'")
    return tensor.transpose(0, 1)


def count_rows(param: Tensor, granularity: str | int) -> int:
    """Return how many spheres a parameter has: one per slice of its first axis, one, or a number of equal blocks."""
    if granularity == "tensor" or param.ndim == 0:
        return 1
    if granularity in ("row", "column"):
        return param.shape[0]
    if not isinstance(granularity, int) or granularity < 1 or param.shape[0] % granularity:
        rule = f"a parameter of shape {tuple(param.shape)} divides into blocks of its first axis"
        step = "Pass 'row', 'column', 'tensor', or a divisor of the first axis"
        raise InputError("granularity", rule, repr(granularity), step)
    return granularity


def as_rows(tensor: Tensor, rows: int) -> Tensor | None:
    """Return the memory of a tensor as `[rows, width]`, or `None` where rows are not contiguous pieces of it."""
    if tensor.is_contiguous():
        return tensor.view(rows, -1)
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    # with channels last the first axis is still the slowest, so a row is one piece in another order
    if layout is not None and tensor.is_contiguous(memory_format=layout):
        width = tensor.numel() // rows
        return tensor.as_strided((rows, width), (width, 1))
    return None


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which rows are summed: half precisions in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def lay_side_by_side(tensors: list[Tensor]) -> list[Tensor]:
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


def adjacent_rows(tensors: list[Tensor], columns: int) -> Tensor | None:
    """Return tensors of equal shape that lie next to each other as rows of their own memory, or `None`."""
    first = tensors[0]
    size, start, step = first.numel(), first.data_ptr(), first.numel() * first.element_size()
    if any(t.data_ptr() != start + i * step or not t.is_contiguous() for i, t in enumerate(tensors)):
        return None
    room = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    if room < size * len(tensors):  # neighbours by chance, each with memory of its own
        return None
    return first.detach().as_strided((size * len(tensors) // columns, columns), (columns, 1))


class Plan:
    """Blocks over the rows of some tensors, kept from step to step: only the gradients are new in each.

    `pool` is memory for temporaries; small tensors of equal shape are joined where `pack` says so.
    """

    def __init__(self, items: Sequence[Item], pool: Pool, *, pack: bool = True) -> None:
        self.pointers = [item.param.data_ptr() for item in items]
        self.states: dict[str, list[Tensor]] = {}  # for its keeper, to tell whether it still fits
        self._pool = pool
        self._parts: list[tuple[list[int], list[Item], list[Block]]] = []
        buckets: dict[Any, list[int]] = {}
        for number, item in enumerate(items):
            small = pack and item.param.numel() <= SMALL
            key = (item.rows, item.param.shape, item.param.dtype, item.param.device) if small else number
            buckets.setdefault(key, []).append(number)
        for chosen in buckets.values():
            members = [items[number] for number in chosen]
            views = _views(members[0]) if len(members) == 1 else None
            if views is not None:
                self._parts.append((chosen, members, _slices(members[0], views, pool)))
                continue
            most = max(1, CHUNK // max(1, members[0].param.numel()))
            for start in range(0, len(members), most):
                few = members[start : start + most]
                self._parts.append((chosen[start : start + most], few, [_pack(few, pool)]))

    def blocks(self, grads: list[Tensor]) -> Iterator[Block]:
        """Yield the blocks, with these gradients."""
        for chosen, members, parts in self._parts:
            if parts[0].copies or len(chosen) > 1:
                (block,) = parts
                for tensors, rows, _ in block.copies:
                    _gather(tensors, rows)
                block.grad = self._pool.take("grad", tuple(block.w.shape), block.w)
                _gather([grads[number] for number in chosen], block.grad)
            else:
                grad, param = grads[chosen[0]], members[0].param
                if grad.stride() != param.stride() or grad.dtype != param.dtype:
                    grad = torch.empty_like(param).copy_(grad)  # elements must meet their own gradient
                flat = as_rows(grad.detach(), members[0].rows)
                if len(parts) == 1 or flat is None:  # never `None`: the layout is the parameter's, which has rows
                    parts[0].grad = grad if flat is None else flat
                else:
                    for block, part in zip(parts, flat.split(parts[0].w.shape[0]), strict=True):
                        block.grad = part
            yield from parts


def _gather(tensors: list[Tensor], rows: Tensor) -> None:
    torch.stack(tensors, out=rows.view(len(tensors), *tensors[0].shape))  # half precisions become float32 on the way


def _views(item: Item) -> list[Tensor] | None:
    everything = [item.param, *item.tensors.values()]
    strides, dtype = item.param.stride(), working_dtype(item.param.dtype)
    if any(tensor.stride() != strides or tensor.dtype != dtype for tensor in everything):
        return None  # elements would not meet their own state, or are too coarse to sum
    views = [as_rows(tensor, item.rows) for tensor in everything]
    return None if any(view is None for view in views) else [view for view in views if view is not None]


def _slices(item: Item, views: list[Tensor], pool: Pool) -> list[Block]:
    step = max(1, CHUNK // max(1, item.width))
    views = views + [value.view(item.rows, 1) for value in item.numbers.values()]
    parts = list(zip(*(view.split(step) for view in views), strict=True))
    blocks = []
    for number, (w, *rest) in enumerate(parts):
        named = dict(zip([*item.tensors, *item.numbers], rest, strict=True))
        values = {key: named.pop(key) for key in item.numbers}
        blocks.append(Block(w, w, named, values, pool, last=number == len(parts) - 1))
    return blocks


def _pack(bucket: list[Item], pool: Pool) -> Block:
    first, width = bucket[0].param, bucket[0].width
    dtype = working_dtype(first.dtype)
    copies: list[tuple[list[Tensor], Tensor, list[Tensor]]] = []

    def lay(name: str, tensors: list[Tensor], columns: int) -> Tensor:
        exact = all(tensor.dtype == dtype for tensor in tensors)
        rows = adjacent_rows(tensors, columns) if exact else None
        if rows is None:
            size = sum(tensor.numel() for tensor in tensors)
            rows = pool.take(name, (size // columns, columns), first.new_empty((), dtype=dtype))
            copies.append((tensors, rows, list(rows.view(len(tensors), *tensors[0].shape).unbind(0))))
        return rows

    w = lay("w", [item.param for item in bucket], width)
    state = {key: lay(key, [item.tensors[key] for item in bucket], width) for key in bucket[0].tensors}
    values = {key: lay(key, [item.numbers[key] for item in bucket], 1) for key in bucket[0].numbers}
    return Block(w, w, state, values, pool, owners=len(bucket), copies=tuple(copies))
