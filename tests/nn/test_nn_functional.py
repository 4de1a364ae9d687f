"""Closed-form backward maps: against loops, against torch, and against their own derivatives."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from normgauge import errors
from normgauge.nn import functional as F
from reference import functional as loops
from reference.normalizers import channel_blocks, sample_blocks

SHAPES = [(5, 3), (2, 4), (3, 4, 5), (2, 4, 2, 3)]
EPS = [0.0, 1e-5, 0.3]


def drawn(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]


def per_channel(x, seed=9):
    generator = torch.Generator().manual_seed(seed)
    gamma, beta = torch.randn(2, x.shape[1], generator=generator, dtype=torch.float64)
    return gamma, beta


def widened(gamma, x):
    return gamma.view(1, -1, *(1,) * (x.dim() - 2)).expand_as(x)


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_against_loop_and_torch(shape, eps):
    grad, x = drawn(shape)
    gamma, beta = per_channel(x)
    y = F.batch_norm(x, gamma, beta, eps)
    assert torch.allclose(y, torch.batch_norm(x, gamma, beta, None, None, True, 0.1, eps, False))
    dx, dgamma, dbeta = F.batch_norm_backward(grad, x, gamma, eps)
    jacobian = lambda v: loops.standardize_jacobian(v, eps)  # noqa: E731
    assert torch.allclose(dx, loops.backward_by_blocks(grad * widened(gamma, x), x, channel_blocks(x), jacobian))
    check_against_autograd(lambda *a: F.batch_norm(*a, eps), (x, gamma, beta), grad, (dx, dgamma, dbeta))


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("trailing", [1, 2])
def test_layer_norm_against_loop_and_torch(trailing, eps):
    grad, x = drawn((3, 4, 5))
    gamma, beta = drawn(x.shape[-trailing:], seed=4)
    y = F.layer_norm(x, gamma, beta, eps, trailing=trailing)
    assert torch.allclose(y, torch.layer_norm(x, x.shape[-trailing:], gamma, beta, eps))
    dx, dgamma, dbeta = F.layer_norm_backward(grad, x, gamma, eps, trailing=trailing)
    flat, flat_grad = x.flatten(-trailing).flatten(0, -2), (grad * gamma).flatten(-trailing).flatten(0, -2)
    jacobian = lambda v: loops.standardize_jacobian(v, eps)  # noqa: E731
    twin = loops.backward_by_blocks(flat_grad, flat, sample_blocks(flat), jacobian).view_as(x)
    assert torch.allclose(dx, twin)
    check_against_autograd(
        lambda *a: F.layer_norm(*a, eps, trailing=trailing), (x, gamma, beta), grad, (dx, dgamma, dbeta)
    )


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize(("shape", "groups"), [((3, 4), 2), ((2, 6, 3), 3), ((2, 4, 2, 2), 4), ((2, 4, 3), 1)])
def test_group_norm_against_loop_and_torch(shape, groups, eps):
    grad, x = drawn(shape)
    gamma, beta = per_channel(x)
    y = F.group_norm(x, groups, gamma, beta, eps)
    assert torch.allclose(y, torch.nn.functional.group_norm(x, groups, gamma, beta, eps))
    gradients = F.group_norm_backward(grad, x, groups, gamma, eps)
    jacobian = lambda v: loops.standardize_jacobian(v, eps)  # noqa: E731
    twin = loops.backward_by_blocks(grad * widened(gamma, x), x, sample_blocks(x, groups), jacobian)
    assert torch.allclose(gradients[0], twin)
    check_against_autograd(lambda a, b, c: F.group_norm(a, groups, b, c, eps), (x, gamma, beta), grad, gradients)


@pytest.mark.parametrize("eps", EPS)
def test_rms_norm_against_loop_and_torch(eps):
    grad, x = drawn((4, 6))
    gamma, _ = drawn((6,), seed=4)
    assert torch.allclose(F.rms_norm(x, gamma, eps), torch.nn.functional.rms_norm(x, (6,), gamma, eps))
    gradients = F.rms_norm_backward(grad, x, gamma, eps)
    twin = loops.backward_by_blocks(grad * gamma, x, sample_blocks(x), lambda v: loops.rms_jacobian(v, eps))
    assert torch.allclose(gradients[0], twin)
    check_against_autograd(lambda a, b: F.rms_norm(a, b, eps), (x, gamma), grad, gradients)


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 2, 3)])
def test_lp_norm_against_loop_and_autograd(shape, p, eps):
    grad, x = drawn(shape)
    gamma, beta = per_channel(x)
    gradients = F.lp_norm_backward(grad, x, p, gamma, eps)
    jacobian = lambda v: loops.lp_jacobian(v, p, eps)  # noqa: E731
    twin = loops.backward_by_blocks(grad * widened(gamma, x), x, channel_blocks(x), jacobian)
    assert torch.allclose(gradients[0], twin)
    check_against_autograd(lambda a, b, c: F.lp_norm(a, p, b, c, eps), (x, gamma, beta), grad, gradients)


def check_against_autograd(function, inputs, grad, gradients):
    inputs = [value.clone().requires_grad_() for value in inputs]
    wanted = torch.autograd.grad(function(*inputs), inputs, grad)
    for got, right in zip(gradients, wanted, strict=True):
        assert got.shape == right.shape
        assert torch.allclose(got, right)


FORMS = {
    "batch": (F.batch_norm, F.batch_norm_backward),
    "layer": (F.layer_norm, F.layer_norm_backward),
    "group": (lambda x, *a: F.group_norm(x, 2, *a), lambda g, x, *a: F.group_norm_backward(g, x, 2, *a)),
    "l1": (lambda x, *a: F.lp_norm(x, 1.0, *a), lambda g, x, *a: F.lp_norm_backward(g, x, 1.0, *a)),
    "l2": (lambda x, *a: F.lp_norm(x, 2.0, *a), lambda g, x, *a: F.lp_norm_backward(g, x, 2.0, *a)),
    "linf": (lambda x, *a: F.lp_norm(x, math.inf, *a), lambda g, x, *a: F.lp_norm_backward(g, x, math.inf, *a)),
}


@pytest.mark.parametrize("name", FORMS)
def test_first_and_second_derivatives(name):
    forward, backward = FORMS[name]
    grad, x = (value.requires_grad_() for value in drawn((4, 4)))
    gamma, beta = (value.clone().requires_grad_() for value in per_channel(x))
    assert gradcheck(forward, (x, gamma, beta))
    assert gradgradcheck(forward, (x, gamma, beta))
    # The backward map is itself a differentiable function of grad, x and gamma.
    assert gradcheck(lambda g, x, gamma: backward(g, x, gamma)[0], (grad, x, gamma))


def test_rms_derivatives():
    grad, x = (value.requires_grad_() for value in drawn((3, 4)))
    gamma = drawn((4,))[0].requires_grad_()
    assert gradcheck(F.rms_norm, (x, gamma))
    assert gradgradcheck(F.rms_norm, (x, gamma))
    assert gradcheck(lambda g, x, gamma: F.rms_norm_backward(g, x, gamma)[0], (grad, x, gamma))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.floats(0.1, 10.0), st.floats(-5.0, 5.0))
def test_decomposition_is_orthogonal_and_its_direction_on_the_sphere(seed, size, factor, shift):
    v = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gamma, direction, beta = F.decompose(v)
    assert torch.allclose(gamma * direction + beta, v)
    assert torch.allclose(direction.sum(), torch.zeros((), dtype=v.dtype), atol=1e-9)
    assert torch.allclose(direction.norm(), torch.tensor(math.sqrt(size), dtype=v.dtype))
    assert torch.allclose(v.square().sum(), size * (gamma**2 + beta**2).squeeze())
    assert torch.allclose(F.decompose(factor * v + shift).direction, direction, atol=1e-7)
    assert torch.allclose(F.decompose(-factor * v + shift).direction, -direction, atol=1e-7)


def test_decomposition_of_a_constant_has_no_direction_and_a_finite_gradient():
    v = torch.full((4,), 3.0, requires_grad=True)
    gamma, direction, beta = F.decompose(v)
    assert (gamma.item(), beta.item()) == (0.0, 3.0)
    assert not direction.any()
    (gradient,) = torch.autograd.grad(gamma.sum() + direction.sum(), v)
    assert gradient.isfinite().all()


def test_decompose_along_any_axis_and_refuses_emptiness():
    v = torch.randn(3, 5, 2)
    parts = F.decompose(v, dim=1)
    assert torch.allclose(parts.gamma * parts.direction + parts.beta, v)
    assert gradcheck(lambda v: tuple(F.decompose(v)), (torch.randn(4, requires_grad=True),))
    with pytest.raises(errors.InputError, match="at least one entry"):
        F.decompose(torch.zeros(0))


def test_printed_formulas_are_off_by_what_the_deviations_say():
    grad, x = drawn((8, 1), seed=1)
    gamma = torch.full((1,), 2.0)
    right = F.batch_norm_backward(grad, x, gamma, 0.0)[0]
    without_gamma = F.batch_norm_backward(grad, x, None, 0.0)[0]
    assert torch.allclose((without_gamma - right).norm() / right.norm(), torch.tensor(0.5))
    v = x[:, 0]
    true, printed = loops.standardize_jacobian(v, 0.0), loops.printed_jacobian(v, 0.0)
    last = torch.outer(v - v.mean(), v - v.mean()) / (8 * v.var(correction=0) ** 1.5)
    assert torch.allclose((printed - true).norm() / last.norm(), torch.tensor(7.0))
    grad, x = drawn((1, 6), seed=2)
    layer = F.layer_norm_backward(grad, x, None, 0.0)[0]
    wrong = loops.printed_layer_backward(grad, x, 0.0)
    # The printed gradient has a part along the constant vector, to which the layer is invariant.
    assert layer.sum().abs() < 1e-12
    assert (wrong - layer).norm() / layer.norm() > 0.1


def test_wrong_arguments_are_refused():
    x = torch.randn(2, 3)
    with pytest.raises(errors.InputError, match="p is at least 1"):
        F.lp_norm(x, 0.5)
    with pytest.raises(errors.InputError, match="groups divides"):
        F.group_norm(x, 2)
    with pytest.raises(errors.InputError, match="trailing"):
        F.layer_norm(x, trailing=3)
