"""Normalizers: functional forms, layers, weight parametrizations and the register that declares them."""

from normgauge.nn import functional as functional
from normgauge.nn import init as init
from normgauge.nn import registry as registry
from normgauge.nn._bad_networks import cascade, network_with_gradient, network_with_slope
from normgauge.nn._layer_geometry import LayerGeometry, layer_geometry
from normgauge.nn._population import population_statistics
from normgauge.nn._spectral import spectral_norm as spectral_norm
from normgauge.nn.batch_variants import BatchRenorm, GhostBatchNorm, SyncedBatchNorm, all_reduce
from normgauge.nn.lp_batch import LpBatchNorm
from normgauge.nn.noisy_batch import NoisyBatchNorm
from normgauge.nn.parametrizations import centered_weight_norm as centered_weight_norm
from normgauge.nn.parametrizations import hyperball as hyperball
from normgauge.nn.parametrizations import norm_propagation as norm_propagation
from normgauge.nn.parametrizations import scaled_weight_standardization as scaled_weight_standardization
from normgauge.nn.parametrizations import unit_columns as unit_columns
from normgauge.nn.parametrizations import unit_sphere as unit_sphere
from normgauge.nn.parametrizations import weight_norm as weight_norm
from normgauge.nn.parametrizations import weight_standardization as weight_standardization
from normgauge.nn.standard import (
    BatchNorm,
    ChannelLayerNorm,
    ChannelRMSNorm,
    FrozenBatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
)
from normgauge.nn.stat import StatNorm
from normgauge.nn.transformer import DynamicErf, DynamicTanh, HeadRMSNorm, ScaleNorm, UnitStream
from normgauge.nn.whitening import WhiteningNorm

__all__ = [
    "BatchNorm",
    "BatchRenorm",
    "ChannelLayerNorm",
    "ChannelRMSNorm",
    "DynamicErf",
    "DynamicTanh",
    "FrozenBatchNorm",
    "GhostBatchNorm",
    "GroupNorm",
    "HeadRMSNorm",
    "InstanceNorm",
    "LayerGeometry",
    "LayerNorm",
    "LpBatchNorm",
    "NoisyBatchNorm",
    "RMSNorm",
    "ScaleNorm",
    "StatNorm",
    "SyncedBatchNorm",
    "UnitStream",
    "WhiteningNorm",
    "all_reduce",
    "cascade",
    "centered_weight_norm",
    "functional",
    "hyperball",
    "init",
    "layer_geometry",
    "network_with_gradient",
    "network_with_slope",
    "norm_propagation",
    "population_statistics",
    "registry",
    "scaled_weight_standardization",
    "spectral_norm",
    "unit_columns",
    "unit_sphere",
    "weight_norm",
    "weight_standardization",
]
