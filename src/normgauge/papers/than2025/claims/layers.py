"""S2 (Than 2025), Lipschitz constants of the normalization layers: section 3, Lemmas 1-3 and 23."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, excess, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import jacobian, normal, uniform
from normgauge.theory.batchnorm_calculus import project, standardize
from normgauge.theory.lipschitz_norms import (
    batch_norm_constant,
    group_norm_slope,
    layer_norm_constant,
    layer_norm_jacobian,
    layer_norm_slope,
)


@theorem("S2-L1")
def _batch_norm(generator: torch.Generator) -> Iterator[Check]:
    for n in (1, 2, 5, 30):
        for eps in (1e-5, 0.5):
            variances, means = (10.0 ** uniform(generator, -1, 1) * normal(generator, n)).square(), normal(generator, n)
            J = jacobian(_batch_norm_in_evaluation, normal(generator, n), means, variances, eps)
            truth = torch.linalg.matrix_norm(J, 2)
            told = (variances + eps).rsqrt().norm()
            yield printed("the Euclidean norm of 1/sigma", gap(truth, told))
            yield corrected("its largest entry", gap(truth, batch_norm_constant(variances, eps)))
            yield conclusion("bounded by |1/sigma|", excess(truth, told))
            wider = torch.linalg.matrix_norm(jacobian(_batch_norm_in_evaluation, means, means, 4 * variances, eps), 2)
            yield conclusion("smaller for larger variances", excess(wider, truth))


@theorem("S2-L1b")
def _coupling(generator: torch.Generator) -> Iterator[Check]:
    for m in (2, 3, 16):
        for eps in (0.0, 0.1):
            y = normal(generator, m)
            yh, s = standardize(y, eps)
            J = jacobian(lambda y, eps: standardize(y, eps)[0], y, eps)
            yield printed("its entries: (I - 1/m - yh yh^T/m)/s", gap(J, project(yh) / s, 1 / s))
            if m > 2 or eps > 0:
                between = (J - torch.diag(J.diag())).abs().max()
                yield printed("entries between examples are not 0", broken(between > 1e-6 * J.abs().max()))
            rows = normal(generator, m, 3)
            couples = jacobian(lambda rows: functional.layer_norm(rows, (3,), eps=0.1), rows)
            for b in range(m):
                couples[b, :, b] = 0
            yield printed("LN: entries between examples are 0", gap(couples, 0.0, 1.0))


@theorem("S2-L23")
def _layer_norm_jacobian(generator: torch.Generator) -> Iterator[Check]:
    for x, eps in _inputs(generator):
        J = jacobian(_normalize_layer, x, eps)
        yield printed("against torch's layer", gap(J, layer_norm_jacobian(x, eps), eps**-0.5))


@theorem("S2-L2a")
def _layer_norm_pointwise(generator: torch.Generator) -> Iterator[Check]:
    for x, eps in _inputs(generator):
        truth = torch.linalg.matrix_norm(jacobian(_normalize_layer, x, eps), 2)
        bound = 1 / standardize(x, eps)[1]
        yield printed("bound", excess(truth, bound))
        yield corrected("its value", gap(truth, layer_norm_slope(x, eps), bound))


@theorem("S2-L2b")
def _layer_norm_global(generator: torch.Generator) -> Iterator[Check]:
    for n in (2, 3, 8):
        eps = 10.0 ** uniform(generator, -6, 0)
        constant = torch.full((n,), uniform(generator, -3, 3))
        sigma = standardize(constant, eps)[1]
        yield corrected("sigma = sqrt(eps)", gap(sigma, eps**0.5))
        attained = torch.linalg.matrix_norm(jacobian(_normalize_layer, constant, eps), 2)
        yield corrected("attained at constant inputs", gap(attained, layer_norm_constant(eps)))
        for size in (1e-3, 1.0, 1e3):
            x, z = constant + size * normal(generator, n), constant + size * normal(generator, n)
            stretch = (_normalize_layer(x, eps) - _normalize_layer(z, eps)).norm() / (x - z).norm()
            yield printed("finite differences", excess(stretch, 1 / sigma))
            slope = torch.linalg.matrix_norm(jacobian(_normalize_layer, x, eps), 2)
            yield printed("Jacobians", excess(slope, 1 / sigma))


@theorem("S2-L3")
def _group_norm(generator: torch.Generator) -> Iterator[Check]:
    for n, count in ((4, 2), (6, 2), (9, 3), (12, 4)):
        eps = 10.0 ** uniform(generator, -4, 0)
        size = n // count
        groups = [list(range(k * size, (k + 1) * size)) for k in range(count)]
        spread = torch.linspace(0.1, 5, count).repeat_interleave(size)
        for x in (spread * normal(generator, n), torch.zeros(n), torch.ones(n)):
            truth = torch.linalg.matrix_norm(jacobian(_normalize_groups, x, count, eps), 2)
            yield printed("bound", excess(truth, count * eps**-0.5))
            yield printed("bound at x", excess(truth, sum(1 / standardize(x[g], eps)[1] for g in groups)))
            yield corrected("the largest over the groups", gap(truth, group_norm_slope(x, groups, eps), eps**-0.5))
        still = torch.linalg.matrix_norm(jacobian(_normalize_groups, torch.zeros(n), count, eps), 2)
        yield corrected("1/sqrt(eps) is attained", gap(still, layer_norm_constant(eps)))


def _inputs(generator: torch.Generator) -> Iterator[tuple[Tensor, float]]:
    """Draw inputs of LN: two features and more, spreads over decades, constant ones."""
    for n in (2, 3, 4, 20):
        for eps in (1e-5, 0.1, 3.0):
            yield 10.0 ** uniform(generator, -2, 2) * normal(generator, n) + normal(generator, 1), eps
            yield torch.full((n,), uniform(generator, -2, 2)), eps


def _batch_norm_in_evaluation(x: Tensor, means: Tensor, variances: Tensor, eps: float) -> Tensor:
    return functional.batch_norm(x[None], means, variances, training=False, eps=eps)[0]


def _normalize_layer(x: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape, eps=eps)


def _normalize_groups(x: Tensor, count: int, eps: float) -> Tensor:
    return functional.group_norm(x[None], count, eps=eps)[0]
