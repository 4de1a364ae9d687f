"""S1 (Santurkar et al. 2018), the landscape in activation space: Facts C.1-C.2, Theorems 4.1 and 4.2."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normgauge.claims._checks import Check, conclusion, corrected, excess, fact, gap, printed
from normgauge.claims._instances import units
from normgauge.claims._registry import theorem
from normgauge.theory.batchnorm_calculus import gradient_norm_squared, project, pullback_gradient, standardize

CITE = ("santurkar2018",)
ONE_UNIT = "one unit on one batch, biased variance, sigma > 0, eps = 0; g = dL/dz at z = gamma yh + beta"


@theorem(
    "S1-FC.1",
    place="Fact C.1, eq (3)-(6)",
    printed="df/dA_b = (gamma/(m s)) (m g_b - sum g - B_b sum g B), g = df/dC",
    hypotheses=f"{ONE_UNIT}; also exact with eps > 0 if s = sqrt(var + eps) throughout",
    cite=CITE,
)
def _gradient_through(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        for eps in (0.0, 0.1):
            truth = torch.func.grad(unit.normalized_loss)(unit.y, eps)
            yh, s = standardize(unit.y, eps)
            g = torch.func.grad(unit.loss)(unit.gamma * yh + unit.beta)
            formula = pullback_gradient(unit.y, g, unit.gamma, eps)
            size = abs(unit.gamma) / s * g.norm()
            yield printed("gradient against autograd", gap(truth, formula, size))


@theorem(
    "S1-FC.2",
    place="Fact C.2, eq (1), (2), (33)",
    printed="d yh_b/d y_k = (1/s)(I[b=k] - 1/m - yh_b yh_k/m); dz/dy is gamma times it",
    hypotheses=f"{ONE_UNIT}; also exact with eps > 0",
    cite=CITE,
)
def _jacobian(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        for eps in (0.0, 0.1):
            yh, s = standardize(unit.y, eps)
            truth = torch.func.jacrev(lambda y, e=eps: standardize(y, e)[0])(unit.y)
            yield printed("Jacobian of yh against autograd", gap(truth, project(yh) / s, 1 / s))
            scaled = torch.func.jacrev(lambda y, e=eps, u=unit: u.gamma * standardize(y, e)[0] + u.beta)(unit.y)
            yield printed("Jacobian of z", gap(scaled, unit.gamma * project(yh) / s, abs(unit.gamma) / s))


@theorem(
    "S1-T4.1",
    place="Theorem 4.1, eq (9), (17)",
    printed="|grad_y Lhat|^2 <= (gamma^2/s^2) (|g|^2 - <1,g>^2/m - <g,yh>^2/sqrt(m))",
    corrected="|grad_y Lhat|^2 = (gamma^2/s^2) (|g|^2 - <1,g>^2/m - <g,yh>^2/m)",
    hypotheses=ONE_UNIT,
    cite=CITE,
    note="Since |yh| = sqrt(m), eq (8) has <g, yh/|yh|>^2 = <g,yh>^2/m; the printed 1/sqrt(m) makes the right side too "
    "small, even negative. With 1/m the inequality is an equality.",
)
def _lipschitz(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        truth = torch.func.grad(unit.normalized_loss)(unit.y).square().sum()
        g, ratio = unit.g, (unit.gamma / unit.s) ** 2
        size = ratio * g.square().sum()
        inner = (g @ unit.yh) ** 2
        bound = ratio * (g @ g - g.sum() ** 2 / unit.m - inner / unit.m**0.5)
        yield printed("bound with 1/sqrt(m)", excess(truth, bound, size))
        yield corrected("equality with 1/m", gap(truth, gradient_norm_squared(unit.y, g, unit.gamma), size))
        yield conclusion("the gradient shrinks beyond the factor gamma^2/s^2", excess(truth, size))
        yield fact("right side over its first term, as printed (largest in size)", bound / size)
