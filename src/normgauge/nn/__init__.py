"""Normalizers: functional forms, layers, weight parametrizations, and the registry that declares them."""

from normgauge.nn import init as init
from normgauge.nn._spectral import spectral_norm as spectral_norm
from normgauge.nn.parametrizations import centered_weight_norm as centered_weight_norm
from normgauge.nn.parametrizations import scaled_weight_standardization as scaled_weight_standardization
from normgauge.nn.parametrizations import unit_sphere as unit_sphere
from normgauge.nn.parametrizations import weight_norm as weight_norm
from normgauge.nn.parametrizations import weight_standardization as weight_standardization

__all__ = [
    "centered_weight_norm",
    "init",
    "scaled_weight_standardization",
    "spectral_norm",
    "unit_sphere",
    "weight_norm",
    "weight_standardization",
]
