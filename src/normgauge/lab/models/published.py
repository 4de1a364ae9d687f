"""Networks of the papers at their published size, and a narrow EfficientNet, under any normalizer.

Images of 32x32 get the usual CIFAR stem (3x3, stride 1, no pool); larger ones the published stem.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.lab.models.normalized import Normalized
from normgauge.lab.models.small import Factory, ResidualBlock, stack_linear


class Bottleneck(nn.Module):
    """relu(skip(x) + f(x)) with f normalized 1x1, 3x3 and 1x1 convolutions, the last four times as wide."""

    def __init__(self, fan_in: int, width: int, stride: int, norm: str) -> None:
        super().__init__()
        first = Normalized(nn.Conv2d(fan_in, width, 1, bias=False), norm, 2)
        second = Normalized(nn.Conv2d(width, width, 3, stride, 1, bias=False), norm, 2)
        third = Normalized(nn.Conv2d(width, 4 * width, 1, bias=False), norm, 2)
        self.body = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)
        same = fan_in == 4 * width and stride == 1
        self.skip = nn.Identity() if same else Normalized(nn.Conv2d(fan_in, 4 * width, 1, stride, bias=False), norm, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return relu(skip(x) + f(x))."""
        return torch.relu(self.skip(inputs) + self.body(inputs))


class MBConv(nn.Module):
    """EfficientNet's block: expand, depthwise, squeeze and excite, project; a skip where the shape stays."""

    def __init__(self, fan_in: int, fan_out: int, expand: int, kernel: int, stride: int, norm: str) -> None:
        super().__init__()
        wide, squeezed = expand * fan_in, max(1, fan_in // 4)
        first = [Normalized(nn.Conv2d(fan_in, wide, 1, bias=False), norm, 2), nn.SiLU()] if expand > 1 else []
        depthwise = nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False)
        self.expand = nn.Sequential(*first, Normalized(depthwise, norm, 2), nn.SiLU())
        squeeze, excite = nn.Conv2d(wide, squeezed, 1), nn.Conv2d(squeezed, wide, 1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), squeeze, nn.SiLU(), excite, nn.Sigmoid())
        self.project = Normalized(nn.Conv2d(wide, fan_out, 1, bias=False), norm, 2)
        self.residual = fan_in == fan_out and stride == 1

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the block's output, plus its input where the shape stays."""
        hidden = self.expand(inputs)
        output: Tensor = self.project(hidden * self.gate(hidden))
        return output + inputs if self.residual else output


def resnet18(norm: str, shape: tuple[int, ...], classes: int, *, width: int = 64) -> nn.Module:
    """Build ResNet-18 (2, 2, 2, 2 basic blocks); `width` other than 64 scales all of it."""
    return _resnet(norm, shape, classes, ResidualBlock, counts=(2, 2, 2, 2), first=width)


def resnet18_narrow(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a ResNet-18 of width 8 to 64: the named proxy for two cores."""
    return resnet18(norm, shape, classes, width=8)


def resnet101(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build ResNet-101 (3, 4, 23, 3 bottlenecks)."""
    return _resnet(norm, shape, classes, Bottleneck, counts=(3, 4, 23, 3), expansion=4)


def vgg16(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build VGG-16 (configuration D): thirteen convolutions and three linear layers, two of them with dropout."""
    channels, size = shape[0], shape[1]
    if size < 32:
        raise InputError("model 'vgg16'", "images must be 32x32 or larger", str(shape), "Choose vgg or vgg8")
    layers: list[nn.Module] = []
    for widths in ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)):
        for width in widths:
            layers += [Normalized(nn.Conv2d(channels, width, 3, padding=1), norm, 2), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
        size //= 2
    layers.append(nn.Flatten())
    fan_in = channels * size * size
    for _ in range(2):
        layers += [nn.Linear(fan_in, 4096), nn.ReLU(), nn.Dropout()]
        fan_in = 4096
    return nn.Sequential(*layers, nn.Linear(fan_in, classes))


def efficientnet_b3(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build EfficientNet-B3: width 1.2, depth 1.4."""
    return _efficientnet(norm, shape, classes, width=1.2, depth=1.4)


def efficientnet_narrow(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build an EfficientNet a quarter as wide as B0 and as deep: the named proxy for two cores."""
    return _efficientnet(norm, shape, classes, width=0.25, depth=1.0)


def relu10(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build S2's ReLU network of ten layers, 512 units wide."""
    return stack_linear(norm, (math.prod(shape), *(512,) * 9), classes)


def _stem(norm: str, shape: tuple[int, ...], width: int) -> list[nn.Module]:
    if shape[1] <= 64:
        return [Normalized(nn.Conv2d(shape[0], width, 3, padding=1, bias=False), norm, 2), nn.ReLU()]
    convolution = nn.Conv2d(shape[0], width, 7, 2, 3, bias=False)
    return [Normalized(convolution, norm, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]


def _resnet(
    norm: str,
    shape: tuple[int, ...],
    classes: int,
    block: Callable[[int, int, int, str], nn.Module],
    *,
    counts: tuple[int, ...],
    expansion: int = 1,
    first: int = 64,
) -> nn.Module:
    layers, channels = _stem(norm, shape, first), first
    for stage, count in enumerate(counts):
        for index in range(count):
            width = first * 2**stage
            layers.append(block(channels, width, 2 if stage and not index else 1, norm))
            channels = expansion * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


# expansion, kernel, stride, channels, blocks of EfficientNet-B0
_STAGES: tuple[tuple[int, ...], ...] = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3))
_STAGES += ((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1))


def _efficientnet(norm: str, shape: tuple[int, ...], classes: int, *, width: float, depth: float) -> nn.Module:
    small = shape[1] <= 64  # CIFAR: the stem and the first reduction keep the size
    channels = _round_channels(32 * width)
    stem = nn.Conv2d(shape[0], channels, 3, 1 if small else 2, 1, bias=False)
    layers: list[nn.Module] = [Normalized(stem, norm, 2), nn.SiLU()]
    for stage, (expand, kernel, stride, fan_out, blocks) in enumerate(_STAGES):
        wide = _round_channels(fan_out * width)
        for index in range(math.ceil(blocks * depth)):
            step = stride if not index and not (small and stage == 1) else 1
            layers.append(MBConv(channels, wide, expand, kernel, step, norm))
            channels = wide
    head = _round_channels(1280 * width)
    layers += [Normalized(nn.Conv2d(channels, head, 1, bias=False), norm, 2), nn.SiLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(head, classes))


def _round_channels(channels: float) -> int:
    """Return the nearest multiple of 8, at most a tenth below, as the published code rounds."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


_ALL: tuple[Any, ...] = (resnet18, resnet18_narrow, resnet101, vgg16, efficientnet_b3, efficientnet_narrow, relu10)
PUBLISHED: dict[str, Factory] = {factory.__name__: factory for factory in _ALL}
