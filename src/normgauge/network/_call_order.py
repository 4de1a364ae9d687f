"""A forward pass as it runs: calls of submodules, torch's operations, and steps that each know what they read."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from normgauge.network._modules import is_leaf
from normgauge.objective import tensors

# What turns values into Python's numbers: a forward that asks for them may take another way for other inputs.
_VALUES = {"__bool__", "item", "tolist", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose"}
_VALUES |= {"is_nonzero", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage"}
Shape = tuple[int, ...]
Leaf = Callable[[nn.Module], bool]
Arguments = tuple[Any, list[Shape]]  # arguments, marked, and the shapes of the tensors among them


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a submodule."""

    name: str  # of the module, "(model)" for the model itself
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None  # also while it is being entered
    leaf: bool = True  # whether no other submodule was called inside

    @property
    def given(self) -> Tensor | None:
        return first_tensor((self.args, self.kwargs))

    @property
    def made(self) -> Tensor | None:
        return first_tensor(self.output)


def first_tensor(tree: Any) -> Tensor | None:
    """Return the first tensor of a module's output: itself, or inside a tuple, list, mapping or Hugging Face output."""
    return next(tensors(tree), None)


@contextmanager
def watched(
    model: nn.Module,
    called: Callable[[ModuleCall], object],
    entering: Callable[[ModuleCall], object] | None = None,
    *,
    inside: bool = False,
) -> Iterator[None]:
    """Report every call of a submodule to `called`, in order of completion, and to `entering` before it begins.

    Hooks are removed on exit, also after an exception; use it inside an evaluation that leaves no trace. `inside`
    leaves the model itself out: hooks cannot come and go while its own call is under way.
    """
    stack: list[bool] = []  # per open call: is it still a leaf?
    handles = []

    def hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if stack:
                stack[-1] = False
            stack.append(True)
            if entering is not None:
                entering(ModuleCall(name, module, args, kwargs))

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            called(ModuleCall(name, module, args, kwargs, output, stack.pop() if stack else True))

        return enter, leave

    for name, module in model.named_modules():
        if inside and module is model:
            continue
        enter, leave = hooks(name or "(model)")
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Operations(TorchDispatchMode):
    """Reports every operation torch carries out, below its functions, as `report(name, args, result)`."""

    def __init__(self, report: Callable[[str, tuple[Any, ...], Any], None]) -> None:
        super().__init__()
        self.report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.report(func.overloadpacket.__name__, args, result)
        return result


@dataclass(frozen=True, slots=True)
class Made:
    """Stands for a tensor among the arguments of a step."""

    step: int  # number of the step that made it; -1 for an input of the model
    place: int = 0  # among the tensors that step made


@dataclass(frozen=True)
class Step:
    """One step of a forward pass; tensors made in this pass, and the inputs, are `Made` among its arguments."""

    number: int  # its place in the order of execution
    name: str  # of the module; of a function its name, numbered where it is called again
    kind: str  # type of the module or name of the function
    module: nn.Module | None  # `None` for functions
    function: Callable[..., Any]  # of a module the module itself
    args: tuple[Any, ...] = field(repr=False)
    kwargs: Mapping[str, Any] = field(repr=False)
    inputs: tuple[Shape, ...]  # of the tensors it reads
    outputs: tuple[Shape, ...]
    dtype: str  # of the first tensor it makes, as torch prints it

    @property
    def values(self) -> tuple[Made, ...]:
        """What stands for the tensors it takes, in order."""
        return tuple(placeholders((self.args, self.kwargs)))

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the steps whose tensors it takes, each once; -1 for the model's input."""
        return tuple(dict.fromkeys(value.step for value in self.values))


@dataclass(frozen=True)
class Graph:
    """Steps in the order of execution, and where the model's outputs come from.

    "exported" by torch.export, or "recorded" from one forward pass by hooks and the identity of tensors.
    """

    steps: tuple[Step, ...]
    ends: tuple[Made, ...]  # the tensors the model returned, as far as they were made in the pass or given to it
    how: Literal["exported", "recorded"]
    steered: tuple[str, ...] = ()  # steps that turned values into numbers of Python: other inputs may go another way
    why: str = ""  # it is not exported

    @property
    def outputs(self) -> tuple[int, ...]:
        """Numbers of the steps that made the model's outputs, each once."""
        return tuple(dict.fromkeys(end.step for end in self.ends))

    def readers(self, number: int) -> list[Step]:
        """Return the steps that take what a step made (-1: the model's input)."""
        return [step for step in self.steps if number in step.reads]

    def times(self, name: str) -> int:
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
        self._times[kind] = times = self._times.get(kind, -1) + 1
        return f"{kind}_{times}" if times else kind


class Recorder(TorchFunctionMode):
    """Records the steps of a model while it runs on `inputs`, and which operations read its parameters.

    What happens inside a `leaf` is one step. What torch.func or compiled extensions make is not seen.
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
        with watched(self._model, self._leave, self._enter), self:
            yield

    def graph(self, outputs: Any) -> Graph:
        """Return what was recorded, given what the model returned."""
        ends = tuple(self._made[tensor] for tensor in tensors(outputs) if tensor in self._made)
        return Graph(tuple(self.steps), ends, "recorded", tuple(self.steered))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        shapes = [tuple(tensor.shape) for tensor in tensors(arguments) if tensor in self._made]
        return replaced(arguments, Tensor, lambda tensor: self._made.get(tensor, tensor)), shapes

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
