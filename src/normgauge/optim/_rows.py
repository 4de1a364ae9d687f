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
    packed: bool
    pool: Pool
    last: bool = True  # of its tensors' blocks; packed memory is reused by the block after it

    @property
    def owners(self) -> int:
        """The number of tensors in the block."""
        return len(self.items)

    def scratch(self, name: str = "scratch") -> Tensor:
        """Return memory of the block's shape for a temporary."""
        return self.pool.take(name, tuple(self.w.shape), self.w)

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `<a, b>` per row without fresh memory for the products."""
        return torch.mul(a, b, out=self.scratch("products")).sum(1, keepdim=True)

    def write(self) -> None:
        """Bring packed rows back to the parameters and their states; in-place blocks need nothing."""
        if not self.packed:
            return
        _scatter([item.param for item in self.items], self.w)
        for key, value in self.state.items():
            _scatter([item.tensors[key] for item in self.items], value)
        for key, value in self.numbers.items():
            if key != "radius":  # which no step changes
                _scatter([item.numbers[key] for item in self.items], value)


def _scatter(targets: list[Tensor], joined: Tensor) -> None:
    torch._foreach_copy_(targets, list(joined.view(len(targets), *targets[0].shape).unbind(0)))


def count_rows(param: Tensor, granularity: str | int) -> int:
    """Return how many spheres a parameter has: one per slice of its first axis, one, or a number of equal blocks.

    Raises:
        InputError: when the first axis does not divide into that many blocks.
    """
    if granularity == "tensor" or param.ndim == 0:
        return 1
    count = param.shape[0] if granularity == "row" else int(granularity)
    if count < 1 or param.shape[0] % count:
        raise InputError(
            explain(
                "granularity",
                f"a parameter of shape {tuple(param.shape)} divides into blocks of its first axis",
                repr(granularity),
                "Pass 'row', 'tensor', or a divisor of the first axis",
            )
        )
    return count


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


def blocks(items: Sequence[Item], pool: Pool, *, pack: bool = True) -> Iterator[Block]:
    """Yield blocks over all rows of the items; `pack` joins small tensors of equal row length."""
    buckets: dict[Any, list[Item]] = {}
    for item in items:
        small = pack and item.param.numel() <= SMALL
        views = None if small or working_dtype(item.param.dtype) != item.param.dtype else _views(item)
        if views is None:
            key = (item.rows, item.param.shape, item.param.dtype, item.param.device) if small else id(item)
            buckets.setdefault(key, []).append(item)
        else:
            yield from _slices(item, views, pool)
    for bucket in buckets.values():
        most = max(1, CHUNK // max(1, bucket[0].param.numel()))
        for start in range(0, len(bucket), most):
            yield _packed(bucket[start : start + most], pool)


def _views(item: Item) -> list[Tensor] | None:
    everything = [item.param.detach(), item.grad, *item.tensors.values()]
    strides = item.param.stride()
    if any(tensor.stride() != strides or tensor.dtype != item.param.dtype for tensor in everything):
        return None  # elements would not meet their own gradient
    views = [as_rows(tensor, item.rows) for tensor in everything]
    return None if any(view is None for view in views) else [view for view in views if view is not None]


def _slices(item: Item, views: list[Tensor], pool: Pool) -> Iterator[Block]:
    numbers = {key: value.view(item.rows, 1) for key, value in item.numbers.items()}
    step = max(1, CHUNK // max(1, item.width))
    for start in range(0, item.rows, step):
        w, grad, *rest = (view[start : start + step] for view in views)
        part = {key: value[start : start + step] for key, value in numbers.items()}
        yield Block(
            w, grad, dict(zip(item.tensors, rest, strict=True)), part, [item], False, pool, start + step >= item.rows
        )


def _packed(bucket: list[Item], pool: Pool) -> Block:
    first = bucket[0].param
    dtype, shape = working_dtype(first.dtype), (bucket[0].rows * len(bucket), bucket[0].width)

    def gather(name: str, tensors: list[Tensor], columns: int) -> Tensor:
        whole = (len(tensors), *tensors[0].shape)
        if {tensor.dtype for tensor in tensors} != {dtype}:
            return torch.stack([tensor.to(dtype) for tensor in tensors]).view(-1, columns)
        return torch.stack(tensors, out=pool.take(name, whole, first)).view(-1, columns)

    return Block(
        gather("w", [item.param for item in bucket], shape[1]),
        gather("grad", [item.grad for item in bucket], shape[1]),
        {key: gather(key, [item.tensors[key] for item in bucket], shape[1]) for key in bucket[0].tensors},
        {key: gather(key, [item.numbers[key] for item in bucket], 1) for key in bucket[0].numbers},
        bucket,
        True,
        pool,
    )
