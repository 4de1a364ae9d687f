"""What hangs on a model besides its parameters and buffers, as it was: attributes, containers, arrays, generators."""

import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normgauge.rng import Restore, save_generator

Alias = tuple[Callable[[Any, Any], None], Any, Any]

_DEPTH = 2  # objects of the user's classes inside of each other; behind them lie trainers and data sets
_ATOMS = {type(None), bool, int, float, str, bytes, type, FunctionType, torch.dtype, torch.device}
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy"}  # their objects have invariants of their own


class Snapshot:
    """What hangs on objects, kept away from a forward: copies take its place until `restore` puts it back.

    Followed are attributes of modules (also of those kept in plain lists), lists, dicts, sets, deques and tuples in any
    depth, and objects of user's classes two deep. Tensors and arrays are replaced by copies, for a graph may hold them
    longer than the forward lasts; generators come back by state. What is reached through classes, closures or globals
    is not followed. `spared` are tensors somebody else looks after; where they were met besides where they are
    registered is in `aliases`, as `(put, place, tensor)`: `put(place, other)` lets the forward meet another there.
    """

    def __init__(self, roots: Iterable[Any], spared: Iterable[Tensor] = ()) -> None:
        self._seen = {id(tensor) for tensor in spared}
        self._copies: dict[int, Any] = {}
        self._empty: list[Any] = []
        self._registers: set[int] = set()
        self.aliases: list[Alias] = []
        self._restores: list[Restore] = []
        try:
            for root in roots:
                self._save(root, 0)
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        for container in self._empty:
            if container:
                container.clear()
        for restore in self._restores:
            restore()

    def _save(self, value: Any, depth: int) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))  # an id stays taken: the list of the container it came from keeps the object alive
        if isinstance(value, (dict, list, deque, set)) and not value:
            self._empty.append(value)  # most are: the dictionaries of hooks
        elif isinstance(value, dict):
            self._restores.append(_save_dict(value))
            put = _method(value, "__setitem__")
            aliases = id(value) not in self._registers
            self._save_items(list(value.items()), lambda key, twin: put(value, key, twin), depth, aliases=aliases)
        elif isinstance(value, nn.Module):
            self._registers.update((id(value._parameters), id(value._buffers)))
            self._save(value.__dict__, depth)
        elif isinstance(value, (list, deque)):
            self._restores.append(_save_elements(value))
            self._save_items(list(enumerate(value)), value.__setitem__, depth)
        elif isinstance(value, (tuple, set, frozenset)):
            if isinstance(value, set):
                self._restores.append(_save_elements(value))
            self._save_items(list(enumerate(value)), None, depth)
        elif (restore := save_generator(value)) is not None:
            self._restores.append(restore)
        elif depth < _DEPTH and _is_plain(value):
            self._save(value.__dict__, depth + 1)

    def _save_items(
        self, items: list[Any], replace: Callable[[Any, Any], None] | None, depth: int, *, aliases: bool = True
    ) -> None:
        for place, item in items:
            if type(item) in _ATOMS:
                continue
            if not isinstance(item, (Tensor, np.ndarray)):
                self._save(item, depth)
            elif id(item) in self._seen:
                if replace is not None and aliases:
                    self.aliases.append((replace, place, item))
            elif replace is None:
                self._restores.append(functools.partial(_write_back, item, _copy(item)))
            else:
                if id(item) not in self._copies:
                    self._copies[id(item)] = _copy(item)
                replace(place, self._copies[id(item)])


def _is_plain(value: Any) -> bool:
    if not hasattr(value, "__dict__"):
        return False
    return isinstance(value, SimpleNamespace) or type(value).__module__.partition(".")[0] not in _FOREIGN


def _method(container: dict[Any, Any], name: str) -> Any:
    """Return a method of plain dicts: classes that refuse changes, as Hugging Face's outputs, do so by their own."""
    return getattr(OrderedDict if isinstance(container, OrderedDict) else dict, name)


def _save_dict(container: dict[Any, Any]) -> Restore:
    entries = dict(container)

    def restore() -> None:
        for key in [key for key in container if key not in entries]:
            _method(container, "__delitem__")(container, key)
        for key, value in entries.items():
            if container.get(key, entries) is not value:
                _method(container, "__setitem__")(container, key, value)

    return restore


def _save_elements(container: Any) -> Restore:
    items = list(container)

    def restore() -> None:
        if len(container) != len(items) or any(a is not b for a, b in zip(container, items, strict=True)):
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(items)

    return restore


def _copy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if torch._C._functorch.is_functorch_wrapped_tensor(value) or value.layout is not torch.strided:
        return value
    twin = value.detach().clone()
    return nn.Parameter(twin, value.requires_grad) if isinstance(value, nn.Parameter) else twin


def _write_back(value: Any, twin: Any) -> None:
    """Give an item of a tuple, which cannot be replaced, its values again."""
    if isinstance(value, np.ndarray):
        np.copyto(value, twin)
    elif not torch.equal(value, twin):  # by value: writes through .data leave the version as it is
        with torch.no_grad():
            value.copy_(twin)
