"""Naive twins: a layer as a dense matrix, column by column, and its norm by a dense SVD in float64."""

import math
import random

import torch
from torch import nn

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@torch.no_grad()
def dense_matrix(layer, input_shape):
    """The matrix of an affine layer in evaluation mode: image of every unit vector minus image of zero."""
    entries = math.prod(input_shape)
    origin = layer(torch.zeros(1, *input_shape, dtype=torch.float64)).reshape(-1)
    images = layer(torch.eye(entries, dtype=torch.float64).reshape(entries, *input_shape))
    return (images.reshape(entries, -1) - origin).T


def dense_norm(layer, input_shape):
    return float(torch.linalg.svdvals(dense_matrix(layer, input_shape))[0])


def random_layer(seed):
    """A small random Conv or ConvTranspose layer in float64 and an input shape it accepts."""
    draw = random.Random(seed)
    while True:
        axes = draw.choice([1, 1, 2, 2, 2, 3])
        groups = draw.choice([1, 1, 2])
        kernel = tuple(draw.randint(1, 4 if axes < 3 else 2) for _ in range(axes))
        stride = tuple(draw.randint(1, 3) for _ in range(axes))
        dilation = tuple(draw.randint(1, 2) for _ in range(axes))
        padding = tuple(draw.randint(0, 3) for _ in range(axes))
        size = tuple(draw.randint(1, 6 if axes < 3 else 3) for _ in range(axes))
        inputs, outputs = groups * draw.randint(1, 3), groups * draw.randint(1, 3)
        common = {"stride": stride, "dilation": dilation, "groups": groups, "padding": padding}
        try:
            if draw.random() < 0.3:
                extra = tuple(draw.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
                layer = TRANSPOSED[axes - 1](inputs, outputs, kernel, output_padding=extra, **common)
            else:
                mode = draw.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
                if mode == "zeros" and max(stride) == 1 and draw.random() < 0.3:
                    common["padding"] = "same"
                layer = CONV[axes - 1](inputs, outputs, kernel, padding_mode=mode, **common)
            layer = layer.double()
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                layer.weight.normal_(generator=generator)
                layer(torch.zeros(1, inputs, *size, dtype=torch.float64))
        except (RuntimeError, ValueError):  # torch refuses the combination: the kernel or the padding is too large
            continue
        return layer, (inputs, *size)


def trained_like(outputs, inputs, kernel, seed=0):
    """A kernel with a low-pass envelope and a decaying channel spectrum, as training makes them."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.arange(kernel) - (kernel - 1) / 2
    envelope = torch.exp(-taps.square() / 2)
    side = min(outputs, inputs)
    left = torch.linalg.qr(torch.randn(outputs, side, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(inputs, side, generator=generator, dtype=torch.float64))[0]
    base = left * torch.arange(1, side + 1).double().rsqrt() @ right.T
    noise = 1 + 0.5 * torch.randn(outputs, inputs, kernel, kernel, generator=generator, dtype=torch.float64)
    return base[:, :, None, None] * envelope[:, None] * envelope * noise
