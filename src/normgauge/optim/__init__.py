"""Optimizers that know the geometry: spheres, projections, normalized parametrization; plain `nn.Parameter`s."""

from normgauge.optim.sphere_adam import GeodesicAdam as GeodesicAdam
from normgauge.optim.sphere_adam import SphereAdam as SphereAdam
from normgauge.optim.sphere_sgd import GeodesicSGD as GeodesicSGD
from normgauge.optim.sphere_sgd import SphereSGD as SphereSGD

__all__ = ["GeodesicAdam", "GeodesicSGD", "SphereAdam", "SphereSGD"]
