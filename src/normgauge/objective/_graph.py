"""Walk an autograd graph: what it keeps in memory, and where it ends in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from normgauge.errors import NotDifferentiableError
from normgauge.objective._data import tensors


def graph_nodes(built: Any) -> Iterator[Any]:
    """Yield every node of the graph behind the tensors of a nested structure, or behind a list of edges, once."""
    edges = [edge.node for edge in built if isinstance(edge, GradientEdge)] if isinstance(built, list) else []
    pending = edges + [tensor.grad_fn for tensor in tensors(built) if tensor.grad_fn is not None]
    visited = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                pending.append(following)


def graph_bytes(built: Any) -> int:
    """Return the bytes held by the graph of the tensors in a nested structure, those tensors included.

    Examples:
        >>> import torch
        >>> x = torch.ones(100, requires_grad=True)
        >>> graph_bytes(x.exp().sin()) == 3 * 400  # x, exp(x) and the result
        True
    """
    storages: dict[int, int] = {}
    held = list(tensors(built))
    for node in graph_nodes(built):
        held += _saved_tensors(node)
    for tensor in held:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def check_differentiable(subject: str, slopes: Any) -> None:
    """Raise where a graph of first derivatives contains a node that refuses to be differentiated.

    `torch.autograd.grad` skips such a node when nothing behind it leads to the inputs, which is always so for
    `once_differentiable`: the product would come out without its terms, and without an error.
    """
    for node in graph_nodes(slopes):
        if node.name() == "torch::autograd::Error":
            raise NotDifferentiableError(
                subject,
                "every operation in model and loss must be twice differentiable",
                "an operation marked once_differentiable",
                "Write its backward with differentiable operations on saved tensors",
            )


def _saved_tensors(node: Any) -> list[Tensor]:
    """Return what a node has saved: built-in nodes show it as `_saved_*`, custom functions as `saved_tensors`."""
    names = [name for name in dir(type(node)) if name.startswith("_saved_") or name in ("saved_tensors", "variable")]
    return [tensor for name in names for tensor in tensors(getattr(node, name))]
