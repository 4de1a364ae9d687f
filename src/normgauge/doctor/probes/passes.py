"""One forward pass under hooks: calls of modules, and of everything that normalizes, with what went in and out."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from normgauge.network import ModuleCall, is_leaf, role_of, watched

_KINDS = {
    F.batch_norm: "batch",
    F.layer_norm: "layer",
    F.group_norm: "group",
    F.instance_norm: "instance",
    F.rms_norm: "rms",
    F.normalize: "l2",
}
_SIGNATURES = {function: inspect.signature(function) for function in list[Any](_KINDS)}
_PLAIN = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.modules.dropout._DropoutNd, nn.Identity, nn.RNNBase,
          nn.Flatten, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._MaxPoolNd, nn.Softmax)  # fmt: skip


@dataclass
class NormCall:
    """One normalization, by a module or a function: input x, output y."""

    where: str  # the module, or the function inside of one
    kind: str  # "batch", "layer", "group", "instance", "rms", "l2", or "custom" for a module that normalizes by itself
    module: nn.Module | None  # whose call it was; `None` for a function
    x: Tensor
    y: Tensor
    count: int  # values that one statistic is taken of
    eps: float = math.nan  # as the function got it; nan where unknown
    own: bool = True  # whether the statistics are of this input, not stored ones
    stored: tuple[Tensor, Tensor] | None = None  # running mean and variance, where there are any, as they were before
    parameters: tuple[str, ...] = ()  # names of gain and shift
    producer: str = ""  # the module that made the input
    number: int = 0  # of the call among all calls

    @property
    def centred(self) -> bool:
        """Whether the mean is taken away; unknown for custom ones, which count as centred."""
        return self.kind not in ("rms", "l2")

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance over all but the channels (axis 1), in float64."""
        values = self.x.double().movedim(1, -1).flatten(0, -2)
        return values.mean(0), values.var(0, unbiased=False)


@dataclass
class Record:
    """One call of a leaf module: what it read and made, and who made what it read."""

    name: str
    module: nn.Module
    given: Tensor | None
    made: Tensor | None
    producer: str
    number: int


@dataclass
class Pass:
    """What one forward pass showed, in order of the calls."""

    outputs: Any = None
    loss: float = math.nan
    records: list[Record] = field(default_factory=list)  # calls of leaf modules
    blocks: dict[str, Tensor] = field(default_factory=dict)  # every module's last output
    norms: list[NormCall] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)  # after the pass
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the parameters; empty without a backward pass
    slopes: list[tuple[str, Tensor]] = field(default_factory=list)  # in the outputs of affine modules
    attention: list[tuple[str, float]] = field(default_factory=list)  # largest logit of every call, with the module

    def calls(self, name: str) -> list[Record]:
        """Return the calls of one leaf module."""
        return [record for record in self.records if record.name == name]

    def chain(self, name: str) -> Iterator[Record]:
        """Yield the leaf calls behind a tensor, from the last, as long as each read what the one before made."""
        visited = {""}
        while name not in visited:
            visited.add(name)
            last = self.calls(name)[-1]
            yield last
            name = last.producer


class Watcher(TorchFunctionMode):
    """Fills a `Pass` while a model runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found = Pass()
        self._model = model
        self._names = {id(value): name for name, value in model.named_parameters()}
        self._open: list[tuple[str, nn.Module]] = []
        self._makers: dict[int, str] = {}
        self._kept: list[Any] = []  # an id stays taken while its object lives
        self._inside = 0

    @contextmanager
    def watching(self) -> Iterator[Pass]:
        """Watch what runs inside."""
        with watched(self._model, self._leave, lambda call: self._open.append((call.name, call.module))), self:
            yield self.found
        self.found.buffers = {name: value.detach().clone() for name, value in self._model.named_buffers()}

    def _leave(self, call: ModuleCall) -> None:
        self._open.pop()
        made = call.made
        if "parametrizations." in call.name:
            return
        if made is not None:
            self.found.blocks[call.name] = made
        if not call.leaf and not is_leaf(call.module):
            return
        producer = "" if call.given is None else self._makers.get(id(call.given), "")
        self.found.records.append(Record(call.name, call.module, call.given, made, producer, len(self.found.records)))
        if made is not None:
            self._makers[id(made)] = call.name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _KINDS or self._inside:
            if func is F.scaled_dot_product_attention:
                self._note_attention(*args[:2])
            elif func in (F.softmax, torch.softmax, Tensor.softmax) and args[0].ndim == 4 and args[0].numel():
                self._note_logits(args[0])
            return func(*args, **kwargs)
        arguments = _SIGNATURES[func].bind(*args, **kwargs)
        arguments.apply_defaults()
        stored = [arguments.arguments.get(name) for name in ("running_mean", "running_var")]
        before = tuple(value.detach().clone() for value in stored if value is not None)
        x = arguments.arguments["input"]
        self._inside += 1  # F.instance_norm is a batch norm inside
        try:
            y = func(*args, **kwargs)
        finally:
            self._inside -= 1
        self._add(func, arguments.arguments, x, y, before)
        return y

    def _add(self, func: Any, given: dict[str, Any], x: Tensor, y: Tensor, stored: tuple[Tensor, ...]) -> None:
        name, module = self._open[-1] if self._open else ("(model)", self._model)
        owner = module if role_of(module) == "normalizer" else None
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or not x.numel():
            return  # it standardizes its weights by a norm's function, or the batch is empty
        kind = _KINDS[func]
        own = bool(given.get("training", given.get("use_input_stats", True)))
        gains = (self._names.get(id(given.get(key))) for key in ("weight", "bias"))
        where = name if owner is not None else f"{name}: F.{func.__name__}"
        call = NormCall(where, kind, owner, x.detach(), y.detach(), _count(kind, given, x), own=own)
        call.eps = float(given["eps"]) if given["eps"] is not None else float(torch.finfo(x.dtype).eps)
        call.stored = stored if len(stored) == 2 else None
        call.parameters = tuple(gain for gain in gains if gain)
        call.producer, call.number = self._makers.get(id(x), ""), len(self.found.records)
        self.found.norms.append(call)

    def _note_attention(self, query: Tensor, key: Tensor) -> None:
        with torch.no_grad():
            heads = query.shape[1] // key.shape[1] if query.ndim == 4 else 1
            key = key.repeat_interleave(heads, 1) if heads > 1 else key
            self._note_logits(query.detach() @ key.detach().transpose(-1, -2) / math.sqrt(query.shape[-1]))

    def _note_logits(self, logits: Tensor) -> None:
        values = logits.detach()[torch.isfinite(logits) & (logits > -1e4)]  # masks are large and negative
        if values.numel():
            where = self._open[-1][0] if self._open else "(model)"
            self.found.attention.append((where, float(values.abs().max())))


def _count(kind: str, given: dict[str, Any], x: Tensor) -> int:
    if kind == "batch":
        return x.numel() // max(x.shape[1], 1)
    if kind in ("layer", "rms"):
        return math.prod(given["normalized_shape"])
    if kind == "group":
        return x.numel() // max(x.shape[0] * given["num_groups"], 1)
    if kind == "instance":
        return math.prod(x.shape[2:])
    return x.shape[given["dim"]] if isinstance(given["dim"], int) else math.prod(x.shape[d] for d in given["dim"])


def candidates(found: Pass) -> Iterator[Record]:
    """Yield the first call of every leaf module that may normalize by itself."""
    noted = {id(call.module) for call in found.norms}
    for record in found.records:
        given, made = record.given, record.made
        if id(record.module) in noted or given is None or made is None or isinstance(record.module, _PLAIN):
            continue
        noted.add(id(record.module))
        if given.is_floating_point() and given.shape == made.shape and given.ndim > 1 and given.numel() > 1:
            yield record


def is_normalizer(module: Callable[..., Any], shape: torch.Size, dtype: torch.dtype) -> bool:
    """Tell by behaviour: outputs of noise and of four times as much agree to 2 %, and are not all alike."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        with torch.no_grad():
            small, large = (module(scale * noise) for scale in (1.0, 4.0))
    except (RuntimeError, TypeError, ValueError, IndexError):  # it takes something else
        return False
    if not isinstance(small, Tensor) or small.shape != shape:
        return False
    size = float((small - small.mean()).abs().max())
    return size > 0 and float((large - small).abs().max()) < 0.02 * size
