"""Turn failures inside the user's model or loss into the rule, what came, and the next step; walk autograd graphs."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from normgauge.errors import InputError, ModelError, NonFiniteError, NormgaugeError, NotDifferentiableError
from normgauge.objective._data import tensors


def check_callable(subject: str, rule: str, value: Any) -> None:
    """Raise unless `value` can be called."""
    if not callable(value):
        raise InputError(subject, rule, type(value).__name__, "The order is model, loss or step, data")


def check_scalar(value: Any, name: str, number: int) -> None:
    """Raise unless a loss term is a real 0-d floating tensor."""
    if not isinstance(value, Tensor):
        step = "Return the tensor, not .item()"
        raise InputError("Objective", f"{name} must be a 0-d tensor", type(value).__name__, step)
    if value.ndim != 0 or not value.is_floating_point():
        rule = f"{name} must be a real 0-d tensor, the mean over the samples"
        step = "Use reduction='mean', or call .mean() in the loss"
        raise InputError("Objective", rule, f"shape {tuple(value.shape)} of {value.dtype} in batch {number}", step)


def check_finite(value: Tensor, name: str, number: int) -> None:
    """Raise when a loss term is infinite or not a number, naming the batch."""
    if not bool(torch.isfinite(value.detach())):
        step = "Look at that batch's inputs and targets, lower the learning rate, or use float64"
        raise NonFiniteError("Objective", f"{name} must be finite", f"{float(value.detach())} in batch {number}", step)


def check_depends(value: Tensor) -> None:
    """Raise unless the loss depends on the variables through differentiable operations."""
    if not value.requires_grad:
        rule = "the loss must depend on the selected parameters by differentiable operations"
        step = "Remove .detach(), .item(), argmax or no_grad from forward and loss, or select other parameters"
        raise NotDifferentiableError("Objective", rule, "a loss without graph", step)


def check_same_values(leaves: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Raise where a forward has written into a parameter: the derivative would be that of another point."""
    for name, leaf in leaves.items():
        if not torch.equal(leaf, before[name]) and not bool(leaf.isnan().any()):
            rule = "a forward whose derivative is asked must not write into its parameters"
            step = "Do it after the optimizer's step, or as a parametrization (torch.nn.utils.parametrize)"
            raise NotDifferentiableError(f"parameter {name!r}", rule, "values that differ after the forward", step)


def check_recomputes_nothing(value: Tensor) -> None:
    """Raise where a library's own activation checkpoint (torch's are off) would run again with the model's weights."""
    for node in graph_nodes(value):
        if "checkpoint" in node.name().lower():
            rule = "activations must not be computed again in the backward pass"
            step = "Turn activation checkpointing off in the model; torch.utils.checkpoint may stay"
            raise NotDifferentiableError("Objective", rule, f"{node.name()}, an activation checkpoint", step)


def check_twice_differentiable(value: Tensor) -> None:
    """Raise when the graph of `value` holds a function that is differentiable once only.

    Asked for gradients with respect to given inputs, torch skips such a function without a word and the second
    derivative comes out as zero; so the graph is searched for them.
    """
    check_recomputes_nothing(value)
    for node in graph_nodes(value):
        backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
        if getattr(backward, "__code__", None) is _ONCE_DIFFERENTIABLE:
            raise not_twice_differentiable("Objective", f"{node.name()}, whose backward is marked once_differentiable")


# Every function decorated by once_differentiable shares the code of the decorator's inner wrapper.
_ONCE_DIFFERENTIABLE = once_differentiable(lambda ctx: None).__code__


@contextmanager
def explain_failures(model: nn.Module, mode: str, number: int) -> Iterator[None]:
    """Re-raise what a model throws with the layer's name and the next step where the cause is known."""
    try:
        yield
    except NormgaugeError:
        raise
    except Exception as error:
        text, layer = str(error), _deepest_module(model, error.__traceback__)
        if isinstance(error, ValueError) and re.search("more than 1 (value per channel|spatial element)", text):
            rule = f"batch statistics in mode={mode!r} need more than one value per channel"
            step = "Use batches of two or more samples (drop_last=True), or mode='eval'"
            raise ModelError(f"layer {layer}", rule, f"{text.rsplit('got ', 1)[-1]} in batch {number}", step) from error
        if isinstance(error, RuntimeError) and "derivative for" in text and "not implemented" in text:
            rule = "every operation in model and loss must have the derivative asked for"
            step = "Replace the operation, or measure something that needs first derivatives only"
            raise NotDifferentiableError("Objective", rule, text.splitlines()[0], step) from error
        where = f"inside the model (layer {layer})" if layer else "outside the model, in the loss or in its call,"
        error.add_note(f"normgauge: raised {where} in mode={mode!r} on batch {number}.")
        raise


def _deepest_module(model: nn.Module, traceback: TracebackType | None) -> str:
    """Find the innermost submodule whose method is on the stack; an error's place in the user's own words."""
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    layer = ""
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if id(owner) in names:
            layer = f"{names[id(owner)]!r} ({type(owner).__name__})"
        traceback = traceback.tb_next
    return layer


def not_twice_differentiable(
    subject: str, what: str, step: str = "Write its backward with differentiable operations on saved tensors"
) -> NotDifferentiableError:
    """Return the error for an operation without a second derivative."""
    return NotDifferentiableError(subject, "every operation in model and loss must be twice differentiable", what, step)


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
    saved = (tensor for node in graph_nodes(built) for tensor in _saved_tensors(node))
    storages = (tensor.untyped_storage() for tensor in chain(tensors(built), saved))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def check_differentiable(subject: str, slopes: Any) -> None:
    """Raise where a graph of first derivatives contains a node that refuses to be differentiated.

    `torch.autograd.grad` skips such a node when nothing behind it leads to the inputs, which is always so for
    `once_differentiable`: the product would come out without its terms, and without an error.
    """
    for node in graph_nodes(slopes):
        if node.name() == "torch::autograd::Error":
            raise not_twice_differentiable(subject, "an operation marked once_differentiable")


def _saved_tensors(node: Any) -> list[Tensor]:
    """Return what a node has saved: built-in nodes show it as `_saved_*`, custom functions as `saved_tensors`."""
    names = [name for name in dir(type(node)) if name.startswith("_saved_") or name in ("saved_tensors", "variable")]
    return [tensor for name in names for tensor in tensors(getattr(node, name))]
