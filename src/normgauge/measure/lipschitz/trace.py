"""A network walked once from input to output, step by step, each step bounded by its rule; nothing is skipped."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from normgauge.errors import DataError, ModelError, NormgaugeError, explain
from normgauge.measure.lipschitz.blocks import unrolled
from normgauge.measure.lipschitz.folded import Norms, Pending
from normgauge.measure.lipschitz.reach import Reach
from normgauge.measure.lipschitz.rules import Call, Rule, rule_of_function, rule_of_module, wrapped_functions

_AGREEMENT = 1e-6  # between the traced and the called model, relative to the largest output
_CHECKED = 2  # samples on which they are compared; fewer than all, so that a coupling of samples shows
_KNOWN_HOOKS = ("SpectralNorm", "WeightNorm", "_LearnSize")  # of torch and normgauge: they set the weight
_SHAPE_METHODS = {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "get_device"}
_SHAPE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "layout"}


@dataclass(frozen=True)
class Step:
    """One step of the walk, as the tables show it.

    Attributes:
        name: of the layer.
        kind: type of the module or name of the function.
        normalizer: whether it is a normalizer.
        sources: numbers of the steps whose outputs it takes; -1 is the input of the network.
        known: what is known of its output.
    """

    name: str
    kind: str
    normalizer: bool
    sources: tuple[int, ...]
    known: Reach | Pending

    def reach(self) -> Reach:
        """Return the numbers of the output; of a map that was folded into the next, an estimate."""
        return self.known.likely() if isinstance(self.known, Pending) else self.known


class _Tracer(fx.Tracer):
    """Traces through everything but modules that have a rule, and torch's own."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        return rule_of_module(module) is not None or super().is_leaf_module(module, name)


def private_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model that can be run without a trace on the original, its parameters frozen.

    Raises:
        ModelError: when the model cannot be copied, or carries hooks, which may change what its layers compute.
    """
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
                explain(
                    f"lipschitz of {name or '(model)'!r}",
                    "a hook may change what a layer computes, and no rule knows it",
                    repr(foreign[0]),
                    "Remove the hook, or measure a model without it",
                )
            )
    try:
        twin = copy.deepcopy(model).requires_grad_(False).cpu()
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            explain("lipschitz", "the model must allow copy.deepcopy", str(error), "Detach the tensors it stores")
        ) from error
    for module in twin.modules():
        if parametrize.is_parametrized(module):
            module.parametrizations.eval()  # type: ignore[union-attr] # no power iteration between two reads
    return twin


def graph_of(model: nn.Module) -> fx.GraphModule:
    """Return the steps of a model, traced symbolically: whatever the input is, they are the same.

    Raises:
        ModelError: when the steps depend on the values of the input, or tracing fails otherwise.
    """
    root = unrolled(model)
    tracer = _Tracer(autowrap_functions=wrapped_functions())
    if tracer.is_leaf_module(root, ""):  # a model that is one layer
        root = nn.Sequential(OrderedDict(model=root))
    try:
        return fx.GraphModule(root, tracer.trace(root))
    except NormgaugeError:
        raise
    except Exception as error:
        raise ModelError(
            explain(
                f"lipschitz of {type(model).__name__}",
                "torch.fx must be able to trace the model: its steps may not depend on the values of the input",
                f"{type(error).__name__}: {error}",
                "Register a rule for the module that branches (ng.register_lipschitz_rule), or rewrite its forward",
            )
        ) from error


class Walk:
    """The walk through a traced model; norms of layers are taken once and kept.

    Args:
        graph: the traced model in float64.
        inputs: the data, float64, the batch first.
        norms: norms known already.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Tensor, norms: Norms | None = None) -> None:
        self.graph, self.inputs = graph, inputs
        self.norms: Norms = {} if norms is None else norms
        self.steps: list[Step] = []

    @torch.no_grad()
    def run(self, radius: float = 0.0, source: str | None = None) -> Reach:
        """Return what is known of the output.

        Args:
            radius: of the ball around each datum.
            source: start at the output of this step in place of the input; everything before it is a constant.

        Raises:
            ModelError: naming the first step without a rule.
        """
        modules = dict(self.graph.named_modules())
        known: dict[fx.Node, Any] = {}
        values: dict[fx.Node, Any] = {}
        places: dict[fx.Node, tuple[int, ...]] = {}
        left = {node: len(node.users) for node in self.graph.graph.nodes}
        self.steps = []
        for node in self.graph.graph.nodes:
            if node.op == "output":
                return self._finish(node.args[0], known)
            values[node] = self._value(node, values, modules)
            inside = [parent for parent in node.all_input_nodes if parent in known]
            if (node.op == "placeholder" and source is None) or node.name == source:
                known[node], places[node] = Reach.of_inputs(values[node], radius), (-1,)
            elif inside and not _only_shape(node):
                self._bound(node, inside, known, values, places, modules)
            for parent in node.all_input_nodes:  # activations of a large batch are freed as soon as they can be
                left[parent] -= 1
                if not left[parent]:
                    values.pop(parent), known.pop(parent, None)
        raise ModelError(explain("lipschitz", "the model must return something", "nothing", "Return a tensor"))

    def _value(self, node: fx.Node, values: Mapping[fx.Node, Any], modules: Mapping[str, nn.Module]) -> Any:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            target: Any = self.graph
            for part in str(node.target).split("."):
                target = getattr(target, part)
            return target.detach() if isinstance(target, Tensor) else target
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda parent: values[parent])
        if node.op == "call_module":
            return modules[str(node.target)](*args, **kwargs)
        if "inplace" in kwargs:
            kwargs = {**kwargs, "inplace": False}
        if node.op == "call_method":
            name = str(node.target)
            plain = name.rstrip("_") if name.endswith("_") and not name.endswith("__") else name
            return getattr(args[0], plain)(*args[1:], **kwargs)
        return _OUT_OF_PLACE.get(node.target, node.target)(*args, **kwargs)  # type: ignore[operator]

    def _placeholder(self, node: fx.Node) -> Any:
        first = next(iter(self.graph.graph.nodes))
        if node is first:
            return self.inputs
        if node.args:
            return node.args[0]  # the default of a further argument
        raise ModelError(
            explain(
                f"lipschitz of {type(self.graph).__name__}",
                "the model must take one input",
                f"a further argument {node.target!r} without a default",
                "Wrap the model in a module that takes the input only",
            )
        )

    def _bound(
        self,
        node: fx.Node,
        inside: list[fx.Node],
        known: dict[fx.Node, Any],
        values: dict[fx.Node, Any],
        places: dict[fx.Node, tuple[int, ...]],
        modules: Mapping[str, nn.Module],
    ) -> None:
        module = modules[str(node.target)] if node.op == "call_module" else None
        rule = rule_of_module(module) if module is not None else rule_of_function(node.target)
        name = str(node.target) if module is not None else node.name
        kind = type(module).__name__.removeprefix("Parametrized") if module is not None else _spoken(node.target)
        if rule is None:
            raise ModelError(
                explain(
                    f"lipschitz of {name!r}",
                    "every step needs a rule; nothing is skipped",
                    f"{kind}, which has none",
                    "Register one with ng.register_lipschitz_rule",
                )
            )

        def seen(parent: fx.Node) -> Any:
            return _taken(known[parent], rule) if parent in known else values[parent]

        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), seen)
        call = Call(
            name=name, kind=kind, module=module, args=tuple(args), kwargs=kwargs, value=values[node], norms=self.norms
        )
        _check_first(call, rule)
        if not rule.several and (len(call.dependent()) != 1 or call.dependent()[0] is not call.input):
            raise call.refuse("one argument, the first, may depend on the input", f"{len(call.dependent())} that do")
        known[node] = rule.bound(call)
        _check_batch(call, known[node], len(self.inputs))
        sources = tuple(dict.fromkeys(place for parent in inside for place in places[parent]))
        places[node] = sources
        main = known[node][0] if isinstance(known[node], tuple) else known[node]
        if rule.shown:
            self.steps.append(Step(name, kind, rule.normalizer, sources, main.light()))
            places[node] = (len(self.steps) - 1,)

    def _finish(self, output: Any, known: Mapping[fx.Node, Any]) -> Reach:
        if not isinstance(output, fx.Node) or output not in known:
            raise ModelError(
                explain(
                    "lipschitz",
                    "the model must return one tensor that depends on its input",
                    type(output).__name__,
                    "Wrap the model in a module that returns the tensor to be bounded",
                )
            )
        found = known[output]
        if isinstance(found, Reach) and found.batch:
            raise ModelError(explain("lipschitz", "outputs are [samples, ...]", "another order", "Put the batch first"))
        found = found[0] if isinstance(found, tuple) and len(found) == 1 else found
        if not isinstance(found, (Reach, Pending)):
            raise ModelError(explain("lipschitz", "the model must return one tensor", "several", "Return one of them"))
        return found.certified if isinstance(found, Pending) else found


def check_agreement(called: nn.Module, inputs: Tensor, traced: Tensor) -> None:
    """Compare the traced output with the model's own on a few samples alone.

    Raises:
        ModelError: when they differ: an operation in place, a hook, or samples that see each other.
    """
    few = min(_CHECKED, max(1, len(inputs) - 1))
    with torch.no_grad():
        direct = called(inputs[:few])
    direct = direct[0] if isinstance(direct, (tuple, list)) and len(direct) == 1 else direct
    gap = float((direct - traced[:few]).abs().max()) if direct.numel() else 0.0
    limit = _AGREEMENT * max(1.0, float(direct.abs().max()) if direct.numel() else 0.0)
    if not gap <= limit and bool(torch.isfinite(direct).all()):
        raise ModelError(
            explain(
                f"lipschitz of {type(called).__name__}",
                "the traced steps must give what the model gives, sample by sample",
                f"outputs that differ by {gap:.3g}",
                "Samples must not see each other, and later steps must not read tensors changed in place",
            )
        )


def _taken(known: Any, rule: Rule) -> Any:
    if isinstance(known, Pending) and not rule.folds:
        return known.certified
    if isinstance(known, tuple):
        return tuple(_taken(item, rule) for item in known)
    return known


def _check_first(call: Call, rule: Rule) -> None:
    if not rule.moves and any(isinstance(known, Reach) and known.batch for known in call.dependent()):
        raise call.refuse(
            "the first axis must be the batch, except between steps that move axes",
            f"{call.kind} on another order",
            "Move the batch to the front first (batch_first=True)",
        )


def _check_batch(call: Call, known: Any, samples: int) -> None:
    parts = known if isinstance(known, tuple) else (known,)
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


def _only_shape(node: fx.Node) -> bool:
    """Tell whether a step asks for the shape or type of a tensor, not for its values."""
    if node.op == "call_method":
        return node.target in _SHAPE_METHODS
    return node.op == "call_function" and node.target is getattr and node.args[1] in _SHAPE_ATTRIBUTES


def _spoken(target: Any) -> str:
    name = target if isinstance(target, str) else str(getattr(target, "__name__", target))
    return name.rstrip("_") if not name.startswith("_") else name


def checked_inputs(inputs: Any) -> Tensor:
    """Return the inputs as they are, if they are one batch of real, finite numbers.

    Raises:
        DataError: otherwise.
    """
    good = isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.ndim >= 2 and inputs.numel() > 0
    if not good or not bool(torch.isfinite(inputs).all()):
        got = f"{inputs.dtype} of shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise DataError(
            explain(
                "lipschitz",
                "inputs are one batch [samples, ...] of finite real numbers",
                got,
                "Distances between token ids mean nothing: measure from the embeddings on",
            )
        )
    return inputs.detach().cpu()


_OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
