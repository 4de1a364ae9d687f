"""Networks of one shape as one: parameters stacked `(members, ...)`, activations `(members, features, batch)`.

Features come before the batch, so that a layer of all members is one batched matrix product and batch statistics are a
normalization over the last, contiguous axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.errors import ModelError
from normgauge.lab.models import Normalized

# Elementwise layers act on the stacked tensor as they act on one network's.
ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.LeakyReLU, nn.Identity)


@dataclass
class _Linear:
    """`weight @ h + bias`."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, h: Tensor) -> Tensor:
        return torch.bmm(self.weight, h) if self.bias is None else torch.baddbmm(self.bias, self.weight, h)

    def after(self, scale: Tensor, shift: Tensor, h: Tensor) -> Tensor:
        """Return the layer's output on `scale * h + shift`, with both folded into the small tensors."""
        constant = torch.bmm(self.weight, shift)
        constant = constant if self.bias is None else constant + self.bias
        return torch.baddbmm(constant, self.weight * scale.transpose(1, 2), h)


@dataclass
class _Batch:
    """Normalization over the batch, the last axis; `mean`, `variance` are the stored statistics of evaluation."""

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    variance: Tensor
    batches: Tensor
    eps: float
    momentum: float

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalized input, and of this batch the means and the inverse standard deviations."""
        return torch.native_layer_norm(h, (h.shape[-1],), None, None, self.eps)


@dataclass
class _Layer:
    """Normalization over the features of each sample, the middle axis."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, h: Tensor) -> Tensor:
        variance, mean = torch.var_mean(h, dim=1, keepdim=True, correction=0)
        return _affine((h - mean) * (variance + self.eps).rsqrt(), self.weight, self.bias)


class Stack:
    """Several networks of one shape that compute as one.

    Args:
        networks: modules made of `nn.Sequential`, `nn.Flatten`, `nn.Linear`, batch and layer normalization and
            elementwise activations, all of one structure; they are copied from, not changed.

    Raises:
        ModelError: for another layer, or networks that differ in structure.

    Examples:
        >>> nets = [nn.Linear(3, 2) for _ in range(4)]
        >>> x = torch.randn(4, 3, 7)  # members, features, batch
        >>> bool(torch.allclose(Stack(nets)(x)[2], nets[2](x[2].T).T, atol=1e-6))
        True
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        chains = [list(_chain(network)) for network in networks]
        shapes = [[(type(part), part.extra_repr()) for part in chain] for chain in chains]
        if any(shape != shapes[0] for shape in shapes):
            raise ModelError(
                "Stack", "all networks must have one structure", "several", "Stack each structure on its own"
            )
        self.operations: list[_Linear | _Batch | _Layer | nn.Module] = [
            _stack_parts(parts) for parts in zip(*chains, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        """Return the stacked parameters, each with the members on its first axis."""
        return [
            tensor
            for operation in self.operations
            if not isinstance(operation, nn.Module)
            for tensor in (operation.weight, operation.bias)
            if tensor is not None
        ]

    def __call__(self, inputs: Tensor, *, remember: bool = True) -> Tensor:
        """Return outputs `(members, features, batch)` in training mode; `remember` updates the stored statistics."""
        h, pending = inputs, None
        statistics: list[tuple[_Batch, Tensor, Tensor]] = []
        for operation in self.operations:
            if isinstance(operation, _Linear) and pending is not None:
                scale, shift = pending.weight, pending.bias
                h, pending = operation.after(scale, shift, h), None  # type: ignore[arg-type]
                continue
            if pending is not None:
                h, pending = _affine(h, pending.weight, pending.bias), None
            if isinstance(operation, _Batch):
                h, mean, inverse = operation(h)
                statistics.append((operation, mean, inverse))
                pending = operation if operation.weight is not None else None
            else:
                h = operation(h)
        if remember:
            with torch.no_grad():
                _remember(statistics, inputs.shape[-1])
        return h if pending is None else _affine(h, pending.weight, pending.bias)

    @torch.no_grad()
    def keep(self, members: Tensor) -> None:
        """Drop all other members; what is kept is not touched."""
        for operation in self.operations:
            if isinstance(operation, nn.Module):
                continue
            for name, value in vars(operation).items():
                if isinstance(value, Tensor):
                    setattr(operation, name, value[members].requires_grad_(value.requires_grad))

    @torch.no_grad()
    def write(self, member: int, network: nn.Module) -> nn.Module:
        """Copy one member's parameters and stored statistics into a network of the structure, and return it."""
        for part, operation in zip(_chain(network), self.operations, strict=True):
            if isinstance(operation, nn.Module):
                continue
            for name, value in _tensors(operation):
                target = getattr(part, name)
                target.copy_(value[member].reshape(target.shape))
        return network


def _chain(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers in the order of the forward pass, without containers and without `nn.Flatten`."""
    if isinstance(network, nn.Sequential):
        for part in network:
            yield from _chain(part)
    elif isinstance(network, Normalized):
        yield from _chain(network.layer)
        yield from _chain(network.norm)
    elif isinstance(network, nn.Flatten):
        return
    elif _is_supported(network):
        yield network
    else:
        raise ModelError(
            "Stack",
            "a network of linear layers, batch or layer normalization and elementwise activations",
            type(network).__name__,
            "Train these networks one by one",
        )


def _is_supported(part: nn.Module) -> bool:
    if nn.utils.parametrize.is_parametrized(part):
        return False
    if isinstance(part, _BatchNorm):
        return part.track_running_stats and part.momentum is not None
    if isinstance(part, nn.GroupNorm):
        return part.num_groups == 1
    return isinstance(part, (nn.Linear, nn.LayerNorm, *ELEMENTWISE))


def _stack_parts(parts: Sequence[nn.Module]) -> _Linear | _Batch | _Layer | nn.Module:
    first = parts[0]
    if isinstance(first, nn.Linear):
        return _Linear(_parameter(parts, "weight", 0), None if first.bias is None else _parameter(parts, "bias", 1))
    if isinstance(first, ELEMENTWISE):
        return first
    gain, shift = (None if getattr(first, name) is None else _parameter(parts, name, 1) for name in _AFFINE)
    if isinstance(first, _BatchNorm):
        mean, variance = (torch.stack([getattr(p, n) for p in parts]).unsqueeze(-1) for n in _STORED)
        batches = torch.stack([getattr(part, _COUNT) for part in parts])
        momentum = float(first.momentum or 0.0)
        return _Batch(gain, shift, mean, variance, batches=batches, eps=first.eps, momentum=momentum)
    return _Layer(gain, shift, float(first.eps))  # type: ignore[arg-type]


_AFFINE = ("weight", "bias")
_STORED = ("running_mean", "running_var")
_COUNT = "num_batches_tracked"


def _parameter(parts: Sequence[nn.Module], name: str, axes: int) -> Tensor:
    """Stack one parameter of all members, with `axes` further axes of size one at the end, for the batch."""
    stacked = torch.stack([getattr(part, name).detach() for part in parts])
    return stacked.reshape(*stacked.shape, *(1,) * axes).requires_grad_()


def _affine(h: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    if gain is None:
        return h
    return h * gain if shift is None else torch.addcmul(shift, h, gain)


def _tensors(operation: _Linear | _Batch | _Layer) -> Iterator[tuple[str, Tensor]]:
    """Yield the names the tensors have in a torch layer, and the stacked tensors."""
    pairs: list[tuple[str, Tensor | None]] = [("weight", operation.weight), ("bias", operation.bias)]
    if isinstance(operation, _Batch):
        pairs += [("running_mean", operation.mean), ("running_var", operation.variance), (_COUNT, operation.batches)]
    yield from ((name, tensor) for name, tensor in pairs if tensor is not None)


def _remember(statistics: Sequence[tuple[_Batch, Tensor, Tensor]], count: int) -> None:
    """Move the stored statistics towards this batch's, as torch does: means, and variances with `count - 1`."""
    for layer, mean, inverse in statistics:
        layer.mean.lerp_(mean.detach(), layer.momentum)
        variance = inverse.detach().pow(-2).sub_(layer.eps).mul_(count / (count - 1))
        layer.variance.lerp_(variance, layer.momentum)
        layer.batches += 1
