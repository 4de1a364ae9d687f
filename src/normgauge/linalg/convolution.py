"""`Convolution`: the linear map of a convolution on inputs of one size, with its adjoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normgauge.errors import InputError
from normgauge.linalg._operator import Operator

PADDING_MODES = ("zeros", "circular", "reflect", "replicate")
_FORWARD = (functional.conv1d, functional.conv2d, functional.conv3d)
_ADJOINT = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)

ConvolutionLayer = nn.Conv1d | nn.Conv2d | nn.Conv3d
TransposedLayer = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


class Convolution(Operator):
    """The map x -> weight * pad(x) on inputs of one spatial size, bias left out, as an operator on flat vectors.

    y[c, o] = sum over (i, t) of weight[c, i, t] x[i, stride o + dilation t - padding], in 1, 2 or 3 spatial axes and
    per group of channels. With `transposed` the operator is the adjoint of that map, which is what torch's
    ConvTranspose computes. The weight is `[channels out, channels in / groups, *kernel]`, also when `transposed`;
    `size` is the spatial size of the input, padding is per axis before and after, `mode` zeros, circular, reflect or
    replicate, and `outputs` how many of the convolution's output positions count per axis (all of them if `None`).

    Examples:
        >>> operator = Convolution(torch.tensor([[[1.0, -1.0]]]), (3,))
        >>> operator @ torch.tensor([4.0, 2.0, 1.0])
        tensor([2., 1.])
        >>> operator.adjoint(torch.tensor([1.0, 0.0]))
        tensor([ 1., -1.,  0.])
    """

    def __init__(
        self,
        weight: Tensor,
        size: Sequence[int],
        *,
        stride: Sequence[int] | None = None,
        padding: Sequence[tuple[int, int]] | None = None,
        dilation: Sequence[int] | None = None,
        groups: int = 1,
        mode: str = "zeros",
        transposed: bool = False,
        outputs: Sequence[int] | None = None,
    ) -> None:
        axes = weight.ndim - 2
        if not 1 <= axes <= 3 or len(size) != axes:
            rule = "weight has 1 to 3 kernel axes and size has one entry for each"
            step = "Give the spatial size only, without batch and channels"
            raise InputError("Convolution", rule, f"weight {tuple(weight.shape)} and size {tuple(size)}", step)
        self.weight = weight.detach()
        self.size = tuple(int(n) for n in size)
        self.stride = tuple(stride or (1,) * axes)
        self.padding = tuple((int(a), int(b)) for a, b in padding or ((0, 0),) * axes)
        self.dilation = tuple(dilation or (1,) * axes)
        self.groups, self.mode, self.transposed = groups, mode, transposed
        self.span = tuple((k - 1) * d + 1 for k, d in zip(weight.shape[2:], self.dilation, strict=True))
        each = zip(self.size, self.padding, self.span, self.stride, strict=True)
        every = tuple((n + a + b - span) // s + 1 for n, (a, b), span, s in each)
        if min(every) < 1 or min(self.size) < 1:
            got = f"size {self.size}, kernel span {self.span}, padding {self.padding}"
            step = "Give the size the layer sees in the network"
            raise InputError("Convolution", "the padded input must hold the kernel at least once", got, step)
        self.outputs = every if outputs is None else tuple(outputs)
        self._whole = self.outputs == every
        inside = (weight.shape[1] * groups, *self.size)
        outside = (weight.shape[0], *self.outputs)
        self.input_shape, self.output_shape = (outside, inside) if transposed else (inside, outside)
        self.shape = (math.prod(self.output_shape), math.prod(self.input_shape))
        self.dtype, self.device = weight.dtype, weight.device

    def divided_by(self, factor: float) -> Convolution:
        """Return the operator with its weight divided by a number."""
        twin = copy(self)
        twin.weight = self.weight / factor
        return twin

    @classmethod
    def of(cls, layer: nn.Module, size: Sequence[int], weight: Tensor | None = None) -> Convolution:
        """Return the operator of a torch Linear, Conv or ConvTranspose layer on inputs of spatial size `size`.

        Its bias does not enter; `weight` is used in place of its own (a folded or a double precision copy).
        """
        if weight is None:
            weight = layer.weight.detach()  # type: ignore[operator]
        assert isinstance(weight, Tensor)  # for the type checker
        if isinstance(layer, nn.Linear):
            return cls(weight.unsqueeze(-1), (1,))
        if isinstance(layer, ConvolutionLayer):
            both = layer._reversed_padding_repeated_twice  # the one place where torch spells out padding="same"
            padding = [(both[i], both[i + 1]) for i in range(len(both) - 2, -1, -2)]
            same: dict[str, Any] = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups}
            return cls(weight, size, padding=padding, mode=layer.padding_mode, **same)
        if isinstance(layer, TransposedLayer):
            return cls._transpose_of(layer, tuple(size), weight)
        rule, got = "the layer must be Linear, Conv1d/2d/3d or ConvTranspose1d/2d/3d", type(layer).__name__
        raise InputError("Convolution.of", rule, got, "Build Convolution from a weight, a size and the stride yourself")

    @classmethod
    def _transpose_of(cls, layer: TransposedLayer, size: tuple[int, ...], weight: Tensor) -> Convolution:
        paddings = [int(p) for p in layer.padding]
        each = zip(size, layer.stride, paddings, layer.dilation, layer.kernel_size, layer.output_padding, strict=True)
        grown = tuple((n - 1) * s - 2 * p + d * (k - 1) + extra + 1 for n, s, p, d, k, extra in each)
        same: dict[str, Any] = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups}
        padding = [(p, p) for p in paddings]
        # of the convolution's outputs fewer count when output_padding >= stride
        return cls(weight, grown, padding=padding, transposed=True, outputs=size, **same)

    def to(self, dtype: torch.dtype) -> Convolution:
        """Return the same map in another precision."""
        twin = copy(self)
        twin.weight, twin.dtype = self.weight.to(dtype), dtype
        return twin

    def apply(self, inputs: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the images of a batch `[batch, *input_shape]`; differentiable in both arguments."""
        kernel = self.weight if weight is None else weight
        return self._pull(inputs, kernel) if self.transposed else self._push(inputs, kernel)

    def apply_adjoint(self, outputs: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the adjoint's images of a batch `[batch, *output_shape]`; differentiable in both arguments."""
        kernel = self.weight if weight is None else weight
        return self._push(outputs, kernel) if self.transposed else self._pull(outputs, kernel)

    def adjoint(self, vector: Tensor) -> Tensor:
        """Return the product of the transposed operator with one flat vector of length `shape[0]`."""
        return self.apply_adjoint(vector.reshape(1, *self.output_shape)).reshape(-1)

    def _rmatvec(self, vector: Tensor) -> Tensor:
        return self.adjoint(vector)

    def _matvec(self, vector: Tensor) -> Tensor:
        return self.apply(vector.reshape(1, *self.input_shape)).reshape(-1)

    def matmat(self, matrix: Tensor) -> Tensor:
        """Return the products with the columns of `[shape[1], k]`, in one batch."""
        if matrix.ndim != 2 or matrix.shape[0] != self.shape[1]:
            return super().matmat(matrix)  # which explains
        return self.apply(matrix.T.reshape(-1, *self.input_shape)).flatten(1).T

    @property
    def _plain(self) -> bool:
        """Whether torch's own padding argument does the whole job."""
        return self.mode == "zeros" and self._whole and all(a == b for a, b in self.padding)

    def _push(self, inputs: Tensor, weight: Tensor) -> Tensor:
        convolve = _FORWARD[weight.ndim - 3]
        options: dict[str, Any] = {"stride": self.stride, "groups": self.groups, "dilation": self.dilation}
        if self._plain:
            return convolve(inputs, weight, padding=tuple(a for a, _ in self.padding), **options)
        widths = [width for pair in reversed(self.padding) for width in pair]
        mode = "constant" if self.mode == "zeros" else self.mode
        padded = functional.pad(inputs, widths, mode=mode) if any(widths) else inputs
        images = convolve(padded, weight, **options)
        for axis, length in enumerate(self.outputs):
            images = images.narrow(axis + 2, 0, length)
        return images

    def _pull(self, outputs: Tensor, weight: Tensor) -> Tensor:
        deconvolve = _ADJOINT[weight.ndim - 3]
        padded = [n + a + b for n, (a, b) in zip(self.size, self.padding, strict=True)]
        reached = [(m - 1) * s + span for m, s, span in zip(self.outputs, self.stride, self.span, strict=True)]
        unread = tuple(whole - last for whole, last in zip(padded, reached, strict=True))
        options: dict[str, Any] = {"stride": self.stride, "groups": self.groups, "dilation": self.dilation}
        if self._plain:
            before = tuple(a for a, _ in self.padding)
            return deconvolve(outputs, weight, padding=before, output_padding=unread, **options)
        spread = deconvolve(outputs, weight, **options)
        spread = functional.pad(spread, [width for extra in reversed(unread) for width in (0, extra)])
        for axis in range(len(self.size)):
            spread = self._fold_padding(spread, axis)
        return spread

    def _fold_padding(self, padded: Tensor, axis: int) -> Tensor:
        """Apply the adjoint of padding along one axis: every padded entry returns to where it was copied from."""
        (before, _), length = self.padding[axis], self.size[axis]
        if self.mode == "zeros":
            return padded.narrow(axis + 2, before, length)
        index = self.source_positions(axis).to(padded.device)
        shape = [*padded.shape]
        shape[axis + 2] = length
        return padded.new_zeros(shape).index_add(axis + 2, index, padded)

    def source_positions(self, axis: int) -> Tensor:
        """Return, for every position of the padded axis, the input position it copies (not for zero padding)."""
        before, after = self.padding[axis]
        length = self.size[axis]
        positions = torch.arange(-before, length + after)
        if self.mode == "circular":
            return positions % length
        if self.mode == "replicate":
            return positions.clamp(0, length - 1)
        mirrored = positions.abs()
        return torch.where(mirrored >= length, 2 * (length - 1) - mirrored, mirrored)
