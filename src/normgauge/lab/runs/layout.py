"""Channels-last memory for training, where it was measured to make a step faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from normgauge.nn import BatchNorm, BatchRenorm, ChannelLayerNorm, LpBatchNorm

# On 8x8 images some normalizers gain a little and others lose, and a step takes no time.
SMALLEST_IMAGE = 16
# Normalizers whose kernels take channels-last memory as it is; every other one copies, or walks it with strides.
FAST_NORMALIZERS = (nn.BatchNorm2d, BatchNorm, BatchRenorm, ChannelLayerNorm, LpBatchNorm)
_PLAIN = ("torch.nn.modules.", "torch.nn.utils.parametr", "normgauge.lab.")
_SLOW = ("torch.nn.modules.normalization", "torch.nn.modules.instancenorm")


def gains_from_channels_last(network: nn.Module, images: Tensor) -> bool:
    """Say whether a step on these images is faster in channels-last memory.

    So it is for convolutions on images of at least 16 pixels, alone or with batch norm in its plain, l^p and renorm
    form, with layer norm, and with our reparametrizations of the weights; with group, instance, rms, ghost, noisy or
    whitening normalization it is slower (`benchmarks/results/layout.json` has the ratios). Networks with modules or
    parametrizations of other packages are left alone: their code may need the usual layout (`view`).
    """
    if images.ndim != 4 or min(images.shape[2:]) < SMALLEST_IMAGE:
        return False
    modules = list(network.modules())
    weights = {id(part) for module in modules if isinstance(module, ParametrizationList) for part in module.modules()}
    return any(isinstance(module, nn.Conv2d) for module in modules) and all(
        _is_ours(module) if id(module) in weights else type(module) in FAST_NORMALIZERS or _is_plain(module)
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


def _is_plain(module: nn.Module) -> bool:
    """Say whether a module's code is torch's or the lab's, and no normalizer; a parametrized one counts as its own."""
    kind = type(module)
    origin = (kind.__bases__[0] if is_parametrized(module) else kind).__module__
    return origin.startswith(_PLAIN) and not origin.startswith(_SLOW)


def _is_ours(parametrization: nn.Module) -> bool:
    return type(parametrization).__module__.startswith(("torch.nn.", "normgauge."))
