"""A forward pass as steps: calls of leaf modules and, outside of them, of functions, each knowing what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from normgauge.network._modules import is_leaf
from normgauge.network._watch import ModuleCall, watched
from normgauge.objective import tensors

# What turns values into Python's numbers: a forward that asks for them may take another way for other inputs.
_VALUES = {"__bool__", "item", "tolist", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose"}
_VALUES |= {"is_nonzero", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage"}
Shape = tuple[int, ...]
Leaf = Callable[[nn.Module], bool]
Arguments = tuple[Any, list[Shape]]  # arguments, marked, and the shapes of the tensors among them


@dataclass(frozen=True, slots=True)
class Made:
    """Stands for a tensor among the arguments of a step.

    Attributes:
        step: number of the step that made it; -1 for an input of the model.
        place: among the tensors that step made.
    """

    step: int
    place: int = 0


@dataclass(frozen=True)
class Step:
    """One step of a forward pass.

    Attributes:
        number: its place in the order of execution.
        name: of the module; of a function its name, numbered where it is called again.
        kind: type of the module or name of the function.
        module: called; `None` for functions.
        function: called; of a module the module itself.
        args: by place; tensors that were made in this pass, and the inputs, come as `Made`.
        kwargs: by name, likewise.
        inputs: shapes of the tensors it reads.
        outputs: shapes of the tensors it makes.
        dtype: of the first tensor it makes, as torch prints it.
    """

    number: int
    name: str
    kind: str
    module: nn.Module | None
    function: Callable[..., Any]
    args: tuple[Any, ...] = field(repr=False)
    kwargs: Mapping[str, Any] = field(repr=False)
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    dtype: str

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the steps whose tensors it takes, each once; -1 for the model's input."""
        return tuple(dict.fromkeys(placeholder.step for placeholder in placeholders((self.args, self.kwargs))))


@dataclass(frozen=True)
class Graph:
    """Steps in the order of execution, and where the model's outputs come from.

    Attributes:
        steps: of one forward pass.
        ends: the tensors the model returned, as far as they were made in the pass or given to it.
        how: "exported" by torch.export, or "recorded" from one forward pass by hooks and the identity of tensors.
        steered: names of the steps that turned values into numbers of Python: other inputs may go another way.
        why: why it is not exported.
    """

    steps: tuple[Step, ...]
    ends: tuple[Made, ...]
    how: Literal["exported", "recorded"]
    steered: tuple[str, ...] = ()
    why: str = ""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Numbers of the steps that made the model's outputs, each once."""
        return tuple(dict.fromkeys(end.step for end in self.ends))

    def readers(self, number: int) -> list[Step]:
        """Return the steps that take what a step made (-1: the model's input)."""
        return [step for step in self.steps if number in step.reads]

    def times(self, name: str) -> int:
        """Return how often a module is called."""
        return sum(step.name == name for step in self.steps)


def placeholders(tree: Any) -> Iterator[Made]:
    """Yield what stands for tensors in nested arguments, in order."""
    if isinstance(tree, Made):
        yield tree
    elif isinstance(tree, (tuple, list, Mapping)):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from placeholders(item)


def replaced(tree: Any, kind: type, new: Callable[[Any], Any]) -> Any:
    """Return nested arguments with every `kind` exchanged for `new` of it."""
    if isinstance(tree, kind):
        return new(tree)
    if isinstance(tree, Mapping):
        return {name: replaced(item, kind, new) for name, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [replaced(item, kind, new) for item in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


class Names:
    """Gives functions names that differ: relu, relu_1, relu_2."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}

    def new(self, kind: str) -> str:
        """Return the next name of this kind."""
        self._times[kind] = times = self._times.get(kind, -1) + 1
        return f"{kind}_{times}" if times else kind


class Recorder(TorchFunctionMode):
    """Records the steps of a model while it runs, and which operations read its parameters.

    What torch.func or compiled extensions make is not seen.

    Args:
        model: whose submodules are watched.
        inputs: the tensors the pass begins with.
        leaf: which modules are one step; what happens inside them is not recorded.
    """

    def __init__(self, model: nn.Module, inputs: Any, leaf: Leaf = is_leaf) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.steered: list[str] = []
        self.clock = 0
        self.uses: dict[str, list[int]] = {name: [] for name, _ in model.named_parameters()}
        self._parameters = {id(value): name for name, value in model.named_parameters()}
        self._made: MutableMapping[Tensor, Made] = WeakTensorKeyDictionary()  # by identity; a tensor may die
        self._versions: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        for place, tensor in enumerate(tensors(inputs)):
            self._made[tensor], self._versions[tensor] = Made(-1, place), _version(tensor)
        self._moving = {-1}  # the steps that depend on the inputs
        self._inner: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()  # what does so inside leaves
        self._model, self._leaf, self._names = model, leaf, Names()
        self._open: list[tuple[bool, Arguments]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        with watched(self._model, self._leave, self._enter), self:
            yield

    def graph(self, outputs: Any) -> Graph:
        """Return what was recorded, given what the model returned."""
        ends = tuple(self._made[tensor] for tensor in tensors(outputs) if tensor in self._made)
        return Graph(tuple(self.steps), ends, "recorded", tuple(self.steered))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and note what it reads and makes."""
        if func is Tensor.__iter__:  # what an iterator gives would not be seen
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        kwargs = kwargs or {}
        kind = function_name(func)
        inside = any(leaf for leaf, _ in self._open)
        arguments = self._mark((args, kwargs))
        depends = any(tensor in self._inner for tensor in tensors((args, kwargs)))
        depends |= any(placeholder.step in self._moving for placeholder in placeholders(arguments[0]))
        result = func(*args, **kwargs)
        outputs = args[0] if kind == "__setitem__" else result
        if next(tensors(outputs), None) is not None:
            self.clock += 1
            for tensor in tensors((args, kwargs)):
                if id(tensor) in self._parameters:
                    self.uses[self._parameters[id(tensor)]].append(self.clock)
            if not inside:
                self._add(self._names.new(kind.strip("_")), kind, None, func, arguments, outputs)
            elif depends:
                self._inner.update(dict.fromkeys(tensors(outputs)))
        elif kind in _VALUES and depends:
            self.steered.append(kind)
        return result

    def _enter(self, call: ModuleCall) -> None:
        self._open.append((self._leaf(call.module), self._mark((call.args, call.kwargs))))

    def _leave(self, call: ModuleCall) -> None:
        leaf, arguments = self._open.pop()
        if leaf and not any(outer for outer, _ in self._open):
            kind = type(call.module).__name__.removeprefix("Parametrized")
            self._add(call.name, kind, call.module, call.module, arguments, call.output)

    def _mark(self, arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> Arguments:
        tracked = [tensor for tensor in tensors(arguments) if tensor in self._made]
        return (
            replaced(arguments, Tensor, lambda tensor: self._made.get(tensor, tensor)),
            [tuple(tensor.shape) for tensor in tracked],
        )

    def _add(
        self, name: str, kind: str, module: nn.Module | None, function: Any, arguments: Arguments, outputs: Any
    ) -> None:
        products = list(tensors(outputs))
        step = Step(
            number=len(self.steps),
            name=name,
            kind=kind,
            module=module,
            function=function,
            args=tuple(arguments[0][0]),
            kwargs=arguments[0][1],
            inputs=tuple(arguments[1]),
            outputs=tuple(tuple(tensor.shape) for tensor in products),
            dtype=str(products[0].dtype) if products else "",
        )
        self.steps.append(step)
        if self._moving & set(step.reads):
            self._moving.add(step.number)
        for place, tensor in enumerate(products):
            # a tensor that is given back as it came is still its maker's; one overwritten in place is not
            if self._versions.get(tensor) != _version(tensor):
                self._made[tensor], self._versions[tensor] = Made(step.number, place), _version(tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def function_name(function: Any) -> str:
    """Return the name of a function or method; of an attribute such as `x.T` the attribute's."""
    name = getattr(function, "__name__", type(function).__name__)
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name
