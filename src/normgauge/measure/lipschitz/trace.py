"""A network walked once from input to output, step by step, each step bounded by its rule; nothing is skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normgauge.errors import DataError, ModelError
from normgauge.measure.lipschitz.folded import Norms, Pending
from normgauge.measure.lipschitz.reach import Reach
from normgauge.measure.lipschitz.rules import Call, Rule, rule_of_function, rule_of_module, wrapped_functions
from normgauge.network import Graph, Made, Recorder, copy_model, is_leaf, replaced
from normgauge.network import Step as TracedStep
from normgauge.objective import tensors
from normgauge.rng import preserved_rng

_AGREEMENT = 1e-6  # between the traced and the called model, relative to the largest output
_CHECKED = 2  # samples on which they are compared; fewer than all, so that a coupling of samples shows
_KNOWN_HOOKS = ("SpectralNorm", "WeightNorm", "_LearnSize")  # of torch and normgauge: they set the weight


@dataclass(frozen=True)
class Step:
    """One step of the walk, as the tables show it.

    Attributes:
        name: of the layer.
        kind: type of the module or name of the function.
        normalizer: whether it is a normalizer.
        sources: numbers of the steps whose outputs it takes; -1 is the input of the network.
        outcome: what is known of its output.
    """

    name: str
    kind: str
    normalizer: bool
    sources: tuple[int, ...]
    outcome: Reach | Pending

    def reach(self) -> Reach:
        """Return the numbers of the output; of a map that was folded into the next, an estimate."""
        return self.outcome.estimated_reach() if isinstance(self.outcome, Pending) else self.outcome


def private_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model that can be run without a trace on the original, its parameters frozen."""
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [
            hook
            for hook in hooks
            if type(hook).__name__ not in _KNOWN_HOOKS
            or type(hook).__module__.split(".")[0] not in ("torch", "normgauge")
        ]
        if foreign:
            raise ModelError(
                f"lipschitz of {name or '(model)'!r}",
                "a hook may change what a layer computes, and no rule knows it",
                repr(foreign[0]),
                "Remove the hook, or measure a model without it",
            )
    twin = copy_model(model).requires_grad_(False).cpu()
    for module in twin.modules():
        if parametrize.is_parametrized(module):
            module.parametrizations.eval()  # type: ignore[union-attr] # no power iteration between two reads
    return twin


def _is_one_step(module: nn.Module) -> bool:
    """Tell whether a module is one step: it has a rule, or is a single layer of torch's that would need one."""
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    return rule_of_module(module) is not None or (type(module).__module__.startswith("torch.nn") and is_leaf(module))


@contextmanager
def _wrap_functions(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Let the user's functions that have a rule be one step each, wherever a forward calls them by a global name."""
    homes = {id(home): home for m in model.modules() for home in [getattr(type(m).forward, "__globals__", {})]}
    own = wrapped_functions()
    places = [(home, name, f) for home in homes.values() for name, f in home.items() if any(f is one for one in own)]
    try:
        for home, name, function in places:
            home[name] = partial(recorder.call, function)
        yield
    finally:
        for home, name, function in places:
            home[name] = function


def graph_of(model: nn.Module, inputs: Tensor) -> Graph:
    """Return the steps of one forward pass, which must be the same whatever the values of the inputs are."""
    tracked = inputs.detach().clone().requires_grad_().clone()  # with a history, so that nothing depends on it unseen
    recorder = Recorder(model, tracked, _is_one_step)
    with torch.enable_grad(), preserved_rng(), _wrap_functions(model, recorder), recorder.recording():
        output = model(tracked)
    for reasons, rule in (
        (recorder.steered, "the steps of the model may not depend on the values of the input"),
        (recorder.unseen, "every step must be a module or a function of torch, or have a rule"),
    ):
        if reasons:
            raise ModelError(
                f"lipschitz of {type(model).__name__}",
                rule,
                f"a forward with {reasons[0]!r}",
                "Register a rule for the module that does it (ng.register_lipschitz_rule), or rewrite its forward",
            )
    graph = recorder.graph(output)
    if not isinstance(output, Tensor) or not graph.ends:
        raise ModelError(
            "lipschitz",
            "the model must return one tensor that depends on its input",
            type(output).__name__,
            "Wrap the model in a module that returns the tensor to be bounded",
        )
    return graph


class Walk:
    """The walk through a model; norms of layers are taken once and kept.

    Args:
        model: in float64.
        inputs: the data, float64, the batch first.
        norms: norms known already.
    """

    def __init__(self, model: nn.Module, inputs: Tensor, norms: Norms | None = None) -> None:
        self.graph, self.inputs = graph_of(model, inputs), inputs
        self.norms: Norms = {} if norms is None else norms
        self.steps: list[Step] = []

    @torch.no_grad()
    def run(self, radius: float = 0.0, source: int = -1) -> Reach:
        """Return what is known of the output."""
        values: dict[int, Any] = {-1: [self.inputs]}
        reaches: dict[int, Any] = {}
        places: dict[int, tuple[int, ...]] = {source: (-1,)}
        left = Counter(number for step in self.graph.steps for number in step.reads)
        left.update(self.graph.outputs)
        if source < 0:
            reaches[source] = [Reach.of_inputs(self.inputs, radius)]
        self.steps = []
        for step in self.graph.steps:
            value = _value(step, values)
            values[step.number] = list(tensors(value))
            if step.number == source:
                reaches[source] = [Reach.of_inputs(value, radius)]
            elif any(number in reaches for number in step.reads):
                self._bound(step, value, reaches, values, places)
            for number in step.reads:  # activations of a large batch are freed as soon as they can be
                left[number] -= 1
                if not left[number]:
                    values.pop(number), reaches.pop(number, None)
        return self._finish(reaches)

    def _bound(
        self,
        step: TracedStep,
        value: Any,
        reaches: dict[int, Any],
        values: dict[int, Any],
        places: dict[int, tuple[int, ...]],
    ) -> None:
        rule = rule_of_module(step.module) if step.module is not None else rule_of_function(step.function, step.kind)
        name, kind = step.name.strip("()"), step.kind.strip("_")
        if rule is None:
            raise ModelError(
                f"lipschitz of {name!r}",
                "every step needs a rule; nothing is skipped",
                f"{kind}, which has none",
                "Register one with ng.register_lipschitz_rule",
            )

        def resolve(tensor: Made) -> Any:
            return (
                _certify_unless_folded(reaches[tensor.step][tensor.place], rule)
                if tensor.step in reaches
                else values[tensor.step][tensor.place]
            )

        args, kwargs = replaced((step.args, step.kwargs), Made, resolve)
        call = Call(name=name, kind=kind, module=step.module, args=args, kwargs=kwargs, value=value, norms=self.norms)
        _check_first(call, rule)
        if not rule.several and (
            len(call.dependent_arguments()) != 1 or call.dependent_arguments()[0] is not call.input
        ):
            raise call.refuse(
                "one argument, the first, may depend on the input", f"{len(call.dependent_arguments())} that do"
            )
        narrow = [tensor.dtype for tensor in tensors(value) if tensor.dtype not in (torch.float32, torch.float64)]
        if narrow:  # rounding to a coarser grid is a staircase
            raise call.refuse("steps must stay among real numbers of 32 or 64 bits", f"an output of {narrow[0]}")
        bound = rule.bound(call)
        if isinstance(bound, Tensor):  # only its shape or type depends on the input
            return
        reaches[step.number] = list(bound) if isinstance(bound, tuple) else [bound]
        _check_batch(call, reaches[step.number], len(self.inputs))
        sources = tuple(dict.fromkeys(place for number in step.reads if number in reaches for place in places[number]))
        places[step.number] = sources
        if rule.shown:
            self.steps.append(Step(name, kind, rule.normalizer, sources, reaches[step.number][0].drop_value()))
            places[step.number] = (len(self.steps) - 1,)

    def _finish(self, reaches: Mapping[int, Any]) -> Reach:
        end = self.graph.ends[0]
        reach = reaches[end.step][end.place] if end.step in reaches else None
        if reach is None:
            raise ModelError("lipschitz", "the output must depend on the input", "one that does not", "Return another")
        reach = reach.certified if isinstance(reach, Pending) else reach
        if reach.batch:
            raise ModelError("lipschitz", "outputs are [samples, ...]", "another order", "Put the batch first")
        return cast(Reach, reach)


def _value(step: TracedStep, values: Mapping[int, Any]) -> Any:
    """Carry a step out again; what it did in place it does to a tensor of its own."""
    args, kwargs = replaced((step.args, step.kwargs), Made, lambda tensor: values[tensor.step][tensor.place])
    if "inplace" in kwargs:
        kwargs = {**kwargs, "inplace": False}
    in_place = step.module is None and step.kind.endswith("_") and not step.kind.endswith("__")
    return (getattr(Tensor, step.kind.rstrip("_")) if in_place else step.function)(*args, **kwargs)


def check_agreement(called: nn.Module, inputs: Tensor, traced: Tensor) -> None:
    """Compare the traced output with the model's own on a few samples alone."""
    few = min(_CHECKED, max(1, len(inputs) - 1))
    try:
        with torch.no_grad():
            direct = called(inputs[:few])
    except RuntimeError as error:
        raise ModelError(
            "lipschitz", "the model must take any number of samples", str(error), "Take sizes from the input"
        ) from error
    direct = direct[0] if isinstance(direct, (tuple, list)) and len(direct) == 1 else direct
    gap = float((direct - traced[:few]).abs().max()) if direct.numel() else 0.0
    limit = _AGREEMENT * max(1.0, float(direct.abs().max()) if direct.numel() else 0.0)
    if not gap <= limit and bool(torch.isfinite(direct).all()):
        raise ModelError(
            f"lipschitz of {type(called).__name__}",
            "the traced steps must give what the model gives, sample by sample",
            f"outputs that differ by {gap:.3g}",
            "Samples must not see each other, and later steps must not read tensors changed in place",
        )


def _certify_unless_folded(outcome: Any, rule: Rule) -> Any:
    return outcome.certified if isinstance(outcome, Pending) and not rule.folds else outcome


def _check_first(call: Call, rule: Rule) -> None:
    if not rule.moves and any(isinstance(operand, Reach) and operand.batch for operand in call.dependent_arguments()):
        raise call.refuse(
            "the first axis must be the batch, except between steps that move axes",
            f"{call.kind} on another order",
            "Move the batch to the front first (batch_first=True)",
        )


def _check_batch(call: Call, parts: Sequence[Any], samples: int) -> None:
    for part in parts:
        if part is None:
            continue
        axis = part.batch if isinstance(part, Reach) else 0
        if part.value.ndim <= axis or part.value.shape[axis] != samples:
            raise call.refuse(
                f"axis {axis} must stay the batch of {samples}",
                f"an output of shape {tuple(part.value.shape)}",
                "Keep the batch apart: samples are bounded one by one",
            )


def check_inputs(inputs: Any) -> Tensor:
    """Return the inputs as they are, if they are one batch of real, finite numbers."""
    good = isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.ndim >= 2 and inputs.numel() > 0
    if not good or not bool(torch.isfinite(inputs).all()):
        description, step = type(inputs).__name__, "Wrap the model in a module that takes one tensor"
        if isinstance(inputs, Tensor):
            description = f"{inputs.dtype} of shape {tuple(inputs.shape)}"
            step = "Distances between token ids mean nothing: measure from the embeddings on"
        raise DataError(
            "lipschitz",
            "inputs are one batch [samples, ...] of finite real numbers",
            description,
            step,
        )
    return inputs.detach().cpu()
