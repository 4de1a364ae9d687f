"""Effective parameters: the coordinates in which a normalizer's scale or a weight is what the network multiplies by.

A gain stored as w and used as 1 + w, BatchNorm with stored statistics, a weight made of length and direction: each is
a change of coordinates, one to one. Symmetries are looked for in effective coordinates, where they are scales, shifts
and changes of basis; generators and finite changes are carried back to what the model stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.weak import WeakTensorKeyDictionary

from normgauge.network import first_tensor, without_eps

Values = Mapping[str, Tensor]
SAME = 1e-9
SAMPLES = 4  # of a module's inputs, on which it is tried


@dataclass(frozen=True)
class OnePlus:
    """A gain stored as w and used as 1 + w."""

    gain: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.gain,)

    def effective(self, stored: Values) -> dict[str, Tensor]:
        return {self.gain: 1 + stored[self.gain]}

    def stored(self, effective: Values) -> dict[str, Tensor]:
        return {self.gain: effective[self.gain] - 1}

    def title(self, name: str) -> str:
        return f"(1 + {name})"


@dataclass(frozen=True)
class StoredAffine:
    """A normalizer with stored statistics: gain (x - mean) factor + bias is one gain and one bias."""

    gain: str
    bias: str
    mean: tuple[float, ...]
    factor: tuple[float, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.gain, self.bias)

    def _constants(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, factor = (torch.tensor(c, dtype=like.dtype, device=like.device) for c in (self.mean, self.factor))
        return mean.reshape(like.shape), factor.reshape(like.shape)

    def effective(self, stored: Values) -> dict[str, Tensor]:
        mean, factor = self._constants(stored[self.gain])
        gain = stored[self.gain] * factor
        return {self.gain: gain, self.bias: stored[self.bias] - (gain * mean).reshape(stored[self.bias].shape)}

    def stored(self, effective: Values) -> dict[str, Tensor]:
        mean, factor = self._constants(effective[self.gain])
        pulled = (effective[self.gain] * mean).reshape(effective[self.bias].shape)
        return {self.gain: effective[self.gain] / factor, self.bias: effective[self.bias] + pulled}

    def title(self, name: str) -> str:
        return f"{name} folded"


@dataclass(frozen=True)
class LengthAndDirection:
    """A weight c g (v - m) / |v - m| along an axis, m the mean of v's slice if centred, else zero.

    The weight (plus m, which the network does not see) takes the place of v, the length of v - m that of g.
    """

    gain: str
    direction: str
    axis: int
    signs: tuple[float, ...]
    centred: bool = False
    factor: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.gain, self.direction)

    def _split(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return means, what is left, and its lengths."""
        rest = [a for a in range(values.ndim) if a != self.axis]
        mean = values.mean(rest, keepdim=True) * float(self.centred)
        return mean, values - mean, torch.linalg.vector_norm(values - mean, dim=rest, keepdim=True).clamp_min(1e-300)

    def effective(self, stored: Values) -> dict[str, Tensor]:
        direction, gain = stored[self.direction], stored[self.gain]
        mean, rest, lengths = self._split(direction)
        weight = self.factor * gain.reshape(lengths.shape) * rest / lengths
        return {self.gain: lengths.reshape(gain.shape), self.direction: weight + mean}

    def stored(self, effective: Values) -> dict[str, Tensor]:
        lengths = effective[self.gain]
        mean, weight, size = self._split(effective[self.direction])
        signs = torch.tensor(self.signs, dtype=weight.dtype, device=weight.device).reshape(size.shape)
        direction = weight / size * signs * lengths.abs().reshape(size.shape) + mean
        return {self.gain: (size * signs / self.factor).reshape(lengths.shape), self.direction: direction}

    def title(self, name: str) -> str:
        return (
            f"length of {self.direction}" if name == self.gain else name.partition(".parametrizations.")[0] + ".weight"
        )


@dataclass(frozen=True)
class MovedBias:
    """A bias b in a layer that adds b + offset + pull W 1: what stands between it and the next layer, or its inputs."""

    bias: str
    offset: tuple[float, ...]
    weight: str = ""
    pull: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.bias, self.weight) if self.weight else (self.bias,)

    def _moved(self, values: Values, sign: float) -> dict[str, Tensor]:
        bias = values[self.bias]
        step = torch.tensor(self.offset, dtype=bias.dtype, device=bias.device).reshape(bias.shape)
        if self.weight:
            step = step + self.pull * values[self.weight].flatten(1).sum(1)
        return {self.bias: bias + sign * step}

    def effective(self, stored: Values) -> dict[str, Tensor]:
        return self._moved(stored, 1.0)

    def stored(self, effective: Values) -> dict[str, Tensor]:
        return self._moved(effective, -1.0)

    def title(self, name: str) -> str:
        return f"{name} moved" if name == self.bias else name


Frame = OnePlus | StoredAffine | LengthAndDirection | MovedBias
FRAMES: dict[str, type[Frame]] = {k.__name__: k for k in (OnePlus, StoredAffine, LengthAndDirection, MovedBias)}


@dataclass(frozen=True)
class Coordinates:
    """Effective coordinates of some parameters; all others are their own.

    Examples:
        >>> gain = Coordinates((OnePlus("norm.weight"),))
        >>> gain.effective({"norm.weight": torch.zeros(1)}), gain.stored({"norm.weight": torch.zeros(1)})
        ({'norm.weight': tensor([1.])}, {'norm.weight': tensor([-1.])})
    """

    frames: tuple[Frame, ...] = ()

    def effective(self, stored: Values) -> dict[str, Tensor]:
        result = dict(stored)
        for frame in self._within(stored):
            result |= frame.effective(result)
        return result

    def stored(self, effective: Values) -> dict[str, Tensor]:
        result = dict(effective)
        for frame in reversed(self._within(effective)):
            result |= frame.stored(result)
        return result

    def _within(self, values: Values) -> list[Frame]:
        return [frame for frame in self.frames if all(name in values for name in frame.names)]

    def about(self, names: Sequence[str]) -> Coordinates:
        """Return the coordinates of these parameters and of what hangs on them."""
        wanted: set[str] = set(names)
        while more := {n for f in self.frames if set(f.names) & wanted for n in f.names} - wanted:
            wanted |= more
        return Coordinates(tuple(f for f in self.frames if set(f.names) & wanted))

    def closure(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the parameters that change when the effective ones of these names do."""
        return tuple(dict.fromkeys([*names, *(n for f in self.about(names).frames for n in f.names)]))

    def push(self, effective: Values, tangent: Values) -> dict[str, Tensor]:
        """Carry a tangent vector at an effective point to the stored parameters."""
        framed = self.about(list(tangent))
        point = {name: effective[name] for frame in framed.frames for name in frame.names}
        step = {name: tangent.get(name, torch.zeros_like(value)) for name, value in point.items()}
        carried: tuple[Any, ...] = torch.func.jvp(framed.stored, (point,), (step,)) if point else ({}, {})
        return dict(tangent) | carried[1]

    def pull(self, effective: Values, slope: Values) -> dict[str, Tensor]:
        """Carry a gradient by the stored parameters to one by the effective ones."""
        point = {name: effective[name] for frame in self._within(slope) for name in frame.names}
        if not point:
            return dict(slope)
        back: Any = torch.func.vjp(self.stored, point)[1]
        return dict(slope) | back({name: slope[name].to(value) for name, value in point.items()})[0]

    def title(self, name: str) -> str:
        return next((frame.title(name) for frame in self.frames if name in frame.names), name)

    def to_json(self) -> list[dict[str, Any]]:
        return [{"frame": type(frame).__name__, **asdict(frame)} for frame in self.frames]

    @classmethod
    def from_json(cls, data: Sequence[Mapping[str, Any]]) -> Coordinates:
        frames = []
        for entry in data:
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items() if k != "frame"}
            kind: Any = FRAMES[entry["frame"]]
            frames.append(kind(**values))
        return cls(tuple(frames))


PLAIN = Coordinates()


def find_coordinates(model: nn.Module, call: Callable[[], Any], variables: Sequence[str]) -> Coordinates:
    """Find the effective coordinates of a model's variables, each by what its module does; `call` runs the forward."""
    inputs: dict[str, Tensor] = {}
    writers: dict[str, str] = {}
    made_by: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given, result = first_tensor((args, kwargs)), first_tensor(output)
            if given is not None and name not in inputs and given.is_floating_point():
                inputs[name], writers[name] = given.detach()[:SAMPLES], made_by.get(given, "")
            if result is not None:
                made_by[result] = name

        return hook

    modules = {n: m for n, m in model.named_modules() if any(True for _ in (*m.parameters(False), *m.buffers(False)))}
    handles = [m.register_forward_hook(keep(name), with_kwargs=True) for name, m in modules.items()]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    frames: list[Frame | None] = list(_lengths(model, variables))
    for name, given in inputs.items():
        try:
            frames.append(_module_frame(name, modules[name], given, variables, writers[name]))
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            continue
    return Coordinates(tuple(frame for frame in frames if frame is not None))


def _module_frame(
    name: str, module: nn.Module, given: Tensor, variables: Sequence[str], writer: str
) -> OnePlus | StoredAffine | MovedBias | None:
    """Return the frame of a module by its outputs for some of its inputs, which `writer` made, and other vectors."""
    prefix = f"{name}." if name else ""
    own = {n: p for n, p in module.named_parameters() if prefix + n in variables}
    vectors = {n: p for n, p in own.items() if sum(s > 1 for s in p.shape) <= 1 and "." not in n}
    if module._forward_pre_hooks:
        return _moved_inputs(prefix, module, given, own)
    if len(vectors) != len(own) or len(vectors) > 2 or sum(s > 1 for p in module.parameters() for s in p.shape[1:]):
        return None

    def run(x: Tensor, **values: float) -> Tensor | None:
        state = {n: torch.full_like(p.detach(), values.get(n, 0.0)).to(x) for n, p in vectors.items()}
        buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        with torch.no_grad():
            return first_tensor(functional_call(module, {**buffers, **state}, (x,)))

    if not vectors:
        constants, bias = _channel_affine(module, given, run), f"{writer}.bias"
        if constants is None or bias not in variables or not bool(constants[1].any()):
            return None
        return MovedBias(bias, tuple((constants[1] / constants[0]).double().tolist()))
    other = given + torch.randn(given.shape, generator=torch.Generator().manual_seed(0)).to(given) * given.std()
    if len(vectors) == 1:
        (gain,) = vectors
        constant = [v for v in (0.0, -1.0) if _same(run(given, **{gain: v}), run(other, **{gain: v}))]
        return OnePlus(prefix + gain) if constant == [-1.0] else None
    for gain, bias in (tuple(vectors), tuple(vectors)[::-1]):
        constants = _channel_affine(module, given, lambda x, gain=gain: run(x, **{gain: 1.0}))  # type: ignore[misc]
        if constants is not None and _same(run(torch.zeros_like(given), **{bias: 1.0}), torch.ones_like(given)):
            mean = (-constants[1] / constants[0]).double().tolist()
            return StoredAffine(prefix + gain, prefix + bias, tuple(mean), tuple(constants[0].double().tolist()))
    return None


def _channel_affine(
    module: nn.Module, given: Tensor, run: Callable[[Tensor], Tensor | None]
) -> tuple[Tensor, Tensor] | None:
    """Return factor and offset of each channel (axis 1) of a module that multiplies and adds stored constants."""
    if not list(module.buffers()) or given.ndim < 2:
        return None
    zero, one, plain = (run(x) for x in (torch.zeros_like(given), torch.ones_like(given), given))
    if zero is None or one is None or plain is None or plain.shape != given.shape:
        return None
    rest = [a for a in range(given.ndim) if a != 1]
    factor, offset = (one - zero).mean(rest), zero.mean(rest)
    wide = [-1 if a == 1 else 1 for a in range(given.ndim)]
    affine = given * factor.reshape(wide) + offset.reshape(wide)
    return (factor, offset) if _same(plain, affine) and bool((factor != 0).all()) else None


def _moved_inputs(prefix: str, module: nn.Module, given: Tensor, own: Mapping[str, Tensor]) -> MovedBias | None:
    """Return the frame of a linear layer that adds a constant to its inputs first (normalization propagation)."""
    weight, bias = getattr(module, "weight", None), own.get("bias")
    if bias is None or not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    with torch.no_grad():
        silent = first_tensor(module(torch.zeros_like(given[:1])))
    sums = weight.detach().sum(1)
    if silent is None or silent.shape[-1] != len(sums):
        return None
    extra = silent.reshape(-1, len(sums))[0] - bias.detach()
    pull = float((extra @ sums) / sums.square().sum().clamp_min(1e-300))
    names = [n for n in own if n.startswith("parametrizations.weight.original") or n == "weight"]
    if not names or not pull or not _same(pull * sums, extra):
        return None
    return MovedBias(f"{prefix}bias", (0.0,) * len(sums), prefix + names[-1], pull)


def _lengths(model: nn.Module, variables: Sequence[str]) -> list[LengthAndDirection]:
    """Return the weights made of one length per slice and a direction: parametrizations and hooks alike."""
    frames = []
    values = dict(model.named_parameters())
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        pairs: list[tuple[str, str, nn.Module | None]] = [(f"{prefix}weight_g", f"{prefix}weight_v", None)]
        for tensor, parts in getattr(module, "parametrizations", {}).items():
            path = f"{prefix}parametrizations.{tensor}."
            if len(parts) == 1:
                pairs.append((f"{path}original0", f"{path}original1", parts[0]))
                pairs.extend((f"{path}0.{n}", f"{path}original", parts[0]) for n, _ in parts[0].named_parameters())
        for gain, direction, made_by in pairs:
            if {gain, direction} <= set(variables) and {gain, direction} <= values.keys():
                frame = _length_frame(gain, direction, values[gain].detach(), values[direction].detach(), made_by)
                frames.extend([] if frame is None else [frame])
    return frames


def _length_frame(
    gain: str, direction: str, g: Tensor, v: Tensor, made_by: nn.Module | None
) -> LengthAndDirection | None:
    axes = [a for a in range(v.ndim) if v.shape[a] == g.numel() > 1]
    axes = [a for a in axes if g.ndim == v.ndim and g.shape[a] == g.numel()] or axes
    signs = tuple(torch.where(g < 0, -1.0, 1.0).reshape(-1).tolist())
    for axis, centred in ((axis, centred) for axis in axes[:1] for centred in (False, True)):
        frame = LengthAndDirection(gain, direction, axis, signs, centred)
        if made_by is None:
            return frame
        with without_eps(made_by):
            weight = made_by(*((g, v) if direction.endswith("1") else (v,))).detach()
        _, rest, lengths = frame._split(v)
        unit = g.reshape(lengths.shape) * rest / lengths
        factor = float((weight * unit).sum() / unit.square().sum().clamp_min(1e-300))
        if factor > 0 and _same(weight, factor * unit):
            return replace(frame, factor=factor)
    return None


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    return float((a - b).abs().max()) <= SAME * max(float(b.abs().max()), 1e-3)
