"""S4 (Sun et al. 2020), standardization and batch normalization: Lemma 1 and section 2.2."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import gradient, jacobian, normal, sign, uniform
from normgauge.theory.batchnorm_calculus import standardize
from normgauge.theory.effective_weights import covariance, effective_weights, unit_distance_squared

SIZES = ((1, 3), (2, 2), (2, 7), (5, 5), (5, 12), (9, 4))  # (features n, samples B): n > B has a singular covariance


@theorem("S4-L1a")
def _lemma_one(generator: torch.Generator) -> Iterator[Check]:
    for n in (2, 3, 5, 40):
        v = 10.0 ** uniform(generator, -3, 3) * normal(generator, n) + normal(generator, 1)
        e, P = torch.ones(n), torch.eye(n) - torch.ones(n, n) / n
        N, sigma = standardize(v)
        beta = v.mean()
        yield printed("N is what torch computes", gap(N, functional.layer_norm(v, (n,), eps=0.0)))
        yield printed("P^2 = P", gap(P @ P, P))
        yield printed("Pv = v - mean and orth e", gap(P @ v, v - beta, v.norm()) + gap(e @ P @ v, 0.0, v.norm() * n))
        yield printed("sigma^2 = |Pv|^2/n", gap(torch.var(v, correction=0), (P @ v).square().sum() / n))
        yield printed("|N(v)| = sqrt(n)", gap(N.norm(), n**0.5))
        tangents = torch.linalg.matrix_rank(jacobian(lambda x: standardize(x)[0], v) * v.norm(), atol=1e-6)
        yield printed("the sphere has n - 2 dimensions", gap(float(tangents), n - 2.0))
        yield printed("v = gamma N(v) + beta e", gap(v, sigma * N + beta * e))
        yield printed("|v|^2 = n (gamma^2 + beta^2)", gap(v @ v, n * (sigma**2 + beta**2)))


@theorem("S4-L1b")
def _proof_of_variance(generator: torch.Generator) -> Iterator[Check]:
    for n in (2, 3, 5, 40):
        v = normal(generator, n) + normal(generator, 1)
        centred = v - v.mean()
        truth = torch.std(v, correction=0)
        yield printed("|Pv|/n", gap(truth, centred.norm() / n))
        yield printed("variance without the square", gap(truth**2, centred.sum() / n))
        yield corrected("|Pv|/sqrt(n)", gap(truth, centred.norm() / n**0.5))
        yield corrected("variance with the square", gap(truth**2, centred.square().sum() / n))
        yield conclusion("Lemma 1 (3): sigma = |v - mean|/sqrt(n)", gap(truth, (v - v.mean()).norm() / n**0.5))


@theorem("S4-L1c")
def _invariance_of_n(generator: torch.Generator) -> Iterator[Check]:
    for n in (2, 3, 5, 40):
        v, t = normal(generator, n), uniform(generator, -3, 3)
        N = standardize(v)[0]
        for alpha in (-2.5, -1.0, 0.1, 7.0):
            moved = standardize(alpha * v + t)[0]
            yield printed("equal for every alpha", gap(moved, N))
            yield corrected("equal up to the sign of alpha", gap(moved, (1 if alpha > 0 else -1) * N))
            if alpha > 0:
                yield conclusion("scaling by alpha > 0 and moving change nothing", gap(moved, N))


@theorem("S4-10")
def _sphere(generator: torch.Generator) -> Iterator[Check]:
    for n, B in SIZES:
        X, W = normal(generator, n, B) + normal(generator, n, 1), normal(generator, 3, n)
        gamma, beta = uniform(generator, 0.3, 2) * sign(generator), uniform(generator, -2, 2)
        rows = normalized_rows(W @ X, gamma, beta)
        root = ((W @ covariance(X)) * W).sum(1, keepdim=True).sqrt()
        weights, bias = effective_weights(W, X, gamma, beta)
        yield printed("radius", gap((rows - beta).norm(dim=1), abs(gamma) * B**0.5 * torch.ones(3)))
        yield printed("norm", gap(rows.norm(dim=1), (B * (gamma**2 + beta**2)) ** 0.5 * torch.ones(3)))
        yield printed("eq (11)", gap(rows, gamma * (W @ (X - X.mean(1, keepdim=True))) / root + beta))
        yield printed("eq (12)", gap(rows, weights @ X + bias[:, None]))


@theorem("S4-sim")
def _similar_units(generator: torch.Generator) -> Iterator[Check]:
    for n, B in ((3, 4), (5, 12), (2, 40)):
        Y = normal(generator, 2, n) @ normal(generator, n, B)
        gamma, beta = uniform(generator, 0.3, 2), uniform(generator, -2, 2)
        rows = normalized_rows(Y, gamma, beta)
        yield printed("equal gamma and beta, equal outputs", gap(rows[0], rows[1]))
        apart = (rows[0] - rows[1]).square().sum()
        yield corrected("distance from the correlation", gap(apart, unit_distance_squared(Y[0], Y[1], gamma)))
        one, other = normalized_rows(torch.stack([Y[0], -Y[0]]), gamma, 0.0)
        yield fact("outputs of opposite units over their sum of norms", (one - other).norm() / (2 * one.norm()))


@theorem("S4-perm")
def _permutations(generator: torch.Generator) -> Iterator[Check]:
    for n, B in ((2, 3), (3, 6), (4, 9)):
        X, W, target = normal(generator, n, B), normal(generator, 2, n), normal(generator, 2, B)
        order = torch.arange(B).roll(1)
        N = standardize(W @ X)[0]
        yield printed("the permuted direction has the same output", gap(standardize((W @ X)[:, order])[0], N))
        yield corrected("the output is permuted along", gap(standardize((W @ X)[:, order])[0], N[:, order]))
        before, after = row_loss(W, X, target), row_loss(W, X[:, order], target[:, order])
        slopes = (gradient(row_loss, W, X, target), gradient(row_loss, W, X[:, order], target[:, order]))
        off = gap(before, after) + gap(*slopes)
        yield conclusion("the order of samples (with targets) changes neither loss nor gradient", off)
        alone = torch.stack([N[0][order], N[1]])
        yield fact("change of the loss when one unit alone is permuted", (alone - target).square().sum() - before)


@theorem("S4-rank")
def _rank(generator: torch.Generator) -> Iterator[Check]:
    for n, B in SIZES:
        rank = int(torch.linalg.matrix_rank(covariance(normal(generator, n, B) + 1)))
        yield printed("rank <= min(n, B)", broken(rank <= min(n, B)))
        yield printed("dim ker >= n - B", broken(n - rank >= n - B))
        yield corrected("rank = min(n, B - 1) in general position", gap(float(rank), float(min(n, B - 1))))


@theorem("S4-ker")
def _kernel(generator: torch.Generator) -> Iterator[Check]:
    for n, B in ((60, 3), (100, 4), (200, 8)):
        X, W = normal(generator, n, B), normal(generator, 5, n)
        gamma, beta = uniform(generator, 0.3, 2), uniform(generator, -2, 2)
        Sigma = covariance(X)
        inside = torch.linalg.pinv(Sigma, hermitian=True, rtol=1e-9) @ Sigma  # projects onto the range
        close = W - W @ inside + 1e-3 * W @ inside
        for weights in (W, close):
            apart = (normalized_rows(weights @ X, gamma, beta) - beta).norm(dim=1) / (gamma * B**0.5)
            yield printed("distance from beta e over the radius is small", float(apart.max()))
            yield corrected("the row stays on its sphere", gap(apart, torch.ones(5)), 1e-7)
        yield printed("W Sigma = 0", gap(W @ Sigma, 0.0, W.norm() * Sigma.norm()))
        yield corrected("share outside the kernel, expected (B-1)/n", gap(torch.trace(inside) / n, (B - 1) / n), 1e-7)
        yield fact("W Sigma W^T over trace(Sigma), mean of five", ((W @ Sigma) * W).sum(1).mean() / torch.trace(Sigma))


@theorem("S4-B2")
def _batch_of_two(generator: torch.Generator) -> Iterator[Check]:
    for n in (1, 2, 6):
        X, W, target = normal(generator, n, 2), normal(generator, 3, n), normal(generator, 3, 2)
        rows = normalized_rows(W @ X, 1.0, 0.0)
        s = standardize(W @ X)[1]
        yield printed("entries are 1 and -1", gap(rows.abs(), torch.ones(3, 2)) + gap(rows.sum(1), 0.0, 1.0))
        size = (X.norm() / s.min()) * target.norm()
        yield printed("gradient of the weights", gap(gradient(row_loss, W, X, target), 0.0, size))
        slope = gradient(lambda x, w=W, t=target: row_loss(w, x, t), X)
        yield printed("gradient of the inputs", gap(slope, 0.0, (W.norm() / s.min()) * target.norm()))
        yield fact("gradient of the first gamma", (2 * (rows - target) * rows).sum(1)[0])
        leak = gradient(lambda w, x=X, t=target: (standardize(w @ x, 0.1)[0] - t).square().sum(), W)
        yield fact("gradient of the weights with eps = 0.1", leak.abs().max())


@theorem("S4-ell")
def _ellipsoid(generator: torch.Generator) -> Iterator[Check]:
    for n, B in ((2, 7), (4, 12), (5, 5), (6, 3)):
        X, w, gamma = normal(generator, n, B), normal(generator, 1, n), uniform(generator, 0.3, 2)
        Sigma = covariance(X)
        values, vectors = torch.linalg.eigh(Sigma)
        rank = int(torch.linalg.matrix_rank(Sigma))
        reach = gamma / values[n - rank].sqrt()
        kernel, scope = vectors[:, : n - rank], vectors[:, n - rank :]
        far = w + 1e3 * (kernel @ normal(generator, n - rank, 1)).T
        weights = effective_weights(far, X, gamma)[0]
        yield printed("W' stays within the largest axis", excess(weights.norm(), reach))
        turns = jacobian(lambda v, x=X, c=gamma: effective_weights(v[None], x, c)[0][0] @ scope_basis(x), w[0])
        dimension = float(torch.linalg.matrix_rank(turns, atol=1e-9 * float(turns.norm())))
        yield printed("dimension is rank(Sigma)", gap(dimension, float(rank)))
        yield corrected("dimension within the range is rank(Sigma) - 1", gap(dimension, rank - 1.0, 1.0))
        yield corrected("W' Sigma W'^T = gamma^2", gap((weights @ Sigma @ weights.T)[0, 0], gamma**2), 1e-7)
        yield corrected("its part in the range stays within the largest axis", excess((weights @ scope).norm(), reach))
        if rank == n:
            yield conclusion("regular Sigma: W' stays within the largest axis", excess(weights.norm(), reach))
        else:
            yield fact("|W'| over the largest axis, singular Sigma", weights.norm() / reach)


@theorem("S4-inv")
def _bn_invariance(generator: torch.Generator) -> Iterator[Check]:
    for n, B in SIZES:
        X, W = normal(generator, n, B), normal(generator, 3, n)
        rows = normalized_rows(W @ X, 1.3, 0.4)
        c, each = 10.0 ** uniform(generator, -2, 2), normal(generator, 3, 1).exp()
        yield printed("W -> c W, also row by row", gap(normalized_rows(c * each * W @ X, 1.3, 0.4), rows))
        yield printed("X -> c X", gap(normalized_rows(W @ (c * X), 1.3, 0.4), rows))
        yield printed("X -> X + b e^T", gap(normalized_rows(W @ (X + 3 * normal(generator, n, 1)), 1.3, 0.4), rows))
        yield fact("W -> -W: change over the largest entry", gap(normalized_rows(-W @ X, 1.3, 0.4), rows))


def scope_basis(X: Tensor) -> Tensor:
    """Return an orthonormal basis of the range of the covariance of X, as columns."""
    values, vectors = torch.linalg.eigh(covariance(X))
    return vectors[:, values > 1e-9 * values[-1]]


def normalized_rows(Y: Tensor, gamma: float, beta: float) -> Tensor:
    """Normalize the rows of `[units, B]` with torch's own batch normalization; it refuses eps = 0, so eps is tiny."""
    return gamma * functional.batch_norm(Y.T, None, None, training=True, eps=1e-300).T + beta


def row_loss(W: Tensor, X: Tensor, target: Tensor) -> Tensor:
    """Return the squared error of the normalized units, summed over samples."""
    return (standardize(W @ X)[0] - target).square().sum()
