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

__all__ = ["BatchNorm", "FrozenBatchNorm", "GhostBatchNorm", "BatchRenorm", "SyncedBatchNorm", "LpBatchNorm"]
__all__ += ["NoisyBatchNorm", "LayerNorm", "ChannelLayerNorm", "GroupNorm", "InstanceNorm", "RMSNorm"]
__all__ += ["ChannelRMSNorm", "StatNorm", "WhiteningNorm", "ScaleNorm", "UnitStream", "HeadRMSNorm", "DynamicTanh"]
__all__ += ["DynamicErf", "all_reduce", "weight_norm", "centered_weight_norm", "weight_standardization"]
__all__ += ["scaled_weight_standardization", "spectral_norm", "unit_sphere", "unit_columns", "hyperball"]
__all__ += ["norm_propagation", "population_statistics", "functional", "init", "registry", "LayerGeometry"]
__all__ += ["layer_geometry", "cascade", "network_with_gradient", "network_with_slope"]
