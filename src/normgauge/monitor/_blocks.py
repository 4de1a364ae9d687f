"""How the optimizer moves each tensor, one at a time: before and after a step, and along the next step to the edge."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normgauge.measure.curvature.edge import critical_factor
from normgauge.measure.weights.weight_dynamics import law_of
from normgauge.monitor._look import unchanged

RADIAL = 2e-3  # |cos| of weight and gradient below which the scale looks free: eps and rounding stay below it
PROOF = math.log(1e-6)  # of so many small cosines by chance
KINDS = ("rows", "tensor", "tensor and bias")
# what is read of a parameter without its values
_SHAPES = ("shape", "dtype", "device", "ndim", "requires_grad", "layout")
_FLAGS = ("is_cuda", "is_sparse", "is_quantized", "is_nested")
_CALLS = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size, Tensor.__len__)
_ASKS = {*(getattr(getattr(Tensor, name), "__get__", None) for name in (*_SHAPES, *_FLAGS)), *_CALLS}


@dataclass
class TensorTrack:
    """What is known of one tensor's motion; predictions are for equilibrium, by the optimizer's law."""

    name: str
    rows: int = 0  # that have a scale which looks free; 1 for the whole (with its layer's bias), 0 for none
    norm: float = math.nan  # root mean square over rows, or of the whole
    angle: float = math.nan  # median angle of a step, of the direction where the scale is free
    relative: float = math.nan  # |change| / |weight|
    effective_rate: float = math.nan  # of the direction; nan where the scale is not free
    predicted_angle: float = math.nan
    predicted_norm: float = math.nan  # infinite without decay
    predicted_effective_rate: float = math.nan
    decay: float = 0.0
    stuck: float = 0.0  # share of entries with a gradient that a step left as they were
    angles: list[float] = field(default_factory=list)  # of all looks, for what is usual
    first_norm: float = math.nan  # when watching began
    first_rate: float = math.nan  # the effective rate at that norm, under today's options of the optimizer
    # log-probability of the cosines seen, by granularity, if nothing were free
    evidence: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    @property
    def free(self) -> bool:
        """Whether the function seems to ignore the scale of its rows, or of the whole."""
        return min(self.evidence.values()) < PROOF


class Place(NamedTuple):
    """A parameter, who moves it with which options, and the bias of its layer if the same options move that too."""

    name: str
    value: Tensor
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    bias: Tensor | None


class Blocks:
    """Measures every tensor once in `every` optimizer steps, so that one copy at a time is held."""

    def __init__(self, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], every: int) -> None:
        named = dict(model.named_parameters())
        names = {id(value): name for name, value in named.items()}
        self.places: list[Place] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                own = {id(value) for value in group["params"]}
                for value in group["params"]:
                    if id(value) in names and value.requires_grad:
                        name = names[id(value)]
                        bias = named.get(name.removesuffix("weight") + "bias") if name.endswith("weight") else None
                        fits = bias is not None and id(bias) in own and bias.shape == value.shape[:1] and value.ndim > 1
                        self.places.append(Place(name, value, optimizer, group, bias if fits else None))
        norms = {place.name: float(place.value.detach().float().norm()) for place in self.places}
        self.tracks = {name: TensorTrack(name, first_norm=norm) for name, norm in norms.items()}
        self.every, self._held = every, []  # type: tuple[int, list[tuple[Place, Tensor, Tensor | None]]]

    def before(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Copy the tensors whose turn it is."""
        self._held = [
            (place, place.value.detach().clone(), None if place.bias is None else place.bias.detach().clone())
            for place in self.places[step % self.every :: self.every]
            if place.optimizer is optimizer and place.value.grad is not None
        ]

    def narrow_gains(self) -> list[tuple[Tensor, TensorTrack]]:
        """Return gains and shifts in half precision, which steps may leave where they are."""
        pairs = [(place.value, self.tracks[place.name]) for place in self.places]
        return [(value, track) for value, track in pairs if value.ndim < 2 and value.element_size() < 4]

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare with the copies, and let them go."""
        held, self._held = self._held, []
        for place, old, bias in held:
            if place.value.grad is not None:
                _compare(self.tracks[place.name], place, old, bias)


def _moved(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight, gradient and change as rows of at least float32."""
    slope = torch.zeros_like(new) if new.grad is None else new.grad
    parts = (old, slope.to_dense() if slope.is_sparse else slope, new.detach() - old)
    return tuple(part.detach().reshape(len(old), -1).float() for part in parts)  # type: ignore[return-value]


def _compare(track: TensorTrack, place: Place, old: Tensor, old_bias: Tensor | None) -> None:
    new, law = place.value, law_of(place.optimizer, place.group)
    track.decay = law.decay
    if new.ndim < 2:
        if new.element_size() < 4 and new.grad is not None:
            touched = new.grad != 0
            track.stuck = float(((new == old) & touched).sum() / touched.sum().clamp_min(1))
        track.norm = float(old.float().norm())
        track.relative = float((new.float() - old.float()).norm()) / max(track.norm, 1e-30)
        return
    w, g, d = _moved(old, new)
    squares = torch.stack([w.square().sum(1), g.square().sum(1), (w * g).sum(1)])
    sums = squares.sum(1, keepdim=True)
    _weigh(track, "rows", squares, w.shape[1])
    _weigh(track, "tensor", sums, w.numel())
    if old_bias is not None and place.bias is not None:
        b, slope, _ = _moved(old_bias, place.bias)
        beside = torch.stack([b.square().sum(), slope.square().sum(), (b * slope).sum()])
        _weigh(track, "tensor and bias", sums + beside[:, None], w.numel() + b.numel())
    track.rows = len(w) if track.evidence["rows"] < PROOF else int(track.free)
    if track.rows == 1 and track.evidence["tensor"] >= PROOF and old_bias is not None and place.bias is not None:
        w, g, d = (torch.cat(pair, 1) for pair in zip((w, g, d), _moved(old_bias, place.bias), strict=True))
        squares = torch.stack([w.square().sum(1), g.square().sum(1)])
        sums = squares.sum(1, keepdim=True)
    if track.rows <= 1:
        w, d, squares = w.reshape(1, -1), d.reshape(1, -1), sums
    lengths = squares[0].sqrt().clamp_min(1e-30)
    along = (w * d).sum(1) / lengths
    across = torch.addcmul(d, w, (along / lengths)[:, None], value=-1).norm(dim=1)
    track.norm = float(lengths.square().mean().sqrt())
    track.angle = float(torch.atan2(across, lengths + along).median())
    track.relative = float(torch.hypot(along, across).norm() / lengths.norm())
    track.angles.append(track.angle)
    if not track.free:
        track.effective_rate = track.predicted_angle = track.predicted_norm = track.predicted_effective_rate = math.nan
        return
    settled = law.equilibrium(w.shape[1], float((squares[0] * squares[1]).median()), track.norm)
    track.predicted_norm, track.predicted_angle = settled.norm, settled.angle
    track.effective_rate = law.effective_rate(track.norm)
    track.predicted_effective_rate = law.effective_rate(settled.norm) if settled.norm > 0 else math.nan
    track.first_rate = law.effective_rate(track.first_norm / math.sqrt(max(track.rows, 1)))


def _weigh(track: TensorTrack, kind: str, squares: Tensor, size: int) -> None:
    """Add to the evidence that the scale of blocks of `size` entries is free: <w, g> is 0 to a share of |w| |g|."""
    sizes = (squares[0] * squares[1]).sqrt()
    live = sizes > 0
    count = int(live.sum())
    if size < 4 or not count:
        return
    worst = float((squares[2].abs() / sizes)[live].max())
    chance = min(0.0, math.log(RADIAL * math.sqrt(2 * size / math.pi)))
    track.evidence[kind] = track.evidence[kind] + count * chance if worst < RADIAL else 0.0


class Moved(TorchFunctionMode):
    """While active, every function that is given a parameter is given `move(parameter)` instead."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._move = move

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS:
            return func(*args, **(kwargs or {}))
        return func(*self._swap(args), **self._swap(kwargs or {}))

    def _swap(self, given: Any) -> Any:
        if isinstance(given, nn.Parameter):
            return self._move(given)
        if isinstance(given, dict):
            return {key: self._swap(value) for key, value in given.items()}
        if type(given) in (tuple, list):
            return type(given)(self._swap(value) for value in given)
        return given


def next_value(place: Place, gradient: Tensor) -> Tensor:
    """Return the parameter after the optimizer's next step, by a copy that owns this one alone."""
    alone = nn.Parameter(place.value.detach().clone())
    alone.grad = gradient.clone()
    twin: Any = object.__new__(type(place.optimizer))
    usual = {name: value for name, value in vars(place.optimizer).items() if name != "step"}
    twin.__dict__ = {name: type(value)() if name.endswith("_hooks") else value for name, value in usual.items()}
    twin.param_groups = [{**copy.deepcopy({k: v for k, v in place.group.items() if k != "params"}), "params": [alone]}]
    twin.state = defaultdict(dict, {alone: copy.deepcopy(place.optimizer.state.get(place.value, {}))})
    type(place.optimizer).step(twin)
    return alone.detach()


def critical_multiple(model: nn.Module, loss: Callable[[], Tensor], places: Mapping[int, Place], start: float) -> float:
    """Return the multiple of the optimizer's next step at which it comes to raise the loss, searched from `start`.

    `normgauge.measure.curvature.edge.critical_rate` over the rate, without its copies: a gradient is held, and of the
    moved parameters the one that is being read. Dropout is off.

    Kind: estimate, to 10 %. Cost: a gradient and about six forwards.
    """
    values = [place.value for place in places.values()]
    with unchanged(model, training=True):
        with torch.enable_grad():
            base = loss()
        gradient = dict(zip(places, torch.autograd.grad(base, values, materialize_grads=True), strict=True))
        still = True

        def moved(factor: float, parameter: Tensor) -> Tensor:
            nonlocal still
            place = places.get(id(parameter))
            if place is None:
                return parameter
            step = next_value(place, gradient[id(parameter)]) - place.value.detach()
            still = still and not bool(step.any())
            return place.value.detach() + factor * step

        def loss_at(factor: float) -> float:
            with Moved(lambda parameter: moved(factor, parameter)):
                value = float(loss())
            return value if value == value else float("inf")

        multiple = critical_factor(loss_at, float(base), start)
    return float("nan") if still else multiple
