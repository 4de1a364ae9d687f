"""Normalizers: functional forms, layers, weight parametrizations and the register that declares them."""

from normgauge.nn import none as none
from normgauge.nn import registry as registry
from normgauge.nn import weight as weight
from normgauge.nn.batch import BatchNorm
from normgauge.nn.group import GroupNorm
from normgauge.nn.instance import InstanceNorm
from normgauge.nn.layer import ChannelLayerNorm, LayerNorm
from normgauge.nn.rms import ChannelRMSNorm, RMSNorm

__all__ = [
    "BatchNorm",
    "ChannelLayerNorm",
    "ChannelRMSNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "RMSNorm",
    "registry",
]
