"""The layers of a model as a pass uses them, and what it says of each call: moments, dead units, gradients."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from normgauge.errors import InputError
from normgauge.linalg.norms import norm
from normgauge.network import ModuleCall, Network, activation_name, convolves, first_tensor, owner_of, role_of, watched
from normgauge.objective import Objective
from normgauge.stats import CONFIDENCE, student_quantile

Bounds = tuple[float, float]
HUGE = 65504.0  # what float16 holds: beyond it nothing works with numbers near 1 any more

# Activations with finite limits: an output within 1 % of the range of a limit is saturated.
_BOUNDS: dict[str, Bounds] = {
    "tanh": (-1.0, 1.0),
    "sigmoid": (0.0, 1.0),
    "hardtanh": (-1.0, 1.0),
    "relu6": (0.0, 6.0),
    "hardsigmoid": (0.0, 1.0),
    "softsign": (-1.0, 1.0),
    "erf": (-1.0, 1.0),
}
_WITH_ZERO = ("relu", "relu6", "threshold", "hardshrink", "softshrink")
_FUNCTIONS: dict[Any, str] = {
    function: function.__name__.rstrip("_")
    for function in (
        *(F.relu, F.relu6, F.gelu, F.silu, F.elu, F.selu, F.leaky_relu, F.softplus, F.mish, F.hardtanh, F.hardswish),
        *(torch.relu, torch.relu_, torch.tanh, torch.sigmoid, torch.erf, F.tanh, F.sigmoid, F.hardsigmoid, F.softsign),
        *(Tensor.relu, Tensor.relu_, Tensor.tanh, Tensor.sigmoid, Tensor.erf, Tensor.tanh_, Tensor.sigmoid_),
    )
}
Groups = Mapping[str, Sequence[str] | str]


@dataclass
class Call:
    """Running sums over the batches of one call of one layer."""

    name: str
    role: str
    activation: str = ""
    count: int = 0
    mean: float = 0.0
    scatter: float = 0.0
    variances: list[tuple[int, float]] = field(default_factory=list)
    zero_units: Tensor | None = None
    by_class: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    saturated: int = 0
    gradient: float = 0.0
    reached: bool = False
    finite: bool = True

    @property
    def saturates(self) -> bool:
        """Whether the activation has limits."""
        return self.activation in _BOUNDS

    @property
    def selectivity(self) -> float:
        """Mean over active units of (best class - mean of the others) / (their sum), of mean activities per class."""
        if len(self.by_class) < 2:
            return math.nan
        means = torch.stack([total / count for count, total in self.by_class.values()])
        best = means.amax(0)
        rest = (means.sum(0) - best) / (len(means) - 1)
        alive = best > 0
        return float(((best - rest) / (best + rest))[alive].mean()) if bool(alive.any()) else math.nan

    def see_classes(self, output: Tensor, axis: int, labels: Tensor) -> None:
        """Add one batch of activities that are not negative, unit by unit, to their classes."""
        value = output.detach().double()
        if value.ndim < 2 or len(value) != len(labels) or not bool((value >= 0).all()):
            return
        units = value.movedim(axis, 1).flatten(2).mean(2) if value.ndim > 2 else value
        for label in labels.unique().tolist():
            here = units[labels == label]
            count, total = self.by_class.get(label, (0, torch.zeros_like(units[0])))
            if total.shape == here.shape[1:]:
                self.by_class[label] = (count + len(here), total + here.sum(0))

    def see(self, output: Tensor, axis: int) -> None:
        """Add one batch of outputs."""
        value = output.detach()
        count, mean = value.numel(), float(value.mean())
        scatter = norm(value - mean) ** 2  # centred first: squares of a large mean would drown the variance
        joint = self.count + count
        self.scatter += scatter + (mean - self.mean) ** 2 * self.count * count / joint
        self.mean += (mean - self.mean) * count / joint
        self.count = joint
        self.finite = self.finite and math.isfinite(scatter)
        if self.activation in _WITH_ZERO:
            others = [i for i in range(value.ndim) if i != axis % value.ndim]
            silent = (value.abs().amax(dim=others) if others else value) == 0
            earlier = self.zero_units
            self.zero_units = silent if earlier is None or earlier.shape != silent.shape else earlier & silent
        if self.activation in _BOUNDS:
            low, high = _BOUNDS[self.activation]
            edge = 0.01 * (high - low)
            self.saturated += int(((value < low + edge) | (value > high - edge)).count_nonzero())

    def see_gradient(self, share: float) -> Callable[[Tensor], None]:
        """Return a tensor hook that adds the squared norm of `share` times the gradient."""

        def hook(gradient: Tensor) -> None:
            self.gradient += (share * norm(gradient)) ** 2
            self.reached = True

        return hook


class Recorder(TorchFunctionMode):
    """Collects calls of affine layers, normalizers and activations; also activations written as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}
        self.called_names: set[str] = set()
        self.share = 1.0
        self.labels: Tensor | None = None
        self._times: dict[str, int] = {}
        self._axis = -1
        self._open: list[tuple[str, nn.Module]] = []

    def start_batch(self, share: float, batch: Any) -> None:
        """Begin a batch that counts `share` in the mean loss: calls are numbered afresh."""
        self.share = share
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
        real = not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point()
        self.labels = None if real else labels
        self._times.clear()

    def enter(self, called: ModuleCall) -> None:
        """Note that a module's forward begins."""
        self._open.append((called.name, called.module))

    def leave(self, called: ModuleCall) -> None:
        """Note a module's input and output."""
        if self._open:
            self._open.pop()
        self.called_names.add(called.name)
        module, role, tensor, inputs = called.module, role_of(called.module), called.made, called.given
        if not role or tensor is None or not tensor.is_floating_point():
            return
        if role == "affine":
            self._axis = 1 if convolves(module) and tensor.ndim > 2 else -1
        call = self._call(called.name, role, activation_name(module) if role == "activation" else "")
        if role == "normalizer" and inputs is not None:
            call.variances.append((inputs.shape[0] if inputs.ndim else 1, divided_variance(module, inputs)))
        self._record(call, tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FUNCTIONS and self._open and isinstance(result, Tensor):
            name, module = self._open[-1]
            if role_of(module) != "activation":  # modules report themselves
                self._record(self._call(f"{name}.{_FUNCTIONS[func]}()", "activation", _FUNCTIONS[func]), result)
        return result

    def _call(self, name: str, role: str, activation: str) -> Call:
        self._times[name] = times = self._times.get(name, 0) + 1
        key = name if times == 1 else f"{name}#{times}"
        return self.calls.setdefault(key, Call(key, role, activation))

    def _record(self, call: Call, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            call.see(tensor, self._axis)
            if self.labels is not None and call.activation in _WITH_ZERO:
                call.see_classes(tensor, self._axis, self.labels)
            if tensor.requires_grad:
                tensor.register_hook(call.see_gradient(self.share))


class Ablation(Recorder):
    """Holds `units` of the activation `layer` at their means over the data; while it has no layer, sums the means."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.units = "", torch.zeros(0, dtype=torch.long)
        self.sums: dict[str, tuple[int, Tensor]] = {}

    def _record(self, call: Call, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            values = tensor.movedim(self._axis, -1) if tensor.ndim else tensor.reshape(1)
            if call.role == "activation" and not self.layer:
                flat = values.reshape(-1, values.shape[-1]).double()
                count, total = self.sums.get(call.name, (0, torch.zeros(flat.shape[1], dtype=flat.dtype)))
                self.sums[call.name] = count + len(flat), total.to(flat) + flat.sum(0)
            elif call.name == self.layer:
                count, total = self.sums[call.name]
                values[..., self.units] = (total[self.units] / count).to(values)  # in place: what comes after reads it

    def accuracy(self, objective: Objective) -> float:
        """Return the share of the data's classes that are hit; nan where the data are no classes of rows."""
        hits: list[Tensor] = []

        def body(model: nn.Module, _: int, batch: Any) -> None:
            self.start_batch(1.0, batch)
            with torch.no_grad(), watched(model, self.leave, self.enter), self:
                out = first_tensor(objective.outputs_of(model, batch))
            fits = out is not None and self.labels is not None and out.ndim == 2 and len(out) == len(self.labels)
            hits.append((out.argmax(1) == self.labels).double() if fits else torch.tensor([math.nan]))  # type: ignore[union-attr]

        for _ in objective.each_batch(body):
            pass
        return float(torch.cat(hits).mean())


def divided_variance(module: nn.Module, inputs: Tensor) -> float:
    """Return the mean of the variances (mean squares, for RMS norms) a normalizer divides its input by.

    Batch norms take them per channel over the batch, layer and RMS norms per sample over the features, group and
    instance norms per sample and group.
    """
    value = inputs.detach()
    kind = type(module).__name__.lower()
    if isinstance(module, nn.GroupNorm) and value.ndim > 1:
        return _mean_variance(value.reshape(value.shape[0], module.num_groups, -1), (2,))
    if "instancenorm" in kind and value.ndim > 2:
        return _mean_variance(value, tuple(range(2, value.ndim)))
    if isinstance(module, nn.modules.batchnorm._NormBase) or "batchnorm" in kind:
        return _mean_variance(value, tuple(i for i in range(value.ndim) if i != 1)) if value.ndim > 1 else math.nan
    if "rms" in kind or kind == "t5layernorm":
        return norm(value) ** 2 / max(value.numel(), 1)
    shape = getattr(module, "normalized_shape", None)
    axes = len(shape) if isinstance(shape, tuple) else 1
    return _mean_variance(value, tuple(range(value.ndim - axes, value.ndim)))


def _mean_variance(value: Tensor, axes: tuple[int, ...]) -> float:
    """Return the mean of the biased variances over `axes`, which is the mean square of the centred tensor."""
    if not value.numel():
        return math.nan
    return norm(value - value.mean(dim=axes, keepdim=True)) ** 2 / value.numel()


def fit_growth(squares: Sequence[float]) -> tuple[float, float, float]:
    """Return exp(-slope) of the line through log(squares) over 0, 1, 2, ..., and its 95 % interval.

    The interval is Student's for independent residuals; with two points the fit is exact and has none (nan).

    Examples:
        >>> [round(value, 6) for value in fit_growth([8.0, 4.0, 2.0])]
        [2.0, 2.0, 2.0]
    """
    n = len(squares)
    if n < 2:
        return math.nan, math.nan, math.nan
    y = torch.tensor(squares, dtype=torch.float64).log()
    x = torch.arange(n, dtype=torch.float64) - (n - 1) / 2
    spread = float(x.square().sum())
    slope = float((x * y).sum()) / spread
    if n == 2:
        return math.exp(-slope), math.nan, math.nan
    residual = float((y - y.mean() - slope * x).square().sum())
    half = student_quantile(CONFIDENCE, n - 1) * math.sqrt(residual / (n - 2) / spread)
    return math.exp(-slope), math.exp(-slope - half), math.exp(-slope + half)


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that count as one layer."""

    name: str  # the module that owns them, or the user's name of the group
    parameters: tuple[str, ...]  # their names
    uses: int  # operations that read one of them in the first batch's forward pass; 0 where none does


def execution_order(objective: Objective, groups: Groups | None = None) -> list[Layer]:
    """Return the layers in the order of first use; layers that are never used come last.

    The order is that of the operations that read the parameters, not of registration, and does not need a module's
    `forward` to be called: attention reads the weights of its output projection by itself. Parameters read by one
    and the same operation keep their order of registration.

    Cost: one forward pass over the first batch.
    """
    uses = Network.of(objective).uses
    members = group_names(objective.names) if groups is None else _group_by_pattern(objective.names, groups)
    layers = [Layer(layer, tuple(names), max(len(uses[name]) for name in names)) for layer, names in members.items()]
    return sorted(
        layers, key=lambda layer: min((uses[name][0] for name in layer.parameters if uses[name]), default=inf)
    )


def group_names(names: Sequence[str], key: Callable[[str], str] = owner_of) -> dict[str, list[str]]:
    """Return the names by a key, by default the module that carries a tensor or its parametrization."""
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(key(name) or "(model)", []).append(name)
    return members


def _group_by_pattern(names: Sequence[str], groups: Groups) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for group, patterns in groups.items():
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        members[group] = [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]
        if not members[group]:
            rule = "a group must match a variable"
            raise InputError(f"group {group!r}", rule, f"{wanted}", "Use names of the parameters")
        for name in members[group]:
            if owner.setdefault(name, group) != group:
                rule, got = "a parameter belongs to one group", f"{name} also in {owner[name]!r}"
                raise InputError(f"group {group!r}", rule, got, "Make the patterns disjoint")
    return members


def unit_axis(module: nn.Module, tensor: Tensor) -> int:
    """Return the axis of units: channels (1) after convolutions and channel normalizers, else the last."""
    channels = isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm))
    return 1 if (convolves(module) or channels) and tensor.ndim > 2 else tensor.ndim - 1


def per_unit(tensor: Tensor, axis: int) -> Tensor:
    """Return `[values, units]` in float64 without graph; a 0-d tensor is one value of one unit."""
    value = tensor.detach().to(torch.float64)
    return value.reshape(1, 1) if value.ndim == 0 else value.movedim(axis, -1).reshape(-1, value.shape[axis])


def run_watched(objective: Objective, called: Callable[[ModuleCall], None]) -> None:
    """Run all batches without graph, reporting every call of a submodule as `watched` does."""

    def body(model: nn.Module, number: int, batch: Any) -> None:
        with watched(model, called):
            objective.terms_of(model, number, batch)

    with torch.no_grad():
        for _ in objective.each_batch(body):
            pass
