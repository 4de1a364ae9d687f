"""GDNP: its bounds on every iteration, its solutions, its competitors, and where the printed formulas fail."""

import itertools
import math

import pytest
import scipy.integrate
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normgauge import optim
from normgauge.errors import DataError, InputError, UnknownNameError
from normgauge.optim._gdnp_problems import LOSSES
from normgauge.theory.gdnp import largest_coefficient


def regression(seed, d=5, decades=1.0, noise=0.1):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(60, d, generator=source, dtype=torch.float64) * torch.logspace(
        0, decades / 2, d, dtype=torch.float64
    )
    y = x @ torch.randn(d, generator=source, dtype=torch.float64)
    return x, y + noise * torch.randn(60, generator=source, dtype=torch.float64)


def gaussian(seed, d=4, size=0.4):
    source = torch.Generator().manual_seed(seed)
    root = torch.randn(d, d, generator=source, dtype=torch.float64)
    u = size * torch.randn(d, generator=source, dtype=torch.float64)
    S = root @ root.T / d + 0.2 * torch.eye(d, dtype=torch.float64) + torch.outer(u, u)
    return u, S


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(0, 2))
def test_least_squares_keeps_its_rate_at_every_iteration_and_solves(seed, decades):
    x, y = regression(seed, decades=decades)
    run = optim.gdnp(optim.least_squares(x, y), iterations=40, seed=seed)
    for record in run.records:
        assert record.rho_gap <= record.rho_bound * (1 + 1e-9) + 1e-12 * abs(record.rho)
        assert record.gradient_norm <= record.gradient_bound * (1 + 1e-6) + 1e-6 * abs(record.rho)
        assert abs(record.length_slope) <= 1e-9 * (1 + abs(record.rho))
    exact = torch.linalg.lstsq(x, y).solution
    direct = float((y - x @ run.weights).square().mean())
    assert run.loss == pytest.approx(direct, rel=1e-9, abs=1e-12)
    floor = float((y - x @ exact).square().mean())
    assert run.loss - floor == pytest.approx(run.records[-1].rho_gap, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_gaussian_halfspaces_keep_the_bounds(seed):
    u, S = gaussian(seed)
    problem = optim.gaussian_halfspace(u, S)
    zeta = 0.25 * float(torch.linalg.eigvalsh(S)[-1])  # the Hessian E[phi'' z z^T] with 0 <= phi'' <= 1/4
    run = optim.gdnp(problem, iterations=30, bisections=30, smoothness=zeta)
    assert run.status == "ok" and run.halvings == 0 and run.bounds_apply
    for record in run.records:
        assert record.rho_gap <= record.rho_bound * (1 + 1e-9) + 1e-12
        assert abs(record.length_slope) <= record.length_bound + 1e-12
        assert record.gradient_norm <= record.gradient_bound * (1 + 1e-6) + 1e-8
    line = torch.linalg.solve(S, u)  # critical points are multiples of S^-1 u
    cosine = float(run.weights @ S @ line) / math.sqrt(float(run.weights @ S @ run.weights) * float(line @ S @ line))
    gap = run.records[-1].rho_gap / float(u @ line)  # the squared sine of the angle that is left
    assert cosine**2 == pytest.approx(1 - gap, abs=1e-10) and gap < 1e-3


def test_the_gaussian_gradient_is_the_derivative_of_the_loss():
    u, S = gaussian(1)
    problem, w, h = optim.gaussian_halfspace(u, S), torch.randn(4, dtype=torch.float64), 1e-5
    for i in range(4):
        e = torch.zeros(4, dtype=torch.float64)
        e[i] = h
        numeric = (problem.means(w + e).loss - problem.means(w - e).loss) / (2 * h)
        assert float(problem.means(w).gradient[i]) == pytest.approx(numeric, abs=1e-8)


def test_the_corrected_stopping_function_makes_the_step_that_of_the_rayleigh_quotient():
    """With the printed `u^T w` in the second term the step has another length, so another iterate."""
    u, S = gaussian(2)
    run = optim.gdnp(optim.gaussian_halfspace(u, S), iterations=1, seed=3)
    w = torch.randn(4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    L = float(torch.linalg.eigvalsh(S)[-1])
    rayleigh = w - (S @ w - u * float(w @ S @ w) / float(u @ w)) / L
    torch.testing.assert_close(run.direction, rayleigh / rayleigh.norm(), atol=1e-9, rtol=1e-9)
    first = run.records[0]
    norm = math.sqrt(float(w @ S @ w))
    at = first.length / norm * w
    means = optim.gaussian_halfspace(u, S).means(at)
    printed = means.first * float(u @ w) - means.second * float(u @ w) ** 2
    assert abs(printed / first.stopping - 1) > 1e-3


def test_the_slope_and_not_its_square_halves_with_each_bisection():
    u, S = gaussian(0)
    run = optim.gdnp(optim.gaussian_halfspace(u, S), iterations=3, bisections=12, smoothness=1.0)
    halved = optim.gdnp(optim.gaussian_halfspace(u, S), iterations=3, bisections=24, smoothness=1.0)
    ratio = run.records[0].length_bound / halved.records[0].length_bound
    assert ratio == pytest.approx(2**12)  # the slope, not its square, falls as 2^-T


def descend(x, y, steps, *, accelerated=False):
    """Gradient descent with step 1 / L on the same least squares, or Nesterov's method; the excess losses."""
    S, u = x.T @ x / len(x), -(y @ x) / len(x)
    L = 2 * float(torch.linalg.eigvalsh(S)[-1])
    mu = 2 * float(torch.linalg.eigvalsh(S)[0])
    best = torch.linalg.solve(S, -u)
    w = v = torch.zeros_like(u)
    beta = (math.sqrt(L) - math.sqrt(mu)) / (math.sqrt(L) + math.sqrt(mu)) if accelerated else 0.0
    gaps = []
    for _ in range(steps):
        new = v - (2 * u + 2 * S @ v) / L
        v, w = new + beta * (new - w), new
        gaps.append(float((w - best) @ S @ (w - best)))
    return gaps


@pytest.mark.parametrize("decades", [0.5, 1.5, 2.5])
def test_on_least_squares_gdnp_brings_no_better_rate_than_gradient_descent(decades):
    """Both contract by (1 - mu / L)^2; accelerated descent and L-BFGS beat both once the condition number is large."""
    x, y = regression(0, d=5, decades=decades, noise=0.0)
    run = optim.gdnp(optim.least_squares(x, y), iterations=200)
    ours = run.records[-1].rho_gap
    plain, fast = descend(x, y, 200)[-1], descend(x, y, 200, accelerated=True)[-1]
    rate = (1 - 1 / run.condition) ** 2
    assert ours <= rate**200 * run.records[0].rho_gap * (1 + 1e-6) + 1e-12
    assert plain <= rate**200 * float((y**2).mean()) * 1.01 + 1e-12
    if run.condition > 100:
        assert fast < 0.1 * min(ours, plain)

    def value(w):
        residual = torch.as_tensor(w) @ x.T - y
        return float(residual.square().mean()), (2 * (residual @ x) / len(x)).numpy()

    solved = scipy.optimize.minimize(value, torch.zeros(5).numpy(), jac=True, method="L-BFGS-B")
    assert solved.fun < ours + 1e-6


def test_logistic_samples_that_are_not_gaussian_end_where_lbfgs_ends():
    source = torch.Generator().manual_seed(0)
    x = torch.rand(200, 3, generator=source, dtype=torch.float64) * 2 - 1
    y = torch.sign(x[:, 0] + 0.5 * x[:, 1] + 0.7 * torch.randn(200, generator=source, dtype=torch.float64))
    run = optim.gdnp(optim.halfspace(x, y), iterations=60)
    assert not run.bounds_apply and "bounds do not apply" in str(run)

    def value(w):
        t = -y * (x @ torch.as_tensor(w))
        return float(torch.nn.functional.softplus(t).mean()), ((-y * torch.sigmoid(t)) @ x / 200).numpy()

    solved = scipy.optimize.minimize(value, torch.zeros(3).numpy(), jac=True, method="L-BFGS-B", tol=1e-12)
    assert run.loss == pytest.approx(solved.fun, abs=1e-5)
    losses = [record.loss for record in run.records]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(losses))


def batchnorm_descent(x, y, rate, steps):
    """Ordinary BN + gradient descent on w and gamma for logistic loss."""
    w, gamma = torch.ones(x.shape[1], dtype=torch.float64, requires_grad=True), torch.ones((), requires_grad=True)
    for _ in range(steps):
        t = x @ w
        loss = torch.nn.functional.softplus(-y * gamma * t / t.square().mean().sqrt()).mean()
        a, b = torch.autograd.grad(loss, (w, gamma))
        w, gamma = (w - rate * a).detach().requires_grad_(), (gamma - rate * b).detach().requires_grad_()
    return float(loss.detach())


def test_gdnp_needs_no_rate_where_batchnorm_and_descent_do():
    source = torch.Generator().manual_seed(1)
    x = torch.randn(150, 4, generator=source, dtype=torch.float64) * torch.logspace(0, 1, 4, dtype=torch.float64)
    x = x - x.mean(0)
    y = torch.sign(x[:, 0] + 0.1 * x[:, 3] + torch.randn(150, generator=source, dtype=torch.float64))
    run = optim.gdnp(optim.halfspace(x, y), iterations=60)
    tuned = min(batchnorm_descent(x, y, rate, 60) for rate in (0.1, 1.0, 10.0, 100.0))
    assert run.loss <= tuned + 0.02


def test_separable_data_say_that_there_is_no_finite_length():
    x = torch.tensor([[1.0, 0.2], [2.0, -0.3], [-1.0, 0.1], [-2.0, 0.1]])
    run = optim.gdnp(
        optim.halfspace(x, torch.tensor([1.0, 1.0, -1.0, -1.0])), iterations=5, start=torch.tensor([1.0, 0.1])
    )
    assert run.status == "nonconverged" and "no finite minimum" in str(run)


def test_the_network_descends_with_every_sweep():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=source, dtype=torch.float64)
    y = torch.sign((x[:, 0] * x[:, 1]) + 0.1)
    run = optim.gdnp_network(x - x.mean(0), y, output=torch.tensor([1.5, -1.5, 1.0]), sweeps=8)
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(run.losses))
    assert run.losses[-1] < 0.9 * run.losses[0]
    assert "tanh units" in str(run) and len(run.frame()) == 9


def test_bad_problems_are_refused():
    x, y = regression(0)
    with pytest.raises(InputError, match=r"x is \[samples, features\]"):
        optim.least_squares(x, y[:3])
    with pytest.raises(DataError, match="positive definite"):
        optim.least_squares(x[:2], y[:2])
    with pytest.raises(DataError, match="labels are -1 or 1"):
        optim.halfspace(x, y)
    with pytest.raises(UnknownNameError, match="halfspace loss 'hinge'"):
        optim.halfspace(x, torch.sign(y), loss="hinge")
    with pytest.raises(DataError, match="must be a covariance"):
        optim.gaussian_halfspace(torch.ones(2), 0.1 * torch.eye(2))
    with pytest.raises(InputError, match="Rayleigh quotient is critical"):
        optim.gdnp(optim.least_squares(x, y), start=torch.zeros(5))
    with pytest.raises(InputError, match="start is"):
        optim.gdnp_network(x, torch.sign(y), output=torch.ones(2), start=torch.ones(3, 5))


def test_a_run_draws_its_curves():
    x, y = regression(0)
    assert optim.gdnp(optim.least_squares(x, y), iterations=5).chart().to_dict()["layer"]


@pytest.mark.parametrize("loss", ["sigmoid", "softplus", "tanh"])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 10.0, 100.0, 1e4])
def test_means_are_those_of_adaptive_quadrature_at_every_length(loss, scale):
    u = torch.tensor([0.6, -0.2], dtype=torch.float64)
    problem = optim.gaussian_halfspace(u, torch.eye(2, dtype=torch.float64), loss=loss)
    phi = LOSSES[loss][0]
    for direction in ([-1.0, 0.0], [0.3, 1.0], [0.2, 0.6]):
        w = scale * torch.tensor(direction, dtype=torch.float64)
        mean = float(u @ w)
        spread = math.sqrt(float(w @ w) - mean**2)

        def integrand(x, part, mean=mean, spread=spread):
            value = phi(torch.tensor(mean + spread * x, dtype=torch.float64))[part]
            return float(value) * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

        kink = -mean / spread
        near = [kink + offset / spread for offset in (-40, -5, -1, 0, 1, 5, 40)]
        breaks = sorted({-12.0, 12.0, -3.0, 0.0, 3.0, *(min(max(x, -12.0), 12.0) for x in near)})
        means = problem.means(w)
        for part, value in enumerate((means.loss, means.first, means.second)):
            pieces = [
                scipy.integrate.quad(integrand, a, b, args=(part,), epsabs=1e-13, epsrel=1e-12)[0]
                for a, b in itertools.pairwise(breaks)
            ]
            assert value == pytest.approx(sum(pieces), rel=1e-9, abs=1e-11)


def test_a_bounded_loss_without_a_best_length_is_not_called_solved():
    problem = optim.gaussian_halfspace(torch.tensor([0.6, 0.0]), torch.eye(2), loss="sigmoid")
    infimum = 0.5 * math.erfc(0.6 / math.sqrt(2 * (1 - 0.36)))  # P(z^T w > 0) for a weight of any length along -u
    for length in (1.0, 100.0, 1e5):
        assert problem.means(torch.tensor([-length, 0.0], dtype=torch.float64)).loss >= infimum - 1e-12
    for start in ([0.05, 1.0], [-0.6, 0.1], [1.0, 0.3]):
        run = optim.gdnp(problem, start=torch.tensor(start))
        assert run.status == "nonconverged" and "no finite minimum" in run.sentence


def test_the_gradient_bound_is_known_before_the_run():
    u, S = gaussian(2)
    problem = optim.gaussian_halfspace(u, S, loss="softplus")
    run = optim.gdnp(problem, iterations=4)
    best = -float(u @ torch.linalg.solve(S, u))
    limit = float(largest_coefficient(1.0, torch.tensor(best)))
    for record in run.records:
        assert math.isfinite(record.length_bound) and abs(record.length_slope) <= record.length_bound + 1e-12
        assert record.gradient_bound == pytest.approx(math.hypot(limit * record.rho_bound**0.5, record.length_bound))
        assert record.gradient_norm <= record.gradient_bound
    for smoothness in (0.0, -1.0, math.inf):
        with pytest.raises(InputError, match="smoothness is a positive number"):
            optim.gdnp(problem, smoothness=smoothness)
    with pytest.raises(InputError, match="smoothness must be a number"):
        optim.gdnp(problem, smoothness=math.nan)


def test_the_network_counts_every_evaluation():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=source, dtype=torch.float64)
    run = optim.gdnp_network(x, torch.sign(x[:, 0]), output=torch.ones(2), sweeps=3)
    assert run.evaluations[-1] == run.cost.gradients > 100 and run.evaluations[0] == 1
