"""Geometry of a normalized layer: effective weights, ellipsoid, kernel, weight norm, a batch of two."""

import math

import pytest
import torch

import normgauge as ng
from normgauge import errors
from normgauge.nn import layer_geometry


def drawn(rows=4, width=6, batch=20):
    weight, x = torch.randn(rows, width), torch.randn(batch, width) @ torch.randn(width, width) + 1.5
    return weight, x, torch.randn(rows), torch.randn(rows)


@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_effective_weights_reproduce_batch_norm(eps):
    weight, x, gamma, beta = drawn()
    reading = layer_geometry(weight, x, gamma, beta, eps)
    y = torch.batch_norm(x @ weight.T, gamma, beta, None, None, True, 0.1, eps, False)
    assert torch.allclose(x @ reading.effective_weights.T + reading.effective_bias, y)
    assert torch.allclose(reading.radius, (y - beta).norm(dim=0))


def test_effective_weights_lie_on_the_ellipsoid():
    weight, x, gamma, beta = drawn()
    reading = layer_geometry(weight, x, gamma, beta, eps=0.0)
    on = (reading.effective_weights @ reading.covariance * reading.effective_weights).sum(1) / gamma.square()
    assert torch.allclose(on, torch.ones(4))
    assert torch.allclose(reading.on_ellipsoid, torch.ones(4))
    assert torch.allclose(reading.radius, gamma.abs() * math.sqrt(20))
    eigenvalues = torch.linalg.eigvalsh(torch.cov(x.T, correction=0))
    assert torch.allclose(reading.semi_axes, eigenvalues.rsqrt())
    assert list(reading.semi_axes) == sorted(reading.semi_axes, reverse=True)


def test_eps_pulls_the_weights_inside():
    weight, x, gamma, beta = drawn()
    variance = (x @ weight.T).var(0, correction=0)
    assert torch.allclose(layer_geometry(weight, x, gamma, beta, 0.5).on_ellipsoid, variance / (variance + 0.5))


@pytest.mark.parametrize(("batch", "width"), [(10, 20), (30, 20), (2, 5), (21, 20), (20, 20)])
def test_rank_is_one_less_than_the_batch(batch, width):
    x = torch.randn(batch, width) + 3
    reading = layer_geometry(torch.randn(3, width), x)
    assert reading.rank == min(width, batch - 1)
    assert reading.kernel_dimension == width - reading.rank
    assert torch.allclose(
        (x - x.mean(0)) @ reading.kernel_basis, torch.zeros(batch, reading.kernel_dimension), atol=1e-9
    )


def test_a_row_in_the_kernel_collapses_to_beta_and_a_random_row_does_not():
    x = torch.randn(4, 30)
    first = layer_geometry(torch.randn(200, 30), x)
    inside = layer_geometry(first.kernel_basis.T[:2], x, beta=torch.tensor([1.0, 2.0]), eps=0.0)
    assert torch.allclose(inside.kernel_share, torch.ones(2))
    assert not inside.on_ellipsoid.any()
    assert not inside.radius.any()
    assert abs(first.kernel_share.mean() - 27 / 30) < 0.02  # most of a random row is unseen ...
    assert (first.on_ellipsoid > 0.9).all()  # ... and yet its output is normalized from the rest


def test_effective_weights_are_unbounded_along_the_kernel():
    x = torch.randn(4, 30)
    row = torch.randn(1, 30)
    unseen = layer_geometry(row, x).kernel_basis[:, :1].T
    norms = [float(layer_geometry(row + t * unseen, x, eps=0.0).effective_weights.norm()) for t in (0.0, 1e3, 1e6)]
    assert norms[2] > 100 * norms[1] > 1000 * norms[0]


def test_white_inputs_make_batch_norm_weight_norm():
    x = torch.linalg.qr(torch.randn(50, 5) - 0.0).Q
    x = torch.linalg.qr(x - x.mean(0)).Q * math.sqrt(50)
    weight, gamma = torch.randn(3, 5), torch.randn(3)
    reading = layer_geometry(weight, x + 2.0, gamma, eps=0.0)
    assert reading.whiteness < 1e-9
    assert reading.weight_norm_error < 1e-9
    assert torch.allclose(reading.effective_weights, gamma[:, None] * weight / weight.norm(dim=1, keepdim=True))
    skewed = layer_geometry(weight, (x + 2.0) * torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0]), gamma, eps=0.0)
    assert skewed.weight_norm_error > 0.05


def test_a_batch_of_two_knows_only_signs_and_has_no_gradient():
    weight, x = torch.randn(3, 4), torch.randn(2, 4)
    reading = layer_geometry(weight, x, eps=0.0)
    assert reading.two_valued
    assert not (reading.gradient_share > 1e-7).any()
    w = weight.clone().requires_grad_()
    y = torch.batch_norm(x @ w.T, None, None, None, None, True, 0.1, 0.0, False)
    assert torch.allclose(y.abs(), torch.ones(2, 3))
    (gradient,) = torch.autograd.grad((y * torch.randn(2, 3)).sum(), w)
    assert gradient.abs().max() < 1e-8
    assert "batch of two" in str(reading)


def test_gradient_share_is_that_of_the_jacobian():
    weight, x, _, _ = drawn(batch=7)
    outputs = x @ weight.T
    for eps in (0.0, 0.7):
        reading = layer_geometry(weight, x, eps=eps)
        for row in range(4):
            bn = lambda v: ng.nn.functional.batch_norm(v[:, None], eps=eps)[:, 0]  # noqa: B023, E731
            jacobian = torch.autograd.functional.jacobian(bn, outputs[:, row])
            scale = (outputs[:, row].var(correction=0) + eps).sqrt()
            assert torch.allclose(reading.gradient_share[row], jacobian.norm() * scale / math.sqrt(7))


def test_layer_norm_is_row_centring():
    weight, x, _, _ = drawn()
    reading = layer_geometry(weight, x)
    left = torch.nn.functional.layer_norm(x @ weight.T, (4,))
    right = torch.nn.functional.rms_norm(x @ reading.centred_weights.T, (4,), eps=1e-5)
    assert torch.allclose(left, right)


def test_reading_prints_frames_and_draws():
    reading = layer_geometry(*drawn())
    text = str(reading)
    assert "rank 6" in text and text.splitlines()[-1].startswith("kind exact")
    assert len(reading.frame()) == 4
    assert reading.chart().to_dict()["layer"]


def test_wrong_arguments_are_refused():
    weight, x, _, _ = drawn()
    with pytest.raises(errors.InputError, match=r"inputs are \(B, n\)"):
        layer_geometry(weight, x[:, :3])
    with pytest.raises(errors.DataError, match="at least two samples"):
        layer_geometry(weight, x[:1])
    with pytest.raises(errors.InputError, match="gamma has one number per row"):
        layer_geometry(weight, x, torch.ones(3))
    with pytest.raises(errors.NonFiniteError, match="finite"):
        layer_geometry(weight * math.nan, x)
