"""A model as torch.export sees it: its operations, alone or put together again into calls of leaf modules."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, export, fx, nn

from normgauge.network._call_order import Graph, Leaf, Made, Names, Step, replaced
from normgauge.objective import tensors

_MAY_DO_NOTHING = ("to", "contiguous", "type_as", "flatten", "dropout", "dropout_", "feature_dropout")
# what torch.export raises, from within itself or a user's forward, where it cannot follow
NOT_EXPORTED = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, LookupError, ImportError)
Decompositions = Mapping[Any, Callable[..., Any]]


class _Called(nn.Module):
    """Lets torch.export run any call of a model on the tensors of its inputs."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any) -> None:
        super().__init__()
        self.model, self.call, self.inputs = model, call, inputs

    def forward(self, *leaves: Tensor) -> list[Tensor]:
        given = iter(leaves)
        return list(tensors(self.call(self.model, replaced(self.inputs, Tensor, lambda _: next(given)))))


@dataclass(frozen=True)
class Program:
    """Operations on tensors in order, the same whatever the values of inputs of these shapes are."""

    root: nn.Module  # holds the model as `model`; paths of modules in the nodes start here
    nodes: tuple[fx.Node, ...]
    constants: dict[fx.Node, Any]  # parameters, buffers and other tensors the operations read
    inputs: tuple[fx.Node, ...]  # of the tensors of the inputs, in order
    outputs: tuple[fx.Node, ...]

    def dependent(self, starts: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the nodes that depend on some, these among them."""
        moving = set(starts)
        for node in self.nodes:
            if any(parent in moving for parent in node.all_input_nodes):
                moving.add(node)
        return moving

    def values(self, leaves: Sequence[Tensor]) -> dict[fx.Node, Any]:
        """Return what each node gives on inputs."""
        values: dict[fx.Node, Any] = {**self.constants, **dict(zip(self.inputs, leaves, strict=True))}
        for node in self.nodes:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda parent: values[parent])
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return values

    def groups(self, leaf: Leaf) -> Iterator[tuple[str, list[fx.Node]]]:
        """Yield the nodes of each call of a leaf module with its path, and each other node by itself with none."""
        calls: dict[Any, tuple[str, list[fx.Node]]] = {}
        for node in self.nodes:
            stack = (node.meta.get("nn_module_stack") or {}).items()
            inside = ((key, path) for key, (path, _) in stack if path and leaf(self.root.get_submodule(path)))
            key, path = next(inside, (node, ""))
            calls.setdefault(key, (path, []))[1].append(node)
        yield from calls.values()


def export_program(
    model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any, decompositions: Decompositions | None = None
) -> Program:
    """Return `call(model, inputs)` as operations; nothing is computed. What is no tensor among the inputs is constant.

    `decompositions` are operations to be written in others; with them, nothing is changed in place either.
    """
    root = _Called(model, call, inputs)
    exported = export.export(root, tuple(tensors(inputs)), strict=False)
    program = _read(exported, root)
    if decompositions is not None:
        moving = program.dependent(program.inputs)
        if any(node.target in decompositions or (_writes(node) and node in moving) for node in program.nodes):
            program = _read(exported.run_decompositions(dict(decompositions)), root)
    return program


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _read(exported: export.ExportedProgram, root: nn.Module) -> Program:
    signature, state = exported.graph_signature, {**exported.state_dict, **exported.constants}
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted |= signature.inputs_to_lifted_tensor_constants
    given = [node for node in exported.graph.nodes if node.op == "placeholder"]
    parts = [node for node in exported.graph.nodes if node.op == "get_attr"]  # what runs without gradients or autocast
    inner = {node: operator.attrgetter(str(node.target))(exported.graph_module) for node in parts}
    last = next(node for node in exported.graph.nodes if node.op == "output")
    returned = [node for node in last.all_input_nodes if node.name in signature.user_outputs]
    return Program(
        root=root,
        nodes=tuple(node for node in exported.graph.nodes if node.op == "call_function"),
        constants={node: state.get(lifted[node.name]) for node in given if node.name in lifted} | inner,
        inputs=tuple(node for node in given if node.name not in lifted),
        outputs=tuple(returned),
    )


def export_graph(model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any, leaf: Leaf) -> Graph:
    """Return the steps of `call(model, inputs)`, the same whatever the values of the inputs; nothing is computed."""
    program = export_program(model, call, inputs)
    sources: dict[fx.Node, Any] = {**program.constants}
    sources |= {node: Made(-1, place) for place, node in enumerate(program.inputs)}
    names, steps = Names(), list[Step]()
    for path, members in program.groups(leaf):
        nodes = [node for node in members if any(True for _ in tensors(node.meta.get("val")))]
        if not nodes:
            continue
        if not path and nodes[0].target is operator.getitem:  # one of several tensors a step made
            sources[nodes[0]] = Made(sources[nodes[0].args[0]].step, int(nodes[0].args[1]))  # type: ignore[index,arg-type]
            continue
        steps.append(_step(len(steps), path, nodes, sources, program.root, names))
        for node in nodes:
            place = node.args[1] if node.target is operator.getitem else 0
            own = Made(steps[-1].number, int(place) if isinstance(place, int) else 0)
            sources[node] = sources[node.args[0]] if _does_nothing(node) else own  # type: ignore[index]
    ends = tuple(sources[node] for node in program.outputs if isinstance(sources.get(node), Made))
    return Graph(tuple(steps), ends, "exported")


def _does_nothing(node: fx.Node) -> bool:
    """Tell whether an operation gave back the tensor it took: whoever took it before takes the same one."""
    if operation_name(node) not in _MAY_DO_NOTHING or not isinstance(node.args[0], fx.Node):
        return False
    if "dropout" in operation_name(node) and node.args[2]:  # training
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    return before.shape == after.shape and before.dtype == after.dtype and before.device == after.device


def operation_name(node: fx.Node) -> str:
    """Return the name of an operation, without its overload."""
    return str(getattr(node.target, "overloadpacket", node.target).__name__)  # type: ignore[union-attr]


def _step(
    number: int, path: str, nodes: list[fx.Node], sources: dict[fx.Node, Any], root: nn.Module, names: Names
) -> Step:
    parents = dict.fromkeys(parent for node in nodes for parent in node.all_input_nodes)
    outside, last = [parent for parent in parents if isinstance(sources.get(parent), Made)], nodes[-1]
    if not path:  # a function
        kind = operation_name(last)
        name, module, function = names.new(kind.strip("_")), None, last.target
        args, kwargs = fx.node.map_arg((last.args, dict(last.kwargs)), lambda parent: sources.get(parent))
    else:
        module = function = root.get_submodule(path)
        kind, name = type(module).__name__.removeprefix("Parametrized"), path.removeprefix("model.")
        name = "(model)" if path == "model" else name
        args, kwargs = tuple(sources[parent] for parent in outside), {}
    values = list(tensors(last.meta["val"]))
    return Step(
        number=number,
        name=name,
        kind=kind,
        module=module,
        function=function,  # type: ignore[arg-type]
        args=tuple(args),
        kwargs=kwargs,
        inputs=tuple(tuple(t.shape) for parent in outside for t in tensors(parent.meta["val"])),
        outputs=tuple(tuple(value.shape) for value in values),
        dtype=str(values[0].dtype),
    )
