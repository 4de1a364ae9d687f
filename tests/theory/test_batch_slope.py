"""BatchNorm as a map of the whole batch: its bracket against dense Jacobians and pairs of batches."""

import pytest
import torch
from torch.nn import functional as F

from normgauge.theory.batchnorm_calculus import batch_slope


@pytest.mark.parametrize("samples", [2, 3, 16])
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_the_lower_end_is_the_norm_of_the_dense_jacobian(samples, scale):
    torch.manual_seed(samples)
    x, gamma, eps = scale * torch.randn(samples, 3), torch.tensor([1.0, -2.0, 0.5]), 1e-3
    dense = torch.autograd.functional.jacobian(lambda v: F.batch_norm(v, None, None, gamma, None, True, eps=eps), x)
    lower, upper = batch_slope(x, gamma, eps)
    assert float(lower) == pytest.approx(float(torch.linalg.matrix_norm(dense.reshape(x.numel(), -1), 2)))
    assert float(upper) == pytest.approx(float(lower)) or (samples == 2 and upper > lower)


def test_the_upper_end_holds_on_the_ball():
    torch.manual_seed(0)
    x, radius, eps = torch.randn(8, 2), 1.0, 1e-2

    def norm(v):
        return F.batch_norm(v, None, None, None, None, True, eps=eps)

    lower, upper = batch_slope(x, 1.0, eps, radius)
    worst = 0.0
    for _ in range(2000):
        a, b = (d * radius * float(torch.rand(())) / d.norm() for d in (torch.randn(8, 2), torch.randn(8, 2)))
        b = a + 1e-3 * b if torch.rand(()) < 0.5 else b
        worst = max(worst, float((norm(x + a) - norm(x + b)).norm() / (a - b).norm()))
    assert worst <= float(upper) and float(lower) <= float(upper) <= eps**-0.5
    assert float(batch_slope(x, 1.0, eps, 1e9)[1]) == pytest.approx(eps**-0.5)
