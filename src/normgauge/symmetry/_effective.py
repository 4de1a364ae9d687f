"""Effective parameters: the coordinates in which a normalizer's scale or a weight is what the network multiplies by.

A gain stored as w and used as 1 + w, BatchNorm with stored statistics, a weight made of length and direction: each is
a change of coordinates, one to one. Symmetries are looked for in effective coordinates, where they are scales, shifts
and changes of basis; generators and finite changes are carried back to what the model stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normgauge.network import first_tensor

Values = Mapping[str, Tensor]
SAME = 1e-9


@dataclass(frozen=True)
class OnePlus:
    """A gain stored as w and used as 1 + w."""

    gain: str

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return (self.gain,)

    def effective(self, stored: Values) -> dict[str, Tensor]:
        """Return 1 + w."""
        return {self.gain: 1 + stored[self.gain]}

    def stored(self, effective: Values) -> dict[str, Tensor]:
        """Return w."""
        return {self.gain: effective[self.gain] - 1}

    def title(self, name: str) -> str:
        """Say what the effective parameter is."""
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
        """The parameters."""
        return (self.gain, self.bias)

    def _constants(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, factor = (torch.tensor(c, dtype=like.dtype, device=like.device) for c in (self.mean, self.factor))
        return mean.reshape(like.shape), factor.reshape(like.shape)

    def effective(self, stored: Values) -> dict[str, Tensor]:
        """Return gain factor and bias - gain factor mean."""
        mean, factor = self._constants(stored[self.gain])
        gain = stored[self.gain] * factor
        return {self.gain: gain, self.bias: stored[self.bias] - (gain * mean).reshape(stored[self.bias].shape)}

    def stored(self, effective: Values) -> dict[str, Tensor]:
        """Return gain and bias."""
        mean, factor = self._constants(effective[self.gain])
        pulled = (effective[self.gain] * mean).reshape(effective[self.bias].shape)
        return {self.gain: effective[self.gain] / factor, self.bias: effective[self.bias] + pulled}

    def title(self, name: str) -> str:
        """Say what the effective parameter is."""
        return f"{name} folded"


@dataclass(frozen=True)
class LengthAndDirection:
    """A weight g v / |v| along an axis: the weight itself takes the place of v, the length of v that of g."""

    gain: str
    direction: str
    axis: int
    signs: tuple[float, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return (self.gain, self.direction)

    def _lengths(self, values: Tensor) -> Tensor:
        rest = [a for a in range(values.ndim) if a != self.axis]
        return torch.linalg.vector_norm(values, dim=rest, keepdim=True).clamp_min(1e-300)

    def _wide(self, gain: Tensor, like: Tensor) -> Tensor:
        return gain.reshape([-1 if a == self.axis else 1 for a in range(like.ndim)])

    def effective(self, stored: Values) -> dict[str, Tensor]:
        """Return g v / |v| and |v|."""
        direction, gain = stored[self.direction], stored[self.gain]
        lengths = self._lengths(direction)
        weight = self._wide(gain, direction) * direction / lengths
        return {self.gain: lengths.reshape(gain.shape), self.direction: weight}

    def stored(self, effective: Values) -> dict[str, Tensor]:
        """Return g and v; the sign of g is that of the user's."""
        weight, lengths = effective[self.direction], effective[self.gain]
        signs = torch.tensor(self.signs, dtype=weight.dtype, device=weight.device).reshape(lengths.shape)
        size = self._lengths(weight)
        direction = weight / size * self._wide(signs * lengths.abs(), weight)
        return {self.gain: size.reshape(lengths.shape) * signs, self.direction: direction}

    def title(self, name: str) -> str:
        """Say what the effective parameter is."""
        return (
            f"length of {self.direction}" if name == self.gain else name.partition(".parametrizations.")[0] + ".weight"
        )


Frame = OnePlus | StoredAffine | LengthAndDirection
FRAMES: dict[str, type[Frame]] = {kind.__name__: kind for kind in (OnePlus, StoredAffine, LengthAndDirection)}


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
        """Return what the network multiplies by."""
        return dict(stored) | {n: v for f in self._within(stored) for n, v in f.effective(stored).items()}

    def stored(self, effective: Values) -> dict[str, Tensor]:
        """Return what the model stores."""
        return dict(effective) | {n: v for f in self._within(effective) for n, v in f.stored(effective).items()}

    def _within(self, values: Values) -> list[Frame]:
        return [frame for frame in self.frames if all(name in values for name in frame.names)]

    def about(self, names: Sequence[str]) -> Coordinates:
        """Return the coordinates of these parameters alone."""
        return Coordinates(tuple(f for f in self.frames if set(f.names) & set(names)))

    def closure(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the parameters that change when the effective ones of these names do."""
        return tuple(dict.fromkeys([*names, *(n for f in self.about(names).frames for n in f.names)]))

    def push(self, effective: Values, tangent: Values) -> dict[str, Tensor]:
        """Carry a tangent vector at an effective point to the stored parameters."""
        result = dict(tangent)
        for frame in self.about(list(tangent)).frames:
            point = {name: effective[name] for name in frame.names}
            step = {name: tangent.get(name, torch.zeros_like(effective[name])) for name in frame.names}
            carried: tuple[Any, ...] = torch.func.jvp(frame.stored, (point,), (step,))
            result |= carried[1]
        return result

    def pull(self, effective: Values, slope: Values) -> dict[str, Tensor]:
        """Carry a gradient by the stored parameters to one by the effective ones."""
        result = dict(slope)
        for frame in self.frames:
            if all(name in slope for name in frame.names):
                point = {name: effective[name] for name in frame.names}
                back: Any = torch.func.vjp(frame.stored, point)[1]
                result |= back({name: slope[name].to(point[name]) for name in frame.names})[0]
        return result

    def title(self, name: str) -> str:
        """Say what a parameter's effective one is called."""
        return next((frame.title(name) for frame in self.frames if name in frame.names), name)

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain data."""
        return [{"frame": type(frame).__name__, **asdict(frame)} for frame in self.frames]

    @classmethod
    def from_json(cls, data: Sequence[Mapping[str, Any]]) -> Coordinates:
        """Read what `to_json` wrote."""
        frames = []
        for entry in data:
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items() if k != "frame"}
            kind: Any = FRAMES[entry["frame"]]
            frames.append(kind(**values))
        return cls(tuple(frames))


PLAIN = Coordinates()


def find_coordinates(model: nn.Module, call: Callable[[], Any], variables: Sequence[str]) -> Coordinates:
    """Find the effective coordinates of a model's variables, each by what its module does.

    Args:
        model: in the mode that is asked about, with its values in place.
        call: runs the forward once.
        variables: names of the parameters asked about.
    """
    owners = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(False))}
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = first_tensor((args, kwargs))
            if given is not None and name not in inputs and given.is_floating_point():
                inputs[name] = given.detach()

        return hook

    handles = [m.register_forward_hook(keep(name), with_kwargs=True) for name, m in owners.items()]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    frames: list[Frame] = list(_lengths(model, variables))
    for name, module in owners.items():
        frame = _affine_frame(name, module, inputs[name], variables) if name in inputs else None
        if frame is not None:
            frames.append(frame)
    return Coordinates(tuple(frames))


def _affine_frame(name: str, module: nn.Module, given: Tensor, variables: Sequence[str]) -> Frame | None:
    """Return the frame of a module with one or two vectors, from its outputs for a few values of them."""
    prefix = f"{name}." if name else ""
    vectors = {n: p for n, p in module.named_parameters(recurse=False) if sum(s > 1 for s in p.shape) <= 1}
    if not vectors or len(vectors) != len(list(module.parameters())) or len(vectors) > 2:
        return None
    if not all(prefix + n in variables for n in vectors):
        return None

    def run(x: Tensor, **values: float) -> Tensor | None:
        state = {n: torch.full_like(p.detach(), values.get(n, 0.0)).to(x) for n, p in vectors.items()}
        buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        with torch.no_grad():
            return first_tensor(functional_call(module, {**buffers, **state}, (x,)))

    try:
        other = given + torch.randn(given.shape, generator=torch.Generator().manual_seed(0)).to(given) * given.std()
        constant = {n: v for n in vectors for v in (0.0, -1.0) if _same(run(given, **{n: v}), run(other, **{n: v}))}
        if len(vectors) == 1 and constant == {next(iter(vectors)): -1.0}:
            return OnePlus(prefix + next(iter(vectors)))
        if len(vectors) == 2:
            return _stored_frame(prefix, module, given, vectors, run)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    return None


def _stored_frame(
    prefix: str, module: nn.Module, given: Tensor, vectors: Mapping[str, Tensor], run: Callable[..., Tensor | None]
) -> StoredAffine | None:
    """Return the frame of a normalizer that uses stored statistics: affine in each channel, with buffers of its own."""
    if module.training or not list(module.buffers()) or given.ndim < 2:
        return None
    for gain, bias in (tuple(vectors), tuple(vectors)[::-1]):
        zero, one = (run(torch.full_like(given, c), **{gain: 1.0}) for c in (0.0, 1.0))
        plain = run(given, **{gain: 1.0})
        shifted = run(torch.zeros_like(given), **{bias: 1.0})
        if zero is None or one is None or plain is None or shifted is None or plain.shape != given.shape:
            return None
        count = vectors[gain].numel()
        if given.shape[1] != count or not _same(shifted, torch.ones_like(given)):
            continue
        rest = [a for a in range(given.ndim) if a != 1]
        factor, offset = (one - zero).mean(rest), zero.mean(rest)
        wide = [count if a == 1 else 1 for a in range(given.ndim)]
        if _same(plain, given * factor.reshape(wide) + offset.reshape(wide)) and bool((factor != 0).all()):
            mean = (-offset / factor).double().tolist()
            return StoredAffine(prefix + gain, prefix + bias, tuple(mean), tuple(factor.double().tolist()))
    return None


def _lengths(model: nn.Module, variables: Sequence[str]) -> list[LengthAndDirection]:
    """Return the weights made of one length per slice and a direction: parametrizations and hooks alike."""
    frames = []
    values = dict(model.named_parameters())
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        pairs = [(f"{prefix}weight_g", f"{prefix}weight_v", None)]
        for tensor, parts in getattr(module, "parametrizations", {}).items():
            path = f"{prefix}parametrizations.{tensor}."
            if len(parts) == 1:
                pairs.append((f"{path}original0", f"{path}original1", parts[0]))
        for gain, direction, made_by in pairs:
            if gain not in variables or direction not in variables or gain not in values or direction not in values:
                continue
            g, v = values[gain].detach(), values[direction].detach()
            axes = [a for a in range(v.ndim) if v.shape[a] == g.numel() and g.numel() > 1]
            for axis in axes[:1] if g.numel() > 1 else []:
                axis = next((a for a in axes if g.ndim == v.ndim and g.shape[a] == g.numel()), axis)
                frame = LengthAndDirection(
                    gain, direction, axis, tuple(torch.where(g < 0, -1.0, 1.0).reshape(-1).tolist())
                )
                weight = frame.effective({gain: g, direction: v})[direction]
                if made_by is None or _same(made_by(g, v).detach(), weight):
                    frames.append(frame)
    return frames


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    return float((a - b).abs().max()) <= SAME * max(float(b.abs().max()), 1e-3)
