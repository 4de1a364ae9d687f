"""`Network`: a model read once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from torch import Tensor, nn

from normgauge.network._arithmetic import KeepDouble, double
from normgauge.network._call_order import Graph, Leaf, ModuleCall, Recorder, Step, watched
from normgauge.network._modules import copy_model, is_leaf, role_of
from normgauge.network._roles import Role, roles_of
from normgauge.objective import Mode, Objective, call_model, call_purely, copy_batch, untouched

_NORMALIZING = ("layer_norm", "batch_norm", "group_norm", "rms_norm", "instance_norm")
_WEIGHING = ("linear", "conv1d", "conv2d", "conv3d", "embedding", "bilinear", "addmm")


@dataclass(frozen=True)
class Neighbour:
    """A call beside a normalizer, or the model's "(input)" or "(output)"."""

    name: str  # of the step
    between: tuple[str, ...] = ()  # kinds of the steps that lie between, in the order of execution


@dataclass(frozen=True)
class Edge:
    """A normalizer between those that write what it reads and those that read what it gives."""

    normalizer: str  # name of the step
    producers: tuple[Neighbour, ...]  # the nearest calls with weights, or normalizers; several behind an addition
    consumers: tuple[Neighbour, ...]


class Network:
    """A model, inputs and a mode: what is called in which order, who reads what, what each parameter is for.

    Nothing is left on the model, also after an exception. Every answer is found once, when it is asked for. Inputs are
    a tensor, a tuple (positional arguments) or a mapping (keywords); `forward(model, inputs)` is for unusual calls.

    Examples:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        >>> network = Network(net, torch.ones(2, 3))
        >>> [call.kind for call in network.calls]
        ['Linear', 'BatchNorm1d', 'ReLU', 'Linear']
        >>> network.edges[0].producers[0].name, network.edges[0].consumers[0]
        ('0', Neighbour(name='3', between=('ReLU',)))
        >>> network.roles["1.weight"].kind
        'gain'
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        mode: Mode = "eval",
    ) -> None:
        self.model, self.mode = model, mode
        # forwards may write into them
        self.inputs = copy_batch(dict(inputs) if isinstance(inputs, Mapping) else inputs)
        self._call = forward or call_model
        self._evaluate: Callable[..., Any] = self._run

    @classmethod
    def of(cls, objective: Objective) -> Self:
        """Return the network an objective evaluates, on its first batch; its outputs are the losses."""
        number, batch = next(iter(objective.batches()))

        def forward(model: nn.Module, batch: Any) -> Any:
            return objective.terms_of(model, number, batch, copied=False)

        network = cls(objective.model, batch, forward=forward, mode=objective.mode)
        leaves = {name: value.clone().requires_grad_() for name, value in objective.parameters.items()}
        network._evaluate = lambda body, values=None: objective.evaluate(number, body, {**leaves, **(values or {})})
        return network

    def _run(self, body: Callable[[nn.Module], Any], values: Mapping[str, Tensor] | None = None) -> Any:
        with untouched(self.model, self.mode, 0) as aliases:
            return call_purely(self.model, values or {}, body, aliases=aliases)

    # -- order --------------------------------------------------------------------------------------------------

    @cached_property
    def _recording(self) -> tuple[Graph, dict[str, list[int]]]:
        return self._record(is_leaf)

    def _record(self, leaf: Leaf) -> tuple[Graph, dict[str, list[int]]]:
        def body(model: nn.Module) -> tuple[Graph, dict[str, list[int]]]:
            recorder = Recorder(model, self.inputs, leaf)
            with recorder.recording():
                outputs = self._call(model, self.inputs)
            return recorder.graph(outputs), recorder.uses

        return self._evaluate(body)

    def record(self, leaf: Leaf = is_leaf) -> Graph:
        """Return the steps of one forward pass, with other modules than usual as one step."""
        return (self._recording if leaf is is_leaf else self._record(leaf))[0]

    @property
    def calls(self) -> tuple[Step, ...]:
        """Calls of leaf modules, and of functions that have weights or normalize, in order of execution."""
        steps = self._recording[0].steps
        return tuple(s for s in steps if s.module is not None or s.kind in (*_NORMALIZING, *_WEIGHING))

    @property
    def uses(self) -> dict[str, list[int]]:
        """Parameter -> times, counted in operations, at which one read it: by whatever module or function."""
        return self._recording[1]

    # -- who reads what -----------------------------------------------------------------------------------------

    @cached_property
    def graph(self) -> Graph:
        """All steps: from torch.export, which holds for all inputs of these shapes, else from one forward pass."""
        from normgauge.network.exports import NOT_EXPORTED, export_graph  # imports much of torch

        recorded = self.record()
        if recorded.steered:
            return replace(recorded, why=f"its way depends on values ({recorded.steered[0]})")
        try:
            with untouched(self.model, self.mode, 0), warnings.catch_warnings(action="ignore"):
                return export_graph(self.model, self._call, self.inputs, is_leaf)
        except NOT_EXPORTED as error:
            return replace(recorded, why=f"{type(error).__name__}: {error}".partition("\n")[0])

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The normalizers with their neighbours, in order of execution."""
        beside, norms = self._neighbours, (step for step in self.graph.steps if normalizes(step))
        return tuple(Edge(s.name, beside(s, backwards=True), beside(s, backwards=False)) for s in norms)

    def _neighbours(self, start: Step, *, backwards: bool) -> tuple[Neighbour, ...]:
        graph = self.graph
        neighbours: dict[str, Neighbour] = {}
        waiting: list[tuple[int, tuple[str, ...]]] = [(start.number, ())]
        visited = {start.number}
        while waiting:
            number, way = waiting.pop(0)
            near = graph.steps[number].reads if backwards else [step.number for step in graph.readers(number)]
            if not backwards and number in graph.outputs:
                neighbours.setdefault("(output)", Neighbour("(output)", way))
            for other in near:
                if other < 0:
                    neighbours.setdefault("(input)", Neighbour("(input)", way))
                elif other not in visited:
                    visited.add(other)
                    step = graph.steps[other]
                    if normalizes(step) or weighs(step):
                        neighbours.setdefault(step.name, Neighbour(step.name, way))
                    else:
                        waiting.append((other, (step.kind, *way) if backwards else (*way, step.kind)))
        return tuple(neighbours.values())

    # -- parameters ---------------------------------------------------------------------------------------------

    @cached_property
    def roles(self) -> dict[str, Role]:
        """What each parameter does to the outputs of the module that reads it; tied ones under their first name.

        Cost: about ten calls of each module, in float64.
        """

        def body(model: nn.Module) -> dict[str, Role]:
            calls: dict[str, ModuleCall] = {}
            with watched(model, lambda call: calls.setdefault(call.name, call)):
                self._call(model, self.inputs)
            return roles_of(model, calls)

        return self._evaluate(body)

    # -- precision -----------------------------------------------------------------------------------

    def float64(self) -> Network:
        """Return the same network on a copy in float64 that stays there, whatever its forward asks for."""

        def forward(model: nn.Module, inputs: Any) -> Any:
            with KeepDouble():
                return self._call(model, inputs)

        return type(self)(copy_model(self.model).double(), double(self.inputs), forward=forward, mode=self.mode)

    def outputs(self, values: Mapping[str, Tensor] | None = None) -> Any:
        """Return what the model gives, at other values of some parameters if asked for."""
        return self._evaluate(lambda model: self._call(model, self.inputs), values)


def normalizes(step: Step) -> bool:
    """Tell whether a step is a normalizer, as a module or as a function."""
    return step.kind in _NORMALIZING if step.module is None else role_of(step.module) == "normalizer"


def weighs(step: Step) -> bool:
    """Tell whether a step has weights of its own that mix units."""
    if step.module is None:
        return step.kind in _WEIGHING
    return role_of(step.module) in ("affine", "recurrent") or any(p.ndim > 1 for p in step.module.parameters())
