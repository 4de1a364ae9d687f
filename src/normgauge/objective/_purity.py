"""Leave no trace: run any function of a model on functional parameters; flags, attributes, random state come back."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils import checkpoint

from normgauge.objective._composites import ClipsNothingInPlace, TwiceDifferentiable
from normgauge.objective._snapshot import Alias, Snapshot
from normgauge.rng import preserved_rng, seed_everything
from normgauge.threads import MEASURING

Mode = Literal["train", "eval"]
T = TypeVar("T")


@contextmanager
def untouched(model: nn.Module, mode: Mode, seed: int) -> Iterator[list[Alias]]:
    """Put `model` into `mode` with a fixed random stream; restore flags, attributes and random state on exit.

    Values of parameters and buffers are not saved here: the caller runs the model on functional copies of them.
    The fixed stream makes dropout draw the same mask at every evaluation. One thread at a time is inside. Given are the
    places at which the model keeps its parameters a second time, for `call_purely`.
    """
    # buffers cloned in a caller's inference mode could not be written later; leaving it switches gradients on
    ordinary = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    clips = any(getattr(module, "max_norm", None) is not None for module in model.modules())
    with ordinary, as_written(), ClipsNothingInPlace() if clips else nullcontext():
        spared = (*model.parameters(), *model.buffers())
        snapshot = Snapshot([model], spared)
        seed_everything(seed)
        try:
            model.train(mode == "train")
            yield snapshot.aliases
        finally:
            snapshot.restore()


@contextmanager
def as_written() -> Iterator[None]:
    """Run models as their forward is written: nothing recomputed, read from a cache or compiled.

    Random states are those from before afterwards. One thread at a time is inside.
    """
    compiled = "torch._dynamo" in sys.modules  # else nothing was compiled, and importing it takes seconds
    with (
        preserved_rng(),
        _computed_once(),
        _replaced(parametrize, "_cache_enabled", 0),  # a user's open `parametrize.cached()` holds weights of its start
        _replaced(parametrize, "_cache", {}),
        # compiled graphs cannot be differentiated twice
        torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
    ):
        yield


@contextmanager
def _computed_once() -> Iterator[None]:
    """Keep activations that `torch.utils.checkpoint` would throw away.

    It computes them again in the backward pass, from whatever weights the model has then: its own, not those it was
    given functionally. The derivative would be that of another point, without a word.
    """
    with ExitStack() as stack:
        stack.enter_context(_replaced(checkpoint, "CheckpointFunction", _CalledDirectly))
        wrapper = sys.modules.get("torch.distributed._composable.checkpoint_activation")  # has names for itself
        for place in (checkpoint, wrapper):  # older torch has the first name alone
            for suffix in ("", "_impl"):
                name = f"_checkpoint_without_reentrant_generator{suffix}"
                if hasattr(place, name):
                    stack.enter_context(_replaced(place, name, _recompute_nothing))
        yield


class _CalledDirectly:
    """Stands for the autograd function of reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _recompute_nothing(*_: Any, **__: Any) -> Iterator[None]:
    """Stand for the generator around the call of a checkpoint that is not reentrant."""
    yield


@contextmanager
def _replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, original)


@contextmanager
def differentiating() -> Iterator[None]:
    """Record a graph, also where the caller has switched that off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Choose kernels that have second derivatives: math attention, composed weight norm, no cuDNN recurrences."""
    with ExitStack() as stack:
        stack.enter_context(MEASURING)  # the choice of kernels is one for all threads
        stack.enter_context(TwiceDifferentiable())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if torch.cuda.is_initialized():
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


class _Bound(nn.Module):
    """Lets `functional_call` run any function of the model, not only its `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, body: Callable[[nn.Module], T]) -> T:
        return body(self.model)


def call_purely(
    model: nn.Module,
    values: Mapping[str, Tensor],
    body: Callable[[nn.Module], T],
    dtype: torch.dtype | None = None,
    *,
    aliases: Sequence[Alias] = (),
) -> T:
    """Return `body(model)` with the given parameter values, the model's own elsewhere; they and buffers are cloned.

    Some forwards write into parameters (`nn.Embedding(max_norm=1.0)`), so nothing of the model's is handed out.
    Gradients flow to `values` that require them, and these are not cloned; floating parameters and buffers are
    converted to `dtype`; `aliases`, from `untouched`, are lists and dicts in which the model keeps parameters besides.
    """
    names = {id(own): name for name, own in (*model.named_parameters(), *model.named_buffers())}
    state = {name: values.get(name, own.detach()) for name, own in model.named_parameters()}
    state = {name: value if value.requires_grad else value.clone() for name, value in state.items()}
    batched = torch._C._functorch.is_batchedtensor
    tie = next((0.0 * value.reshape(-1)[0] for value in values.values() if batched(value)), None)
    for name, buffer in model.named_buffers():
        # Under vmap BatchNorm writes batched statistics in place, so the clone must be batched as well.
        state[name] = buffer + tie if tie is not None and buffer.is_floating_point() else buffer.clone()
    if dtype is not None:
        state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    for put, place, own in aliases:
        put(place, state[names[id(own)]])
    return functional_call(_Bound(model), {f"model.{name}": value for name, value in state.items()}, (body,))
