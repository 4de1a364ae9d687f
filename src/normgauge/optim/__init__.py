"""Optimizers that know the geometry: spheres, projections, normalized parametrization; plain `nn.Parameter`s."""

from normgauge.optim._gdnp import GDNPNetworkRun as GDNPNetworkRun
from normgauge.optim._gdnp import GDNPRecord as GDNPRecord
from normgauge.optim._gdnp import GDNPRun as GDNPRun
from normgauge.optim._gdnp import gdnp as gdnp
from normgauge.optim._gdnp import gdnp_network as gdnp_network
from normgauge.optim._gdnp_optimizer import GDNP as GDNP
from normgauge.optim._gdnp_problems import GaussianHalfspace as GaussianHalfspace
from normgauge.optim._gdnp_problems import SampleHalfspace as SampleHalfspace
from normgauge.optim._gdnp_problems import gaussian_halfspace as gaussian_halfspace
from normgauge.optim._gdnp_problems import halfspace as halfspace
from normgauge.optim._gdnp_problems import least_squares as least_squares
from normgauge.optim.baselines import GaussNewtonStep as GaussNewtonStep
from normgauge.optim.baselines import NormalizedSGD as NormalizedSGD
from normgauge.optim.baselines import damped_gauss_newton as damped_gauss_newton
from normgauge.optim.projected import ProjectedAdam as ProjectedAdam
from normgauge.optim.projected import ProjectedSGD as ProjectedSGD
from normgauge.optim.sphere_adam import GeodesicAdam as GeodesicAdam
from normgauge.optim.sphere_adam import SphereAdam as SphereAdam
from normgauge.optim.sphere_sgd import GeodesicSGD as GeodesicSGD
from normgauge.optim.sphere_sgd import SphereSGD as SphereSGD
from normgauge.optim.sphere_sgd import unit_sphere_rate as unit_sphere_rate

__all__ = [
    "SphereSGD",
    "unit_sphere_rate",
    "GeodesicSGD",
    "SphereAdam",
    "GeodesicAdam",
    "ProjectedSGD",
    "ProjectedAdam",
    "NormalizedSGD",
    "damped_gauss_newton",
    "GaussNewtonStep",
    "GDNP",
    "gdnp",
    "gdnp_network",
    "least_squares",
    "halfspace",
    "gaussian_halfspace",
    "GaussianHalfspace",
    "SampleHalfspace",
    "GDNPRun",
    "GDNPRecord",
    "GDNPNetworkRun",
]
