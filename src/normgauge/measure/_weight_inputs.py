"""The map from a layer's weights to its output, for fixed inputs: its norm, per sample and over the batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def input_norms(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, float]:
    """Return the norm of weights -> output (Frobenius to Euclidean) at each sample, and for all samples together.

    For Linear the norm of the inputs as rows; for a convolution that of its patches as rows, the largest over groups.

    Examples:
        >>> each, together = input_norms(nn.Linear(2, 5), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        >>> each.tolist()
        [5.0, 1.0]
    """
    rows = _rows(layer, inputs)
    if rows is None:  # no patches for three axes: each tap of the kernel passes the input on at most once
        taps = math.sqrt(math.prod(layer.kernel_size))  # type: ignore[arg-type]
        lengths = inputs.flatten(1).norm(dim=1)
        return taps * lengths, taps * float(lengths.norm())
    each = torch.stack([_spectral(rows[:, sample]).max() for sample in range(rows.shape[1])])
    return each, float(_spectral(rows.flatten(1, 2)).max())


def _rows(layer: nn.Module, inputs: Tensor) -> Tensor | None:
    """Return `[groups, samples, positions, features]`."""
    if isinstance(layer, nn.Linear):
        return inputs.reshape(1, len(inputs), -1, inputs.shape[-1])
    if isinstance(layer, nn.Conv3d):
        return None
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d))  # by the caller
    both = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = functional.pad(inputs, both, mode=mode)
    kernel, dilation, stride = layer.kernel_size, layer.dilation, layer.stride
    if isinstance(layer, nn.Conv1d):
        padded = padded.unsqueeze(2)
        kernel, dilation, stride = (1, *kernel), (1, *dilation), (1, *stride)
    patches = functional.unfold(padded, kernel, dilation=dilation, stride=stride)  # [N, channels taps, positions]
    grouped = patches.unflatten(1, (layer.groups, -1))
    return grouped.permute(1, 0, 3, 2)


def _spectral(matrices: Tensor) -> Tensor:
    """Return the spectral norm of each matrix, by the Gram matrix of its short side."""
    wide = matrices.shape[-1] > matrices.shape[-2]
    gram = matrices @ matrices.transpose(-1, -2) if wide else matrices.transpose(-1, -2) @ matrices
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0).sqrt() * (1 + 1e-11)
