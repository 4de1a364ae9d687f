"""Laws of the manifolds: tangency, isometry, order of the retraction, and the geodesic against its equation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normgauge import manifolds
from normgauge.errors import InputError
from normgauge.manifolds import sphere

cases = st.tuples(st.integers(1, 4), st.integers(2, 7), st.floats(0.1, 10), st.floats(0.01, 4), st.integers(0, 10**6))


def draw(case):
    rows, n, radius, size, seed = case
    maker = torch.Generator().manual_seed(seed)
    x, v, z = (torch.randn(rows, n, generator=maker, dtype=torch.float64) for _ in range(3))
    x = sphere.project(x, radius)
    return x, sphere.project(sphere.tangent(x, v), size * radius), sphere.tangent(x, z), radius


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases)
def test_geodesics_stay_on_the_sphere_and_transport_is_an_isometry(case):
    x, v, z, radius = draw(case)
    y = sphere.exp(x, v)
    torch.testing.assert_close(sphere.norm(y), torch.full_like(sphere.norm(y), radius))
    for carried, before in ((sphere.transport(x, v, z), z), (sphere.transport(x, v, v), v)):
        assert sphere.inner(carried, y).abs().max() <= 1e-12 * radius * (1 + sphere.norm(before).max())
        torch.testing.assert_close(sphere.norm(carried), sphere.norm(before), atol=1e-12, rtol=1e-11)
    both = sphere.inner(sphere.transport(x, v, z), sphere.transport(x, v, v))
    torch.testing.assert_close(both, sphere.inner(z, v), atol=1e-11 * radius**2, rtol=1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases)
def test_projection_and_tangent_part_are_projections(case):
    x, v, z, radius = draw(case)
    assert sphere.inner(x, sphere.tangent(x, v + 3 * x)).abs().max() <= 1e-12 * radius**2 * (1 + sphere.norm(v).max())
    torch.testing.assert_close(sphere.tangent(x, sphere.tangent(x, z)), sphere.tangent(x, z), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(sphere.project(x, radius), x)


def test_the_retraction_agrees_to_third_order():
    x, v, _, _ = draw((1, 5, 1.0, 1.0, 0))
    gaps = [float(sphere.norm(sphere.retract(x, t * v) - sphere.exp(x, t * v))) for t in (0.1, 0.01)]
    assert gaps[1] == pytest.approx(0.01**3 / 3, rel=1e-2)
    assert gaps[0] / gaps[1] == pytest.approx(1000, rel=0.05)


def test_transport_solves_the_differential_equation():
    x0, v0, z0, radius = draw((1, 4, 2.0, 1.3, 1))

    def slope(state):
        x, v, z = state
        return torch.stack([v, -x * (v * v).sum() / radius**2, -x * (v * z).sum() / radius**2])

    state, steps = torch.stack([x0[0], v0[0], z0[0]]), 400
    h = 1 / steps
    for _ in range(steps):
        k1 = slope(state)
        k2 = slope(state + h / 2 * k1)
        k3 = slope(state + h / 2 * k2)
        k4 = slope(state + h * k3)
        state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    torch.testing.assert_close(state[0], sphere.exp(x0, v0)[0], atol=1e-8, rtol=0)
    torch.testing.assert_close(state[2], sphere.transport(x0, v0, z0)[0], atol=1e-8, rtol=0)


def test_a_zero_step_changes_nothing():
    x, _, z, _ = draw((2, 3, 1.0, 1.0, 2))
    zero = torch.zeros_like(x)
    assert torch.equal(sphere.exp(x, zero), x)
    assert torch.equal(sphere.transport(x, zero, z), z)


@pytest.mark.parametrize("manifold", [manifolds.Sphere(2.0), manifolds.Oblique(2.0), manifolds.Oblique(2.0, count=2)])
def test_manifolds_keep_the_shape_and_the_norms(manifold):
    x, v = manifold.project(torch.randn(4, 3, 2, 2)), torch.randn(4, 3, 2, 2)
    v = manifold.tangent(x, v)
    for y in (manifold.retract(x, v), manifold.exp(x, v)):
        assert y.shape == x.shape
        torch.testing.assert_close(manifold.project(y), y)
    torch.testing.assert_close(manifold.inner(x, v, v), manifold.inner(x, *[manifold.transport(x, v, v)] * 2))
    assert isinstance(manifold, manifolds.Manifold)


def test_products_act_part_by_part():
    both = manifolds.Product({"a": manifolds.Oblique(), "b": manifolds.Euclidean()})
    x = both.project({"a": torch.randn(3, 4), "b": torch.randn(2)})
    v = both.tangent(x, {"a": torch.randn(3, 4), "b": torch.randn(2)})
    y = both.exp(x, v)
    torch.testing.assert_close(y["b"], x["b"] + v["b"])
    torch.testing.assert_close(y["a"], manifolds.Oblique().exp(x["a"], v["a"]))
    assert torch.equal(both.retract(x, v)["b"], y["b"])
    carried = both.transport(x, v, v)
    torch.testing.assert_close(both.inner(y, carried, carried), both.inner(x, v, v))


def test_bad_spheres_are_refused():
    with pytest.raises(InputError, match="a radius is positive"):
        manifolds.Oblique(0.0)
    with pytest.raises(InputError, match="divides into 3 blocks"):
        manifolds.Oblique(count=3).project(torch.ones(4, 2))
