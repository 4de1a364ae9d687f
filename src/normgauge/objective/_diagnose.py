"""Turn failures inside the user's model or loss into the rule, what came, and the next step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from normgauge.errors import InputError, ModelError, NonFiniteError, NormgaugeError, NotDifferentiableError
from normgauge.objective._graph import graph_nodes


def check_callable(subject: str, rule: str, value: Any) -> None:
    """Raise unless `value` can be called."""
    if not callable(value):
        raise InputError(subject, rule, type(value).__name__, "The order is model, loss or step, data")


def check_scalar(value: Any, name: str, number: int) -> None:
    """Raise unless a loss term is a real 0-d floating tensor."""
    if not isinstance(value, Tensor):
        raise InputError(
            "Objective", f"{name} must be a 0-d tensor", type(value).__name__, "Return the tensor, not .item()"
        )
    if value.ndim != 0 or not value.is_floating_point():
        raise InputError(
            "Objective",
            f"{name} must be a real 0-d tensor, the mean over the samples",
            f"shape {tuple(value.shape)} of {value.dtype} in batch {number}",
            "Use reduction='mean', or call .mean() in the loss",
        )


def check_finite(value: Tensor, name: str, number: int) -> None:
    """Raise when a loss term is infinite or not a number, naming the batch."""
    if not bool(torch.isfinite(value.detach())):
        raise NonFiniteError(
            "Objective",
            f"{name} must be finite",
            f"{float(value.detach())} in batch {number}",
            "Look at that batch's inputs and targets, lower the learning rate, or use float64",
        )


def check_depends(value: Tensor) -> None:
    """Raise unless the loss depends on the variables through differentiable operations."""
    if not value.requires_grad:
        raise NotDifferentiableError(
            "Objective",
            "the loss must depend on the selected parameters by differentiable operations",
            "a loss without graph",
            "Remove .detach(), .item(), argmax or no_grad from forward and loss, or select other parameters",
        )


def check_same_values(leaves: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Raise where a forward has written into a parameter: the derivative would be that of another point."""
    for name, leaf in leaves.items():
        if not torch.equal(leaf, before[name]) and not bool(leaf.isnan().any()):
            raise NotDifferentiableError(
                f"parameter {name!r}",
                "a forward whose derivative is asked must not write into its parameters",
                "values that differ after the forward",
                "Do it after the optimizer's step, or as a parametrization (torch.nn.utils.parametrize)",
            )


def check_recomputes_nothing(value: Tensor) -> None:
    """Raise where a library's own activation checkpoint stands in the graph.

    It runs the model again in the backward pass, with the model's weights instead of those it was given. Those of
    torch are switched off while a model is measured.
    """
    for node in graph_nodes(value):
        if "checkpoint" in node.name().lower():
            raise NotDifferentiableError(
                "Objective",
                "activations must not be computed again in the backward pass",
                f"{node.name()}, an activation checkpoint",
                "Turn activation checkpointing off in the model; torch.utils.checkpoint may stay",
            )


def check_twice_differentiable(value: Tensor) -> None:
    """Raise when the graph of `value` holds a function that is differentiable once only.

    Asked for gradients with respect to given inputs, torch skips such a function without a word and the second
    derivative comes out as zero; so the graph is searched for them.
    """
    check_recomputes_nothing(value)
    for node in graph_nodes(value):
        backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
        if getattr(backward, "__code__", None) is _ONCE_DIFFERENTIABLE:
            raise NotDifferentiableError(
                "Objective",
                "every operation in model and loss must be twice differentiable",
                f"{node.name()}, whose backward is marked once_differentiable",
                "Write its backward with differentiable operations, or measure first derivatives only",
            )


# Every function decorated by once_differentiable shares the code of the decorator's inner wrapper.
_ONCE_DIFFERENTIABLE = once_differentiable(lambda ctx: None).__code__


@contextmanager
def explain_failures(model: nn.Module, mode: str, number: int) -> Iterator[None]:
    """Re-raise what a model throws with the layer's name and the next step where the cause is known."""
    try:
        yield
    except NormgaugeError:
        raise
    except ValueError as error:
        if "more than 1 value per channel" in str(error) or "more than 1 spatial element" in str(error):
            layer = _deepest_module(model, error.__traceback__)
            raise ModelError(
                f"layer {layer}",
                f"batch statistics in mode={mode!r} need more than one value per channel",
                f"{str(error).rsplit('got ', 1)[-1]} in batch {number}",
                "Use batches of two or more samples (drop_last=True), or mode='eval'",
            ) from error
        _note(error, model, mode, number)
        raise
    except RuntimeError as error:
        if "derivative for" in str(error) and "not implemented" in str(error):
            raise NotDifferentiableError(
                "Objective",
                "every operation in model and loss must have the derivative asked for",
                str(error).splitlines()[0],
                "Replace the operation, or measure something that needs first derivatives only",
            ) from error
        _note(error, model, mode, number)
        raise
    except Exception as error:
        _note(error, model, mode, number)
        raise


def _note(error: Exception, model: nn.Module, mode: str, number: int) -> None:
    layer = _deepest_module(model, error.__traceback__)
    where = (
        f"inside the model (layer {layer})" if layer else "outside the model, in the loss or in the call of the model,"
    )
    error.add_note(f"normgauge: raised {where} in mode={mode!r} on batch {number}.")


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
