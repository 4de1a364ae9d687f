"""The random instances that judges draw: units, layers, networks, Gaussian losses, and their exact derivatives."""

from normgauge.papers.instances.derivatives import Loss, curvature, gradient, hessian, jacobian
from normgauge.papers.instances.draws import Unit, normal, sign, uniform, units, wavy

__all__ = ["Loss", "Unit", "curvature", "gradient", "hessian", "jacobian", "normal", "sign", "uniform", "units", "wavy"]
