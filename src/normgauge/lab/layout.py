"""Channels-last memory for training, where it was measured to make a step faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from normgauge.nn import BatchNorm, BatchRenorm, ChannelLayerNorm, FrozenBatchNorm, LpBatchNorm

# On 8x8 images a tenth is gained with some normalizers and lost with others.
SMALLEST_IMAGE = 16
# Normalizers whose kernels take channels-last memory as it is; every other one copies, or walks it with strides.
FAST_NORMALIZERS = (nn.BatchNorm2d, BatchNorm, BatchRenorm, FrozenBatchNorm, ChannelLayerNorm, LpBatchNorm)
_PLAIN = ("torch.nn.modules.", "torch.nn.utils.parametrize", "normgauge.lab.")
_SLOW = ("torch.nn.modules.normalization", "torch.nn.modules.instancenorm")


def gains_from_channels_last(network: nn.Module, images: Tensor) -> bool:
    """Say whether a step on these images is faster in channels-last memory.

    So it is for convolutions on images of at least 16 pixels, alone or with batch norm in its plain, l^p, renorm and
    frozen form, with layer norm, and with every reparametrization of the weights: 1.1 to 1.5 times as fast on one
    thread of the machine in `benchmarks/results/layout.json`. With group, instance, rms, ghost, noisy or whitening
    normalization it is 0.6 to 0.95 times as fast. Networks with modules of other packages are left alone:
    their code may need the usual layout (`view`).
    """
    if images.ndim != 4 or min(images.shape[2:]) < SMALLEST_IMAGE:
        return False
    modules = list(network.modules())
    inner = {id(part) for module in modules if isinstance(module, ParametrizationList) for part in module.modules()}
    return any(isinstance(module, nn.Conv2d) for module in modules) and all(
        id(module) in inner or type(module) in FAST_NORMALIZERS or _is_plain(type(module).__module__)
        for module in modules
    )


class Layout:
    """The memory layout of one training: channels-last where that is faster, else as it is.

    Args:
        network: what is trained; its weights are moved in place.
        images: the training inputs, or some of them.
    """

    def __init__(self, network: nn.Module, images: Tensor) -> None:
        self._network = network
        self.channels_last = gains_from_channels_last(network, images)

    def inputs(self, images: Tensor) -> Tensor:
        """Return a batch in the layout of the training."""
        return images.contiguous(memory_format=torch.channels_last) if self.channels_last else images

    @contextmanager
    def training(self) -> Iterator[None]:
        """Hold the weights in the layout of the training, and in the usual one afterwards."""
        self._move(torch.channels_last)
        try:
            yield
        finally:
            self._move(torch.contiguous_format)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Hold the weights in the usual layout meanwhile: measurements flatten them."""
        self._move(torch.contiguous_format)
        try:
            yield
        finally:
            self._move(torch.channels_last)

    def _move(self, layout: torch.memory_format) -> None:
        if self.channels_last:
            self._network.to(memory_format=layout)  # type: ignore[call-overload]


def _is_plain(module: str) -> bool:
    return module.startswith(_PLAIN) and not module.startswith(_SLOW)
