"""S2 (Than 2025), what follows for training and generalization: section 5, Corollaries 18 and 19, Theorem 20 on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import comb, factorial, inf, prod

import torch
from torch import Tensor
from torch.nn import functional

from normgauge.papers.court.checks import Check, conclusion, corrected, excess, fact, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import gradient, normal
from normgauge.papers.instances.feedforward import layer_norm, random_network, with_population_statistics
from normgauge.theory.lipschitz_norms import batch_norm_constant, layer_norm_constant
from normgauge.theory.partition_bound import partition_slack
from normgauge.theory.stationarity import goldstein_evaluations


@theorem("S2-C18")
def _iterations(generator: torch.Generator) -> Iterator[Check]:
    data, alpha = normal(generator, 8, 3).abs() + 0.1, 1e-3
    first = normal(generator, 4, 3).abs()
    counts = {}
    for size in (10.0, 1e3, 1e6, 1e9):

        def loss(W: Tensor, size: float = size) -> Tensor:
            return functional.softplus(size * torch.relu(data @ W.T).sum(1)).mean()

        W, steps = first, 0
        while gradient(loss, W).norm() > alpha and steps < 50:
            W, steps = W - gradient(loss, W), steps + 1
        counts[size] = steps
        yield corrected("one step is enough", excess(float(steps), 1.0))
        yield fact("gradient norm at the start", gradient(loss, first).norm())
    constant = counts[10.0] * alpha / 10.0
    for size, steps in counts.items():
        yield printed("iterations grow with s_{i+1}..s_K/alpha", excess(constant * size / alpha, float(steps)))


@theorem("S2-C19")
def _evaluations(generator: torch.Generator) -> Iterator[Check]:
    for n in (2, 4):
        A, offset, start = normal(generator, 2 * n, n), normal(generator, 2 * n), 3 * normal(generator, n)
        first = 0.0
        for unit in (1.0, 1e3):

            def loss(w: Tensor, unit: float = unit, A: Tensor = A, offset: Tensor = offset) -> Tensor:
                residual = A @ (unit * w) - offset
                return residual.abs().mean() + 0.1 * torch.sin(residual[0])

            lipschitz = unit * float(A.norm(dim=1).mean() + 0.1 * A[0].norm())
            drop = float(loss(start / unit)) + 0.1
            alpha, radius = 0.2 * lipschitz, 0.1 / unit
            draws = torch.Generator().manual_seed(n)
            count = _goldstein_descent(loss, start / unit, radius, alpha, draws)
            first = first or count * alpha**2 / lipschitz
            yield printed("O(L/alpha^2)", excess(float(count), first * lipschitz / alpha**2))
            told = goldstein_evaluations(drop, lipschitz, radius, alpha)
            yield corrected("O(D L^2/(delta alpha^3))", excess(count, told))
            yield fact("evaluations", count)


@theorem("S2-T20")
def _generalization(generator: torch.Generator) -> Iterator[Check]:
    for delta in (0.05, 0.5):
        for m, p in ((40, (0.5, 0.5)), (300, (0.999, 0.001)), (300, (0.7, 0.3)), (36, (0.6, 0.3, 0.1))):
            for loss in product((0.0, 1.0), repeat=len(p)):
                failure = _failure(p, m, delta, loss=loss)
                yield printed("a loss fixed before: probability of failure", excess(failure, delta))
            yield corrected("the worst loss after: probability of failure", excess(_failure(p, m, delta), delta))
    for _ in range(4):
        cell = _Cell.draw(generator)
        yield printed("within a cell: mean f over it minus over its samples", excess(cell.rise, cell.lipschitz_term))
    yield fact("f <= 0: probability that the bound fails", _failure((0.5, 0.5), 41, 0.05, largest=0.0))


@theorem("S2-C21")
def _discontinuous(generator: torch.Generator) -> Iterator[Check]:
    for jump in (0.3, 0.5):
        x = torch.rand(400, generator=generator, dtype=torch.float64)
        f = (x > jump).double() + 0.2 * x
        for side in (x < jump, x > jump):
            cell = _Cell(x[side][:, None], f[side], f[side].argsort()[:5], 0.2)
            yield printed("cells on either side of the jump", excess(cell.rise, cell.lipschitz_term))
        low = x.argsort()[:5]
        across = _Cell(x[:, None], f, low, 0.2)
        yield fact("one cell across: mean f above the bound", across.rise - across.lipschitz_term)


@theorem("S2-C22")
def _normalized_generalization(generator: torch.Generator) -> Iterator[Check]:
    classes, m, delta = 1500, 200, 0.1
    for radius in (1e-3, 1e-6):
        sample = torch.randint(classes, (m,), generator=generator)
        memory = torch.zeros(classes).index_fill(0, sample, 1.0)
        empirical_loss = (1 - memory[sample]).mean()
        expected_loss = (1 - memory).mean()
        omega = memory.norm() * 2 * radius  # one layer, W = (memory, 0), inputs (1, r) with |r| <= radius
        slack = partition_slack(1, 1, m, delta)
        yield printed("labels that vary within a cell", excess(expected_loss - empirical_loss, slack + omega))
    for widths in ((3, 4, 2), (2, 5, 5, 3)):
        eps = 0.2
        net = random_network(generator, widths)
        data = normal(generator, 60, widths[0])
        normed, variances = with_population_statistics(net, data, eps)
        factor = max(float((v + eps).rsqrt().norm()) for v in variances) ** len(variances)
        layered = replace(net, norms=(layer_norm(eps),) * len(net.weights))
        label = normal(generator, widths[-1])
        constant = layer_norm_constant(eps) ** len(variances)
        for name, model, size in (("plain", net, 1.0), ("BN", normed, factor), ("LN", layered, constant)):
            f = (model(data) - label).norm(dim=1)  # 1-Lipschitz in h, the label constant
            cell = _Cell(data, f, torch.arange(7), net.weight_product() * size)
            yield corrected(f"one label, {name}", excess(cell.rise, cell.lipschitz_term))
            yield conclusion("one label per cell", excess(cell.rise, cell.lipschitz_term))
        sharp = prod(float(batch_norm_constant(v, eps)) for v in variances)
        yield corrected("sigma^-K is no smaller than the layers' constants", excess(sharp, factor))


@theorem("S2-curse")
def _curse(generator: torch.Generator) -> Iterator[Check]:
    del generator  # nothing is drawn: the numbers are expectations
    k, counts, lines = 4, [], []
    for n in range(1, 13):
        counts.append(_samples_needed(k**n, k**n))
        lines.append(_samples_needed(k, k**n))
        yield corrected("at least N samples", excess(float(k**n), counts[-1]))
    yield printed("from 6 to 12 dimensions samples grow at most like n^6", excess(counts[11] / counts[5], 2.0**6))
    yield corrected("on a line they grow like n", excess(lines[-1] / lines[0], 12.0))
    yield fact("samples needed in 12 dimensions", counts[-1])
    yield fact("on a line in 12 dimensions", lines[-1])


@dataclass(frozen=True)
class _Cell:
    """A finite cell: all its points with equal weight, the loss there, which were sampled, a Lipschitz constant."""

    points: Tensor
    f: Tensor
    sampled: Tensor
    lipschitz: float

    @classmethod
    def draw(cls, generator: torch.Generator) -> _Cell:
        """Draw a cell with a loss that is 1-Lipschitz, and samples where it is least: the adversary's choice."""
        points = normal(generator, 30, 3)
        f = (points - normal(generator, 3)).norm(dim=1)
        return cls(points, f, f.argsort()[:4], 1.0)

    @property
    def rise(self) -> Tensor:
        return self.f.mean() - self.f[self.sampled].mean()

    @property
    def lipschitz_term(self) -> Tensor:
        """Return `lambda L`, lambda the mean distance between a sample and a point of the cell."""
        return self.lipschitz * torch.cdist(self.points[self.sampled], self.points).mean()


def _failure(
    p: tuple[float, ...], m: int, delta: float, largest: float = 1.0, loss: tuple[float, ...] | None = None
) -> float:
    """Return the probability that `loss`, or the worst one chosen after the data, breaks the bound; all is enumerated.

    The loss is constant on each cell: for values in [0, 1] the worst one is 1 where a cell is sampled too little;
    `largest = 0` stands for values in [-1, 0], where C = 0 and the worst one is -1 where it is sampled too much.
    """
    total = 0.0
    for counts in product(range(m + 1), repeat=len(p) - 1):
        rest = m - sum(counts)
        if rest < 0:
            continue
        every = (*counts, rest)
        gaps = [q - c / m for q, c in zip(p, every, strict=True)]
        rise = sum(max(d, 0.0) for d in gaps) if loss is None else sum(f * d for f, d in zip(loss, gaps, strict=True))
        if rise > partition_slack(sum(c > 0 for c in every), len(p), m, delta, largest):
            ways = factorial(m) // prod(map(factorial, every)) if len(p) > 2 else comb(m, every[0])
            total += ways * prod(q**c for q, c in zip(p, every, strict=True))
    return total


def _samples_needed(cells_in_reach: int, cells: int) -> float:
    """Return the least m (to 3 %) with slack at most C = 1, |T| at its expectation for uniform data."""
    m = 2.0
    while m < inf:
        occupied = -cells_in_reach * torch.expm1(m * torch.log1p(torch.tensor(-1.0 / (cells_in_reach + 1e-12))))
        if partition_slack(min(float(occupied), m), cells, max(int(m), 1), 0.1) <= 1:
            break
        m *= 1.03
    return m


def _goldstein_descent(
    loss: Callable[[Tensor], Tensor], w: Tensor, radius: float, slope: float, draws: torch.Generator
) -> int:
    """Return how many evaluations a descent by shortest combinations of nearby gradients takes (at most 10^4)."""
    count = 1
    g = gradient(loss, w)
    while g.norm() > slope and count < 10_000:
        step = radius * g / g.norm()
        count += 2
        if loss(w - step) <= loss(w) - radius * g.norm() / 4:
            w = w - step
            g = gradient(loss, w)
            continue
        other = gradient(loss, w - torch.rand((), generator=draws, dtype=torch.float64) * step)
        between = g - other
        share = ((g @ between) / (between @ between)).clamp(0, 1) if between.norm() > 0 else torch.zeros(())
        g = g - share * between
    return count
