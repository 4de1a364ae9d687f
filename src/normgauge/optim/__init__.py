"""Optimizers that know the geometry: spheres, projections, normalized parametrization; plain `nn.Parameter`s."""

from normgauge.optim._gdnp import GDNPNetworkRun, GDNPRecord, GDNPRun, gdnp, gdnp_network
from normgauge.optim._gdnp_optimizer import GDNP
from normgauge.optim._gdnp_problems import (
    GaussianHalfspace,
    SampleHalfspace,
    gaussian_halfspace,
    halfspace,
    least_squares,
)
from normgauge.optim.baselines import GaussNewtonStep, NormalizedSGD, damped_gauss_newton
from normgauge.optim.projected import ProjectedAdam, ProjectedSGD
from normgauge.optim.sphere_adam import GeodesicAdam, SphereAdam
from normgauge.optim.sphere_sgd import GeodesicSGD, SphereSGD, unit_sphere_rate

__all__ = ["SphereSGD", "unit_sphere_rate", "GeodesicSGD", "SphereAdam", "GeodesicAdam", "ProjectedSGD"]
__all__ += ["ProjectedAdam", "NormalizedSGD", "damped_gauss_newton", "GaussNewtonStep", "GDNP", "gdnp"]
__all__ += ["gdnp_network", "least_squares", "halfspace", "gaussian_halfspace", "GaussianHalfspace"]
__all__ += ["SampleHalfspace", "GDNPRun", "GDNPRecord", "GDNPNetworkRun"]
