"""A network exported once and walked from input to output, each step bounded by its rule; nothing is skipped."""

import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from normgauge.errors import DataError, ModelError
from normgauge.measure.lipschitz import rules
from normgauge.measure.lipschitz.rules import Call, Form, Norms, Pending, Reach
from normgauge.network import KeepDouble, copy_model, replaced
from normgauge.network.exports import NOT_EXPORTED, Program, export_program, operation_name
from normgauge.objective import call_model, tensors
from normgauge.rng import preserved_rng

_AGREEMENT = 1e-6  # between the exported and the called model, relative to the largest output
_CHECKED = 2  # samples on which they are compared, together in one batch, so that a coupling of samples shows
_KNOWN_HOOKS = ("SpectralNorm", "WeightNorm", "_LearnSize")  # of torch and normgauge: they set the weight
_ONLY_SHAPE = ("new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like", "empty_like")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+\n\s+(.*)')
_LIBRARIES = re.compile(r"/(torch|normgauge)/")
Forward = Callable[[nn.Module, Any], Any]
Known = dict[fx.Node, Any]
aten = torch.ops.aten
Cell = Callable[[Tensor, tuple[Tensor, ...], Sequence[Tensor | None]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Step:
    """One step of the walk, as the tables show it."""

    name: str  # of the layer
    kind: str  # type of the module or name of the function
    normalizer: bool  # whether it is a normalizer
    sources: tuple[int, ...]  # numbers of the steps whose outputs it takes; -1 is the input of the network
    outcome: Reach | Pending  # what is known of its output

    def reach(self) -> Reach:
        """Return the numbers of the output; of a map that was folded into the next, an estimate."""
        return self.outcome.estimated_reach() if isinstance(self.outcome, Pending) else self.outcome


def private_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model that can be run without a trace on the original, its parameters frozen."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            home = type(hook).__module__.split(".")[0]
            if type(hook).__name__ not in _KNOWN_HOOKS or home not in ("torch", "normgauge"):
                rule = "a hook may change what a layer computes, and no rule knows it"
                step = "Remove the hook, or measure a model without it"
                raise ModelError(f"lipschitz of {name or '(model)'!r}", rule, repr(hook), step)
    twin = copy_model(model).requires_grad_(False).cpu()
    for module in twin.modules():
        if parametrize.is_parametrized(module):
            module.parametrizations.eval()  # type: ignore[union-attr] # no power iteration between two reads
    return twin


class _Embeddings(TorchFunctionMode):
    """Notes what the embeddings of a forward pass give, and puts a tensor in the place of one of them."""

    def __init__(self, number: int = -1, tensor: Tensor | None = None) -> None:
        super().__init__()
        self.number, self.tensor, self.given = number, tensor, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; one of the embeddings is exchanged."""
        result = func(*args, **(kwargs or {}))
        if func in (functional.embedding, torch.embedding):
            self.given.append(result)
            if len(self.given) - 1 == self.number and self.tensor is not None:
                return self.tensor
        return result


class Domain:
    """The data, and which tensor varies: the first floating-point one, else what the first embedding of ids gives."""

    def __init__(self, inputs: Any, forward: Forward | None = None, batch_axis: int = 0) -> None:
        self.call, self.axis = forward or call_model, batch_axis
        self.tree = replaced(inputs, Tensor, lambda leaf: leaf.detach().cpu())
        self.leaves = list(tensors(self.tree))
        real = [i for i, leaf in enumerate(self.leaves) if leaf.is_floating_point() and leaf.ndim > 1]
        self.place: int | None = real[0] if real else None
        first = self.leaves[self.place or 0] if self.leaves else None
        good = first is not None and first.ndim > max(1, batch_axis) and first.numel() > 0 and not first.is_complex()
        if not good or not all(bool(torch.isfinite(leaf).all()) for leaf in self.leaves):
            self.refuse(f"{first.dtype} of shape {tuple(first.shape)}" if first is not None else type(inputs).__name__)
        self.samples = first.shape[batch_axis]  # type: ignore[union-attr]
        self.embedding = -1  # number of the embedding that gives what varies
        self.name = "input"
        if isinstance(inputs, dict):
            self.name = next(name for name, leaf in self.tree.items() if leaf is first)

    def refuse(self, got: str) -> None:
        """Raise the error for inputs in which nothing can vary."""
        rule = "inputs are one batch [samples, ...] of finite real numbers, or of ids that an embedding reads"
        step = "Add the batch axis; distances between ids mean nothing, those between their embeddings do"
        raise DataError("lipschitz", rule, got, step)

    def select(self, rows: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Return the tensors of some samples as a batch, real ones in a type."""

        def chosen(leaf: Tensor) -> Tensor:
            axes = [axis for axis in (self.axis, 0) if leaf.ndim > axis and leaf.shape[axis] == self.samples]
            leaf = leaf.index_select(axes[0], torch.tensor(rows)) if axes else leaf
            return leaf.to(dtype) if leaf.is_floating_point() else leaf

        return [chosen(leaf) for leaf in self.leaves]

    def rebuilt(self, leaves: Sequence[Tensor]) -> Any:
        """Return the inputs with other tensors."""
        given = iter(leaves)
        return replaced(self.tree, Tensor, lambda _: next(given))

    def output(self, model: nn.Module, leaves: Sequence[Tensor]) -> Tensor:
        """Return the model's one output on tensors of a batch, the batch first."""
        outputs = [t for t in tensors(self.call(model, self.rebuilt(leaves))) if t.is_floating_point()]
        count = leaves[self.place or 0].shape[self.axis]
        if len(outputs) != 1:
            rule, got = "the model must return one tensor that depends on its input", f"{len(outputs)} tensors"
            raise ModelError("lipschitz", rule, got, "Choose one: forward=lambda model, x: model(**x).logits")
        moved = self.axis if outputs[0].ndim > self.axis and outputs[0].shape[self.axis] == count else 0
        return outputs[0].movedim(moved, 0)

    def points(self, model: nn.Module, dtype: torch.dtype) -> Tensor:
        """Return the data as points of the space in which they vary, the batch first."""
        leaves = self.select(range(self.samples), dtype)
        if self.place is not None:
            return leaves[self.place].movedim(self.axis, 0)
        with torch.no_grad(), _Embeddings() as seen:
            self.call(model, self.rebuilt(leaves))
        return seen.given[self.embedding].movedim(self.axis, 0)

    def function(self, model: nn.Module, rows: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """Return the map from points, one for each row, to outputs; other inputs are those of the rows."""

        def run(points: Tensor) -> Tensor:
            leaves, moved = self.select(rows, points.dtype), points.movedim(0, self.axis)
            if self.place is not None:
                leaves[self.place] = moved
                return self.output(model, leaves)
            with _Embeddings(self.embedding, moved):
                return self.output(model, leaves)

        return run


def _export(model: nn.Module, domain: Domain) -> Program:
    def call(root: nn.Module, inputs: Any) -> Tensor:
        with KeepDouble():
            return domain.output(root, list(tensors(inputs)))

    sample = domain.rebuilt(domain.select([0]))
    try:
        with torch.no_grad(), preserved_rng(), warnings.catch_warnings(action="ignore"):
            return export_program(model, call, sample, DECOMPOSITIONS)
    except (ModelError, DataError):
        raise
    except NOT_EXPORTED as error:
        if domain.place is None and not any(isinstance(m, nn.Embedding) for m in model.modules()):
            domain.refuse(str(domain.leaves[0].dtype))
        message = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        rule = "the model must take any number of samples, one alone too, and its steps must not depend on values"
        got = f"{message[:300]}{line_of(''.join(traceback.format_tb(error.__traceback__)))}"
        step = "Rewrite that line, or register a rule for its module (ng.register_lipschitz_rule)"
        raise ModelError(f"lipschitz of {type(model).__name__}", rule, got, step) from error


def line_of(stack: str | None) -> str:
    """Return the innermost line of a stack that is not torch's or ours, to be put behind a name."""
    frames = _FRAME.findall(stack or "")
    own = [frame for frame in frames if not _LIBRARIES.search(frame[0])] or frames
    return f" ({'/'.join(own[-1][0].split('/')[-2:])}:{own[-1][1]}: {own[-1][2].strip()})" if own else ""


@dataclass(frozen=True)
class Operation:
    """A call of a module that has a rule, or an operation of torch."""

    name: str  # path of the module; of an operation the path of the module it stands in and its name
    kind: str  # type of the module or name of the operation
    module: nn.Module | None  # called; `None` for operations
    nodes: tuple[fx.Node, ...] = field(repr=False)  # what it is made of
    result: fx.Node = field(repr=False)  # the node it gives
    where: str  # the line of the model


class Walk:
    """The walk through a model in float64, sample by sample; norms of layers are taken once and kept."""

    def __init__(self, model: nn.Module, domain: Domain) -> None:
        self.program, self.domain = _export(model, domain), domain
        self.source = self._source()
        self.norms: Norms = {}
        self.steps: list[Step] = []
        self.gains: dict[str, float] = {}  # norms of single linear operations, by the name of their node
        self.written: dict[fx.Node, tuple[fx.Node, Form]] = {}  # norms written by hand: what they normalize, and how
        self.operations = tuple(self._operations())

    def _source(self) -> fx.Node:
        if self.domain.place is not None:
            return self.program.inputs[self.domain.place]
        ids = self.program.dependent(self.program.inputs)
        embeddings = [node for node in self.program.nodes if operation_name(node) == "embedding"]
        reading = [i for i, node in enumerate(embeddings) if node in ids]
        if not reading:
            self.domain.refuse(str(self.domain.leaves[0].dtype))
        self.domain.embedding = reading[0]
        self.domain.name = f"embedding of {self.domain.name} by {_place(embeddings[reading[0]]) or 'the model'}"
        return embeddings[reading[0]]

    def _operations(self) -> Iterator[Operation]:
        names: dict[str, int] = {}
        for path, nodes in self.program.groups(_is_one_step):
            last, module = nodes[-1], self.program.root.get_submodule(path) if path else None
            inner, kind = _place(last), operation_name(last)
            name = f"{inner}.{kind.strip('_')}" if inner else kind.strip("_")
            if module is not None:
                name, kind = _short(path) or "(model)", type(module).__name__.removeprefix("Parametrized")
            again = names[name] = names.get(name, -1) + 1
            if again and module is None:
                name = f"{name}_{again}"
            results = [n for n in nodes if n in self.program.outputs or any(user not in nodes for user in n.users)]
            result = results[0] if len(results) == 1 else last
            where = line_of(last.meta.get("stack_trace"))
            yield Operation(name, kind, module, tuple(nodes), result, where)

    def values(self, datum: int) -> Known:
        """Return what each node gives at a datum."""
        with torch.no_grad():
            return self.program.values(self.domain.select([datum]))

    @torch.no_grad()
    def run(self, values: Known, radius: float = 0.0, source: fx.Node | None = None) -> Reach:
        """Return what is known of the output near the datum of some values; the steps are in `steps`."""
        source = source or self.source
        reaches: Known = {source: Reach.of_inputs(values[source], radius)}
        places: dict[fx.Node, tuple[int, ...]] = {source: (-1,)}
        moving = self.program.dependent([source])
        given = self.program.dependent(self.program.inputs) - moving
        self.steps, self.written = [], {}
        for operation in self.operations:
            used = operation.result.users or operation.result in self.program.outputs
            if used and source not in operation.nodes and operation.result in moving:
                self._bound(operation, reaches, values, places, given)
        end = self.program.outputs[0]
        if end not in reaches:
            raise ModelError("lipschitz", "the output must depend on the input", "one that does not", "Return another")
        return cast(Reach, rules.certify(reaches[end]))

    def _bound(
        self, operation: Operation, reaches: Known, values: Known, places: dict[fx.Node, Any], given: set[fx.Node]
    ) -> None:
        name, kind, module, value = operation.name, operation.kind, operation.module, values[operation.result]
        parents = list(dict.fromkeys(p for node in operation.nodes for p in node.all_input_nodes))
        parents = [p for p in parents if p not in operation.nodes and p not in self.program.constants]
        if kind in _ONLY_SHAPE or not any(p in reaches for p in parents):
            return
        if next(tensors(value), None) is None:
            if kind.startswith("sym_"):  # sizes are part of the shape
                return
            told = "the steps of the model may not depend on the values of the input"
            step = "Register a rule for the module that does it (ng.register_lipschitz_rule), or rewrite that line"
            raise ModelError(f"lipschitz of {name!r}", told, f"{kind}{operation.where}", step)
        rule = rules.rule_of_module(module) if module is not None else rules.rule_of_function(kind)
        if rule is None:
            got = f"{kind}{operation.where}, which has none"
            step = "Register one for its module with ng.register_lipschitz_rule, or rewrite that line"
            raise ModelError(f"lipschitz of {name!r}", "every step needs a rule; nothing is skipped", got, step)

        own = not given.isdisjoint(parents)  # weights that other inputs give are other ones at every datum

        def resolve(node: fx.Node) -> Any:
            known = reaches.get(node, values[node])
            return known if rule.folds and not own else rules.certify(known)

        last = operation.nodes[-1]
        args: Any = tuple(resolve(parent) for parent in parents)
        kwargs: Any = {}
        if module is None:
            args, kwargs = fx.node.map_arg((last.args, dict(last.kwargs)), resolve)
        made = {"value": value, "norms": {} if own else self.norms, "function": last.target, "where": operation.where}
        call = Call(name, kind, module, tuple(args), kwargs, **made)
        dependent = call.dependent_arguments()
        if not rule.several and (len(dependent) != 1 or dependent[0] is not call.input):
            raise call.refuse("one argument, the first, may depend on the input", f"{len(dependent)} that do")
        real = tensors(value[:1] if kind in ("max", "min") and not isinstance(value, Tensor) else value)  # not indices
        narrow = [tensor.dtype for tensor in real if tensor.dtype not in (torch.float32, torch.float64)]
        if narrow:  # rounding to a coarser grid is a staircase
            raise call.refuse("steps must stay among real numbers of 32 or 64 bits", f"an output of {narrow[0]}")
        bound = rule.bound(call)
        if isinstance(bound, Tensor):  # only its shape or type depends on the input
            return
        reaches[operation.result] = bound
        if isinstance(bound, Reach) and bound.form is not None and bound.form.kind == "written":
            bases = [p for p in parents if rules.certify(reaches.get(p)) is bound.form.base]
            self.written.update((operation.result, (base, bound.form)) for base in bases)
        sources = tuple(dict.fromkeys(place for node in parents if node in reaches for place in places[node]))
        places[operation.result] = sources
        if rule.shown:
            outcome = bound[0] if isinstance(bound, tuple) else bound
            self.steps.append(Step(name, kind.strip("_"), rule.normalizer, sources, outcome.drop_value()))
            places[operation.result] = (len(self.steps) - 1,)


def _short(path: str) -> str:
    """Return a path inside the user's model."""
    return path.partition(".")[2]


def _place(node: fx.Node) -> str:
    """Return the path of the module in which an operation stands."""
    return _short(list((node.meta.get("nn_module_stack") or {"": ("",)}).values())[-1][0])


def _is_one_step(module: nn.Module) -> bool:
    container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return not container and rules.rule_of_module(module) is not None


def check_agreement(called: nn.Module, walk: Walk) -> None:
    """Compare the exported steps, sample by sample, with the model's own output on a batch of them."""
    rows = list(range(min(_CHECKED, walk.domain.samples)))
    try:
        with torch.no_grad():
            direct = walk.domain.output(called, walk.domain.select(rows)).reshape(len(rows), -1)
    except RuntimeError as error:
        rule = "the model must take any number of samples"
        raise ModelError("lipschitz", rule, str(error), "Take sizes from the input") from error
    alone = torch.stack([walk.values(row)[walk.program.outputs[0]].flatten() for row in rows])
    gap = float((direct - alone).abs().max()) if direct.shape == alone.shape and direct.numel() else 0.0
    limit = _AGREEMENT * max(1.0, float(direct.abs().max()) if direct.numel() else 0.0)
    if direct.shape != alone.shape or (not gap <= limit and bool(torch.isfinite(direct).all())):
        rule = "the exported steps must give, sample by sample, what the model gives on a batch"
        got, step = f"outputs that differ by {gap:.3g}", "Samples must not see each other, nor steps round to 16 bits"
        raise ModelError(f"lipschitz of {type(called).__name__}", rule, got, step)


def _gates(x: Tensor, h: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
    return functional.linear(x, weights[0], weights[2]) + functional.linear(h, weights[1], weights[3])  # type: ignore[arg-type]


def _lstm_cell(x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    i, f, g, o = _gates(x, state[0], weights).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    out = o.sigmoid() * cell.tanh()
    return (out if weights[4] is None else functional.linear(out, weights[4])), cell


def _gru_cell(x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    own = functional.linear(x, weights[0], weights[2]).chunk(3, -1)  # type: ignore[arg-type]
    kept = functional.linear(state[0], weights[1], weights[3]).chunk(3, -1)  # type: ignore[arg-type]
    reset, update = (own[0] + kept[0]).sigmoid(), (own[1] + kept[1]).sigmoid()
    new = (own[2] + reset * kept[2]).tanh()
    return (new + update * (state[0] - new),)


def _recurrent(cell: Cell, count: int) -> Callable[..., tuple[Tensor, ...]]:
    def run(
        x: Tensor, start: Any, parameters: Sequence[Tensor], has_biases: bool, layers: int, *rest: Any
    ) -> tuple[Tensor, ...]:
        """Return the outputs and the last states of a recurrent network of torch's."""
        _, _, both, batch_first = rest  # neither dropout nor training
        states, ways = [start] if isinstance(start, Tensor) else list(start), 2 if both else 1
        size = len(parameters) // (layers * ways)
        projected = size - (4 if has_biases else 2)
        x = x.transpose(0, 1) if batch_first else x
        last: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            outputs = []
            for way in range(ways):
                number = layer * ways + way
                own = list(parameters[number * size : (number + 1) * size])
                weights = [*own[:2], *(own[2:4] if has_biases else (None, None)), own[-1] if projected else None]
                state = tuple(s[number] for s in states)
                seen: list[Tensor] = []
                for step in reversed(x.unbind(0)) if way else x.unbind(0):
                    state = cell(step, state, weights)
                    seen.append(state[0])
                outputs.append(torch.stack(seen[::-1] if way else seen, 0))
                last.append(state)
            x = torch.cat(outputs, -1) if both else outputs[0]
        ends = [torch.stack([state[i] for state in last], 0) for i in range(count)]
        return (x.transpose(0, 1) if batch_first else x, *ends)

    return run


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda x, state, weights: (activation(_gates(x, state[0], weights)),)


def _einsum(equation: str, operands: Sequence[Tensor], *, path: Any = None) -> Tensor:
    """Contract operands from left to right by products of matrices."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    labels = left.split(",")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    spare = max(0, *(x.ndim - len(own.replace(".", "")) for x, own in zip(operands, labels, strict=True)))
    dots = free[:spare]  # what an ellipsis stands for, counted from the right
    wide = [
        own.replace("...", "".join(dots[spare - (x.ndim - len(own) + 3) :]))
        for x, own in zip(operands, labels, strict=True)
    ]
    if not arrow:
        right = "..." + "".join(sorted(c for c in set(left) - set(".,") if left.count(c) == 1))
    target = right.replace("...", "".join(dots)) if "..." in left else right.replace("...", "")
    if any(len(set(own)) < len(own) for own in wide):
        raise NotImplementedError("einsum with an index twice in one operand")
    x, own = operands[0], wide[0]
    for number in range(1, len(operands)):
        later = set(target).union(*wide[number + 1 :])
        x, own = _contract(x, own, operands[number], wide[number], later)
    x, own = _sum_out(x, own, set(target))
    return x.permute([own.index(c) for c in target])


def _sum_out(x: Tensor, own: str, kept: set[str]) -> tuple[Tensor, str]:
    gone = [i for i, c in enumerate(own) if c not in kept]
    return (x.sum(gone) if gone else x), "".join(c for c in own if c in kept)


def _contract(x: Tensor, of_x: str, y: Tensor, of_y: str, later: set[str]) -> tuple[Tensor, str]:
    x, of_x = _sum_out(x, of_x, later | set(of_y))
    y, of_y = _sum_out(y, of_y, later | set(of_x))
    both = [c for c in of_x if c in of_y]
    batch, inner = [c for c in both if c in later], [c for c in both if c not in later]
    only_x, only_y = [c for c in of_x if c not in of_y], [c for c in of_y if c not in of_x]
    sizes = {**dict(zip(of_x, x.shape, strict=True)), **dict(zip(of_y, y.shape, strict=True))}
    total = [math.prod(sizes[c] for c in group) for group in (batch, only_x, inner, only_y)]
    left = x.permute([of_x.index(c) for c in (*batch, *only_x, *inner)]).reshape(total[0], total[1], total[2])
    right = y.permute([of_y.index(c) for c in (*batch, *inner, *only_y)]).reshape(total[0], total[2], total[3])
    order = (*batch, *only_x, *only_y)
    return torch.bmm(left, right).reshape([sizes[c] for c in order]), "".join(order)


def _variance(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    axes = list(range(x.ndim)) if dim is None else list(dim)
    centred = x - x.mean(axes, keepdim=True)
    square = centred.pow(2).mean(axes, keepdim=keepdim)
    count = x.numel() // max(1, square.numel())
    less = 1.0 if correction is None else float(correction)
    return square if less == 0 else square * (count / (count - less))


def _deviation(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _variance(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _variance_and_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    axes = list(range(x.ndim)) if dim is None else list(dim)
    return _variance(x, dim, correction=correction, keepdim=keepdim), x.mean(axes, keepdim=keepdim)


def _of_dim(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim=None, unbiased=True, keepdim=False: function(
        x, dim, correction=1.0 if unbiased else 0.0, keepdim=keepdim
    )


def _instances(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, use: bool, *rest: Any) -> Tensor:
    if not use:
        return functional.batch_norm(x, mean, var, weight=weight, bias=bias, eps=rest[1])
    return functional.group_norm(x, x.shape[1], weight, bias, rest[1])


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.lstm.input: _recurrent(_lstm_cell, 2),
    aten.gru.input: _recurrent(_gru_cell, 1),
    aten.rnn_tanh.input: _recurrent(_plain_cell(torch.tanh), 1),
    aten.rnn_relu.input: _recurrent(_plain_cell(torch.relu), 1),
    aten.einsum.default: _einsum,
    aten.baddbmm.default: lambda x, a, b, *, beta=1.0, alpha=1.0: beta * x + alpha * torch.bmm(a, b),
    aten.var.correction: _variance,
    aten.std.correction: _deviation,
    aten.var_mean.correction: _variance_and_mean,
    aten.var.dim: _of_dim(_variance),
    aten.std.dim: _of_dim(_deviation),
    aten.var_mean.dim: _of_dim(_variance_and_mean),
    aten.norm.ScalarOpt_dim: lambda x, p, dim, keepdim=False: torch.linalg.vector_norm(
        x, 2 if p is None else p, dim, keepdim
    ),
    aten.instance_norm.default: _instances,
}
