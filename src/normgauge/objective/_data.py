"""Batches: tell one from many, refuse sources that cannot be read twice, weigh, move, fingerprint."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normgauge.errors import DataError
from normgauge.rng import Restore, preserved_rng, save_generator, save_global_states, seed_everything


def take(loader: Iterable[Any], count: int | None = None) -> list[Any]:
    """Materialise the first `count` batches of any source (all when `None`) as a list that can be read again and again.

    Examples:
        >>> take((n * n for n in range(10)), 3)
        [0, 1, 4]
    """
    if count is not None and count < 1:
        raise DataError("take", "count must be at least 1", str(count), "Ask for one batch or more")
    batches = list(islice(loader, count))
    if not batches:
        raise DataError("take", "the source must give at least one batch", "none", "Make a fresh iterator")
    return batches


class OwnStream:
    """Reads a source without moving anybody's random generators: every pass draws the numbers of the first.

    A DataLoader draws a seed for its workers from torch's global stream, or from its `generator`, at every pass;
    samplers and augmentations draw more. Global streams are seeded for a pass, generators that are attributes of the
    source, of its data set or of its samplers begin as at the first pass, and all are put back after every batch.
    """

    def __init__(self) -> None:
        self._first: list[Restore] | None = None

    def read(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield what the source gives."""
        with _put_back(source):
            self._first = _save_generators(source) if self._first is None else self._first
            seed_everything(0)
            for restore in self._first:
                restore()
            iterator = iter(source)
            here = [save_global_states(), *_save_generators(source)]
        while True:
            with _put_back(source):
                for restore in here:
                    restore()
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                here = [save_global_states(), *_save_generators(source)]
            yield batch


@contextmanager
def _put_back(source: Any) -> Iterator[None]:
    with preserved_rng():
        generators = _save_generators(source)
        try:
            yield
        finally:
            for restore in generators:
                restore()


def _save_generators(holder: Any, depth: int = 4) -> list[Restore]:
    """Save the generators among the attributes of an object, and of objects that are its attributes."""
    restore = save_generator(holder)
    if restore is not None:
        return [restore]
    if not depth or isinstance(holder, (Tensor, type, ModuleType)) or not hasattr(holder, "__dict__"):
        return []
    return [one for value in list(vars(holder).values()) for one in _save_generators(value, depth - 1)]


class Batches:
    """A source of batches that gives the same ones at every pass, and says so when it does not."""

    def __init__(
        self,
        data: Any,
        *,
        single: Callable[[Any], bool],
        check: Callable[[Any, int], None] | None = None,
        weight: Callable[[Any], float] | None = None,
    ) -> None:
        """Wrap `data`; `single` tells whether it is one batch, `check` raises for a batch of the wrong form."""
        self.weight = weight or sample_count
        self._total: float | None = None
        self.source: Iterable[Any] = [data] if single(data) else _reiterable(data)
        self._check = check
        self._prints: list[tuple[Any, ...]] | None = None
        self._stable = isinstance(self.source, (list, tuple))
        self._stream = OwnStream()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield `(number, batch)`, comparing each batch with the first pass."""
        prints: list[tuple[Any, ...]] = []
        count, total = 0, 0.0
        for number, batch in enumerate(self.source if self._stable else self._stream.read(self.source)):
            if self._check is not None:
                self._check(batch, number)
            if not self._stable:
                prints.append(fingerprint(batch))
                if self._prints is not None and self._prints[number : number + 1] != prints[-1:]:
                    raise _changed_data_error(f"another batch {number} than in the first pass")
            count, total = count + 1, total + self.size(batch)
            yield number, batch
        if count == 0:
            raise DataError("Objective", "data must hold at least one batch", "none", "Check dataset and sampler")
        self._total = total
        if self._stable:
            return
        if self._prints is None:
            self._prints = prints
        elif len(prints) != len(self._prints):
            raise _changed_data_error(f"{len(prints)} batches instead of {len(self._prints)}")

    def size(self, batch: Any) -> float:
        """Return the weight of a batch for counting what it costs; 1 where nothing in it can be counted."""
        try:
            return float(self.weight(batch))
        except DataError:
            return 1.0

    def total(self) -> float:
        """Return the sum of the sizes of all batches; they are read again only if no pass over them was completed."""
        if self._total is None:
            self._total = sum(self.size(batch) for _, batch in self)
        return self._total


def _changed_data_error(difference: str) -> DataError:
    step = "Turn off shuffling and random augmentation, or pass ng.take(loader, n)"
    return DataError("Objective", "data must give the same batches at every pass", difference, step)


def _reiterable(data: Any) -> Iterable[Any]:
    if not isinstance(data, Iterable):
        rule, got = "data is one batch (inputs, targets) or a re-iterable of batches", type(data).__name__
        raise DataError("Objective", rule, got, "Pass a tuple (inputs, targets), a list of them, or a DataLoader")
    if isinstance(data, Iterator):
        step = "Pass ng.take(source, n), which materialises n batches"
        raise DataError("Objective", "data must be readable more than once", f"a one-shot {type(data).__name__}", step)
    return data


def is_pair(batch: Any) -> bool:
    """Tell whether a batch is `(inputs, targets)`."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def check_pair(batch: Any, number: int) -> None:
    """Raise unless the batch is `(inputs, targets)` with at least one sample."""
    if not is_pair(batch):
        size = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        rule = "each batch is a pair (inputs, targets)"
        step = "Pass one batch as a tuple (inputs, targets), or use Objective.from_step for other batches"
        raise DataError("Objective", rule, f"{type(batch).__name__}{size} as batch {number}", step)


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and mappings, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (Mapping, tuple, list)):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors(value)


def to_device(tree: Any, device: torch.device) -> Any:
    """Move every tensor to `device`; the same object comes back when nothing has to move."""
    if all(tensor.device == device for tensor in tensors(tree)):
        return tree
    return _map_leaves(tree, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)


def copy_batch(batch: Any) -> Any:
    """Return the batch with tensors and arrays of its own; one that occurs twice stays one, gradients flow through."""
    copies: dict[int, Any] = {}

    def copy_leaf(leaf: Any) -> Any:
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.clone() if isinstance(leaf, Tensor) else leaf.copy()
        return copies[id(leaf)]

    return _map_leaves(batch, copy_leaf)


def take_rows(batch: Any, rows: Tensor) -> Any:
    """Return the samples with these numbers: rows of every tensor and array."""
    return _map_leaves(batch, lambda leaf: leaf[rows.to(leaf.device) if isinstance(leaf, Tensor) else rows.numpy()])


def join_batches(batches: Sequence[Any]) -> Any:
    """Return several batches of one structure as one: tensors are joined along their first axis."""
    first = batches[0]
    if len(batches) == 1 or not isinstance(first, (Tensor, Mapping, tuple, list)):
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {name: join_batches([batch[name] for batch in batches]) for name in first}
    return type(first)(join_batches(parts) for parts in zip(*batches, strict=True))


def _map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and mappings, in their classes, with every tensor and array changed."""
    if isinstance(tree, (Tensor, np.ndarray)):
        return change(tree)
    if isinstance(tree, MutableMapping):
        twin = copy.copy(tree)
        twin.update({name: _map_leaves(value, change) for name, value in tree.items()})
        return twin
    if isinstance(tree, Mapping):
        return {name: _map_leaves(value, change) for name, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        changed = [_map_leaves(value, change) for value in tree]
        return type(tree)(*changed) if hasattr(tree, "_fields") else type(tree)(changed)
    return tree


def sample_count(batch: Any) -> int:
    """Count samples: the first axis of the targets, else of the first tensor with an axis."""
    for tensor in tensors([batch[1], batch] if is_pair(batch) else batch):
        if tensor.ndim > 0:
            return tensor.shape[0]
    rule = "a batch must hold a tensor whose first axis counts samples"
    raise DataError("Objective", rule, type(batch).__name__, "Pass weight=lambda batch: ... to Objective.from_step")


def fingerprint(batch: Any) -> tuple[Any, ...]:
    """Summarise a batch so that another one is recognised: shapes, sums and sums against a fixed ramp."""
    marks: list[Any] = []
    for tensor in tensors(batch):
        flat = tensor.detach().reshape(-1).to(torch.float64)
        ramp = torch.linspace(0.0, 1.0, flat.numel(), dtype=torch.float64, device=flat.device)
        marks.append((tuple(tensor.shape), repr(float(flat.sum())), repr(float(flat @ ramp))))  # nan is unlike itself
    return tuple(marks)


def checked_weight(total: float) -> float:
    """Return the sum of the batches' weights, which must be positive."""
    if not total > 0:
        rule = "the data must have a positive weight"
        raise DataError("Objective", rule, f"{total:g} samples", "Pass non-empty batches")
    return total
