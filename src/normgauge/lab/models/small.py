"""Small networks under any normalizer, the proxies two cores can train: MLP, VGG, ResNet, deep linear network."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.lab.models.normalized import Normalized

Factory = Callable[[str, tuple[int, ...], int], nn.Module]


def mlp(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a ReLU network with three hidden layers of 64 units."""
    return stack_linear(norm, (math.prod(shape), 64, 64, 64), classes)


def stack_linear(norm: str, sizes: tuple[int, ...], classes: int) -> nn.Module:
    """Stack normalized linear layers of these widths with ReLU between, and a linear layer at the end."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [Normalized(nn.Linear(fan_in, fan_out), norm, 0), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def vgg(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a small VGG for 8x8 (four 3x3 convolutions, two pools) or 32x32 images (eight, four pools).

    S1 trains a VGG on CIFAR-10; this is the named proxy that two cores can train in seconds.
    """
    small = (16, 16, 0, 32, 32, 0)
    plan = small if _image(shape, "vgg")[1] < 32 else (*small, 64, 64, 0, 64, 64, 0)
    return _stack_convolutions(plan, norm, shape, classes, "vgg")


def vgg8(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a VGG of eight 3x3 convolutions, 8 to 32 channels wide: the proxy of the studies' small size."""
    return _stack_convolutions((8, 0, 16, 16, 0, 32, 32, 0, 32, 32, 32, 0), norm, shape, classes, "vgg8")


def _stack_convolutions(plan: tuple[int, ...], norm: str, shape: tuple[int, ...], classes: int, name: str) -> nn.Module:
    """Stack normalized 3x3 convolutions of these widths; 0 halves the image, while there is something to halve."""
    channels, size = _image(shape, name)
    layers: list[nn.Module] = []
    for width in plan:
        if width:
            layers += [Normalized(nn.Conv2d(channels, width, 3, padding=1), norm, 2), nn.ReLU()]
            channels = width
        elif size > 1:
            layers.append(nn.MaxPool2d(2))
            size //= 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * size * size, classes))


class ResidualBlock(nn.Module):
    """relu(x + f(x)) with f two normalized 3x3 convolutions; a 1x1 convolution where width or size changes."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, norm: str) -> None:
        super().__init__()
        self.first = Normalized(nn.Conv2d(fan_in, fan_out, 3, stride, padding=1), norm, 2)
        self.second = Normalized(nn.Conv2d(fan_out, fan_out, 3, padding=1), norm, 2)
        same = fan_in == fan_out and stride == 1
        self.skip = nn.Identity() if same else Normalized(nn.Conv2d(fan_in, fan_out, 1, stride), norm, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return relu(skip(x) + f(x))."""
        return torch.relu(self.skip(inputs) + self.second(torch.relu(self.first(inputs))))


def resnet(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a ResNet of three residual blocks (16, 32, 32 channels) with global average pooling."""
    channels, _ = _image(shape, "resnet")
    stem = Normalized(nn.Conv2d(channels, 16, 3, padding=1), norm, 2)
    blocks = (ResidualBlock(*sizes, norm) for sizes in ((16, 16, 1), (16, 32, 2), (32, 32, 1)))
    return nn.Sequential(stem, nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


def dln(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build S1's deep linear network: 25 square linear layers without nonlinearity.

    The normalizer stands between layers, not after the last one, so that the output can have any scale.

    References: santurkar2018.
    """
    width = math.prod(shape)
    hidden = [Normalized(nn.Linear(width, width, bias=False), norm, 0) for _ in range(24)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes, bias=False))


def _image(shape: tuple[int, ...], model: str) -> tuple[int, int]:
    if len(shape) != 3 or shape[1] != shape[2] or shape[1] < 8:
        rule = "inputs must be square images (channels, size, size) with size >= 8"
        raise InputError(f"model {model!r}", rule, str(shape), "Choose --model mlp or dln for this data")
    return shape[0], shape[1]


SMALL: dict[str, Factory] = {"mlp": mlp, "vgg": vgg, "vgg8": vgg8, "resnet": resnet, "dln": dln}
