"""The steps of a model as torch.export sees them: its operations, put together again into calls of leaf modules."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, export, fx, nn

from normgauge.network._call_order import Graph, Leaf, Made, Names, Step
from normgauge.objective import tensors

_MAY_DO_NOTHING = ("to", "contiguous", "type_as", "flatten", "dropout", "dropout_", "feature_dropout")


class _Called(nn.Module):
    """Lets torch.export run any call of a model."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, inputs: Any) -> list[Tensor]:
        """Return the tensors of the output."""
        return list(tensors(self.call(self.model, inputs)))


def export_graph(model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any, leaf: Leaf) -> Graph:
    """Return the steps of `call(model, inputs)`, the same whatever the values of the inputs are; nothing is computed.

    Raises:
        Exception: of many kinds, where torch.export cannot follow the model.
    """
    wrapped = _Called(model, call)
    program = export.export(wrapped, (inputs,), strict=False)
    state = {**program.state_dict, **program.constants}
    lifted = {**program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers}
    lifted |= program.graph_signature.inputs_to_lifted_tensor_constants
    sources: dict[fx.Node, Any] = {}
    groups: dict[Any, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            own = lifted.get(node.name)
            sources[node] = (
                Made(-1, sum(isinstance(m, Made) for m in sources.values())) if own is None else state.get(own)
            )
        elif node.op == "call_function" and any(True for _ in tensors(node.meta.get("val"))):
            stack = (node.meta.get("nn_module_stack") or {}).items()
            inside = (key for key, (name, _) in stack if name and leaf(wrapped.get_submodule(name)))
            groups.setdefault(next(inside, node), []).append(node)
    names, steps = Names(), list[Step]()
    for key, nodes in groups.items():
        if isinstance(key, fx.Node) and key.target is operator.getitem:  # one of several tensors a step made
            sources[key] = Made(sources[key.args[0]].step, int(key.args[1]))  # type: ignore[index,arg-type]
            continue
        steps.append(_step(len(steps), key, nodes, sources, wrapped, names))
        for node in nodes:
            place = node.args[1] if node.target is operator.getitem else 0
            own = Made(steps[-1].number, int(place) if isinstance(place, int) else 0)
            sources[node] = sources[node.args[0]] if _does_nothing(node) else own  # type: ignore[index]
    last = next(node for node in program.graph.nodes if node.op == "output")
    ends = tuple(sources[node] for node in last.all_input_nodes if isinstance(sources.get(node), Made))
    return Graph(tuple(steps), ends, "exported")


def _does_nothing(node: fx.Node) -> bool:
    """Tell whether an operation gave back the tensor it took: whoever took it before takes the same one."""
    if _kind(node) not in _MAY_DO_NOTHING or not isinstance(node.args[0], fx.Node):
        return False
    if "dropout" in _kind(node) and node.args[2]:  # training
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    return before.shape == after.shape and before.dtype == after.dtype and before.device == after.device


def _kind(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target).__name__)  # type: ignore[union-attr]


def _step(
    number: int, key: Any, nodes: list[fx.Node], sources: dict[fx.Node, Any], wrapped: nn.Module, names: Names
) -> Step:
    outside = [parent for node in nodes for parent in node.all_input_nodes if isinstance(sources.get(parent), Made)]
    outside = list(dict.fromkeys(outside))
    last = nodes[-1]
    if key is last:  # a function
        kind = _kind(last)
        name, module, function = names.new(kind.strip("_")), None, last.target
        args, kwargs = fx.node.map_arg((last.args, dict(last.kwargs)), lambda parent: sources.get(parent))
    else:
        path = next(path for own, (path, _) in last.meta["nn_module_stack"].items() if own == key)
        module = function = wrapped.get_submodule(path)
        kind, name = type(module).__name__.removeprefix("Parametrized"), path.removeprefix("model.")
        name = "(model)" if path == "model" else name
        args, kwargs = tuple(sources[parent] for parent in outside), {}
    values = list(tensors(last.meta["val"]))
    return Step(
        number=number,
        name=name,
        kind=kind,
        module=module,
        function=function,
        args=tuple(args),
        kwargs=kwargs,
        inputs=tuple(tuple(t.shape) for parent in outside for t in tensors(parent.meta["val"])),
        outputs=tuple(tuple(value.shape) for value in values),
        dtype=str(values[0].dtype),
    )
