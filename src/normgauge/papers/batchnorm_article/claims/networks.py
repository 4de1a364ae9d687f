"""S3 (the encyclopedia article), linear convergence: a hidden layer of tanh units on Gaussian data."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import gradient, hessian, normal, uniform
from normgauge.papers.instances.gaussian import GaussianLoss, bisection, misalignment, stationary_point
from normgauge.theory.gdnp import bisection_bound
from normgauge.theory.rayleigh import direction_quotient, direction_step

REACH = 6.0


@dataclass(frozen=True)
class _Network:
    """`f(W) = E l(sum theta_i tanh(z^T w_i))` for a Gaussian z."""

    data: GaussianLoss
    theta: Tensor

    def loss(self, flat: Tensor) -> Tensor:
        W = flat.reshape(len(self.theta), -1)
        return self.data.weights @ functional.softplus(torch.tanh(self.data.z @ W.T) @ self.theta)

    def unit_loss(self, w: Tensor, W: Tensor, i: int) -> Tensor:
        """Return f as a function of unit i alone, the others as in W."""
        rows = [w if k == i else W[k] for k in range(len(W))]
        return self.loss(torch.cat(rows))

    def loss_on_line(self, lengths: Tensor) -> Tensor:
        """Return f with the units at multiples of `S^-1 u`."""
        return self.loss(torch.outer(lengths, self.line).flatten())

    def unit_gradient(self, W: Tensor, i: int) -> Tensor:
        return gradient(self.unit_loss, W[i], W, i)

    def squared(self, slope: Tensor) -> Tensor:
        """Return `|slope|_{S^-1}^2`."""
        return slope @ torch.linalg.solve(self.data.S, slope)

    @cached_property
    def line(self) -> Tensor:
        return self.data.best_direction


def _network(generator: torch.Generator) -> _Network:
    """Draw a task whose classes overlap, so that the units' best lengths are finite."""
    A = normal(generator, 2, 2) / 2**0.5
    C = A @ A.T + 0.2 * torch.eye(2)
    u = normal(generator, 2)
    u = 0.5 * u / (u @ torch.linalg.solve(C, u)).sqrt()
    theta = torch.tensor([uniform(generator, 1.5, 2.5) for _ in range(2)])
    return _Network(GaussianLoss(u, C, functional.softplus, step=0.25), theta)


@theorem("S3-NN")
def _hidden_units(generator: torch.Generator) -> Iterator[Check]:
    for _ in range(2):
        net = _network(generator)
        size = net.theta.sum() * net.data.u.norm()
        W = torch.stack([0.7 * w / net.data.norm(w) for w in normal(generator, 2, 2)])
        for i in (0, 1):
            told = _unit_gradient(net, W, i)
            yield corrected("grad_i in closed form", gap(net.unit_gradient(W, i), told, size), 1e-6)
        on_line = torch.outer(stationary_point(net.loss_on_line, torch.tensor([-1.0, -2.0])), net.line)
        yield corrected("critical points on the line exist", gap(gradient(net.loss, on_line.flatten()), 0.0, size))
        yield corrected("with M regular", broken(_rank_gap(net, on_line) > 1e-6))
        best = stationary_point(net.loss, 0.4 * normal(generator, 4))
        stationary = gap(gradient(net.loss, best), 0.0, size) < 1e-11
        joint = best.reshape(2, 2)
        off = max(misalignment(w, net.line) for w in joint) if stationary else 0.0
        yield printed("both units critical", off)
        yield corrected("off the line M is singular", _rank_gap(net, joint) if off > 1e-6 else 0.0)
        yield fact("smallest eigenvalue of the Hessian there", torch.linalg.eigvalsh(hessian(net.loss, best))[0])
        alone = stationary_point(partial(net.unit_loss, W=W, i=0), 0.3 * normal(generator, 2))
        stationary = gap(gradient(net.unit_loss, alone, W, 0), 0.0, size) < 1e-11
        yield printed("unit i critical, the other anywhere", misalignment(alone, net.line) if stationary else 0.0)


@theorem("S3-rate")
def _whole_problem(generator: torch.Generator) -> Iterator[Check]:
    steps, halvings = 400, 40
    for _ in range(2):
        net = _network(generator)
        S, u, (mu, L) = net.data.S, net.data.u, net.data.extremes
        W, smoothness = torch.zeros(2, 2), 2 * net.theta.sum() ** 2 * L
        start = torch.zeros(())
        for i in (0, 1):
            w = net.line / net.line.norm() + 0.5 * normal(generator, 2)
            least = net.data.least_quotient
            start = direction_quotient(w, u, S) - least
            for t in range(1, steps + 1):
                w = direction_step(w, u, S, L)
                if t in (1, 5, 20):
                    left = direction_quotient(w, u, S) - least
                    bound = (1 - mu / L) ** (2 * t) * start
                    yield corrected("the direction's rate", excess(left, bound, least.abs()))
            W = _set_best_length(net, W, i, w / net.data.norm(w), halvings)
            bound = _bound(net, start, steps) + bisection_bound(halvings, smoothness, 2 * REACH, mu)
            own = net.squared(net.unit_gradient(W, i))
            yield corrected("the gradient of the unit run last", excess(own, bound, 1e-18))
        whole = sum(net.squared(net.unit_gradient(W, i)) for i in (0, 1))
        told = _bound(net, start, steps) + 2.0**-halvings * smoothness * 2 * REACH / mu**2
        yield printed("all units after one pass", excess(whole, told))
        yield conclusion("the whole gradient vanishes as t and Ts grow", excess(whole, told))
        yield fact("squared gradient of the first unit after the second was run", net.squared(net.unit_gradient(W, 0)))
    off = torch.stack([torch.zeros(2), torch.stack([-net.line[1], net.line[0]]) / net.line.norm()])
    ended = _set_best_length(net, off, 0, net.line / net.data.norm(net.line), halvings)
    yield printed("unit i with another off the line", excess(net.squared(net.unit_gradient(ended, 0)), told))
    yield corrected("it is not critical there", broken(net.squared(net.unit_gradient(ended, 0)) > 1e-6))


def _bound(net: _Network, start: Tensor, steps: int) -> Tensor:
    """Return the first term of the bound with a generous constant."""
    mu, L = net.data.extremes
    return 1e6 * (1 - mu / L) ** (2 * steps) * start


def _set_best_length(net: _Network, W: Tensor, i: int, w: Tensor, halvings: int) -> Tensor:
    """Return W with unit i at the length, along w, where the loss has a zero slope (by bisection)."""

    def slope(gamma: float) -> Tensor:
        return gradient(lambda c: net.unit_loss(c * w, W, i), torch.tensor(gamma))

    gamma = bisection(slope, -REACH, REACH, halvings)
    return torch.stack([gamma * w if k == i else W[k] for k in range(len(W))])


def _moments(net: _Network, W: Tensor) -> tuple[Tensor, Tensor]:
    """Return `E[l' phi'_i]` and `M_ij = theta_j E[l'' phi'_i phi'_j] + delta_ij E[l' phi''_i]`."""
    h = torch.tanh(net.data.z @ W.T)
    slope, weights = 1 - h.square(), net.data.weights
    p = torch.sigmoid(h @ net.theta)
    outer = torch.einsum("n,ni,nj->ij", weights * p * (1 - p), slope, slope) * net.theta
    return (weights * p) @ slope, outer + torch.diag((weights * p) @ (-2 * h * slope))


def _unit_gradient(net: _Network, W: Tensor, i: int) -> Tensor:
    """Return `theta_i (k_i u + S sum_j M_ij w_j)`."""
    means, M = _moments(net, W)
    mixed = M[i] @ W
    return net.theta[i] * ((means[i] - net.data.u @ mixed) * net.data.u + net.data.S @ mixed)


def _rank_gap(net: _Network, W: Tensor) -> float:
    """Return the ratio of M's smallest singular value to its largest: 0 where M is singular."""
    values = torch.linalg.svdvals(_moments(net, W)[1])
    return float(values[-1] / values[0])
