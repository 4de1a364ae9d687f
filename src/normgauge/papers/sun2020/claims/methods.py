"""S4 (Sun et al. 2020), other normalizers, the symmetry, the tables: sections 2.3-2.5, Lemmas 2, 3, App 5.1-5.5."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from scipy.special import betaincinv
from torch import Tensor
from torch.nn import functional

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, fact, gap, printed
from normgauge.papers.court.registry import bibliographic, theorem
from normgauge.papers.instances import Loss, Unit, gradient, normal, uniform, units
from normgauge.papers.sun2020.claims.batchnorm import normalized_rows, row_loss
from normgauge.theory.batchnorm_calculus import project, standardize
from normgauge.theory.effective_weights import covariance, effective_weights
from normgauge.theory.norm_growth import after_sgd_step

TINY = 1e-300  # torch's batch and group normalization refuse eps = 0


@theorem("S4-LN")
def _layer_norm(generator: torch.Generator) -> Iterator[Check]:
    for m, n in ((2, 1), (2, 4), (5, 3), (12, 8)):
        W, X = normal(generator, m, n), normal(generator, n)
        truth = functional.layer_norm(W @ X, (m,), eps=0.0)
        c = 10.0 ** uniform(generator, -2, 2)
        centred = (W - W.mean(0)) @ X
        yield printed("eq (13)", gap(truth, m**0.5 * centred / centred.norm()))
        changes = {"W -> c W": c * W @ X, "X -> c X": W @ (c * X)}
        changes["one vector added to all rows"] = (W + normal(generator, n)) @ X
        for name, changed in changes.items():
            yield printed(name, gap(truth, functional.layer_norm(changed, (m,), eps=0.0)))


@theorem("S4-WN")
def _weight_norm(generator: torch.Generator) -> Iterator[Check]:
    for n, B in ((2, 4), (3, 8), (6, 20)):
        white = _draw_white(generator, n, B)
        W, gamma, beta = normal(generator, 4, n), uniform(generator, 0.3, 2), uniform(generator, -2, 2)
        unit_rows = gamma * W / W.norm(dim=1, keepdim=True)
        spread = white * torch.linspace(0.3, 3, n)[:, None]
        yield printed("independent features", gap(normalized_rows(W @ spread, gamma, beta), unit_rows @ spread + beta))
        moved = white + normal(generator, n, 1)
        bias = beta - unit_rows @ moved.mean(1)
        rows = normalized_rows(W @ moved, gamma, beta)
        yield corrected("identity covariance", gap(rows, unit_rows @ moved + bias[:, None]))
        yield corrected("effective weights", gap(effective_weights(W, moved, gamma)[0], unit_rows))
        even, rows = (normalized_rows(W @ (size * white), gamma, beta) for size in (1.7, 1.0))
        yield corrected("equal variances, uncorrelated", gap(even, unit_rows @ white + beta))
        yield conclusion("whitened centred inputs: BN is WN", gap(rows, unit_rows @ white + beta))


@theorem("S4-WS")
def _weight_standardization(generator: torch.Generator) -> Iterator[Check]:
    for n in (2, 3, 9):
        W = normal(generator, 4, n) + 1
        standard = (W - W.mean(1, keepdim=True)) / W.std(1, correction=0, keepdim=True)
        centred = _centred_unit_rows(W)
        yield printed("WS = sqrt(n) CWN", gap(standard, n**0.5 * centred))
        radii = centred.norm(dim=1)
        yield printed("radii", gap(standard.norm(dim=1) / n**0.5, radii) + gap(radii, torch.ones(4)))
        yield printed("both orthogonal to e", gap(standard.sum(1), 0.0, 1.0) + gap(centred.sum(1), 0.0, 1.0))


@theorem("S4-SN")
def _spectral(generator: torch.Generator) -> Iterator[Check]:
    for m, n in ((1, 2), (2, 2), (3, 7), (8, 4)):
        W = normal(generator, m, n)
        normalized = W / torch.linalg.matrix_norm(W, 2)
        stretch = torch.linalg.eigvalsh(normalized.T @ normalized)[-1].sqrt()
        yield printed("largest stretch is 1", gap(stretch, 1.0))
        c = 10.0 ** uniform(generator, -2, 2)
        yield printed("W -> c W", gap(c * W / torch.linalg.matrix_norm(c * W, 2), normalized))
        rows = torch.linspace(1, 3, m)[:, None] * W
        yield fact("W -> scaled row by row: change", gap(rows / torch.linalg.matrix_norm(rows, 2), normalized))


@theorem("S4-SNnoise")
def _spectral_noise(generator: torch.Generator) -> Iterator[Check]:
    for widths in ((4, 8, 3), (6, 10, 10, 4)):
        weights = [3 * normal(generator, b, a) for a, b in pairwise(widths)]
        normed = [W / torch.linalg.matrix_norm(W, 2) for W in weights]
        shrunk = torch.stack([torch.linalg.matrix_norm(W, 2) for W in weights]).prod()
        x = normal(generator, 40, widths[0])
        outputs = _relu_net(weights, x)
        yield corrected("outputs are divided by the product of the norms", gap(shrunk * _relu_net(normed, x), outputs))
        for size in (0.1, 0.5, 2.0):
            noisy = x + size * normal(generator, 40, widths[0])
            pairs = ((_relu_net(net, noisy), _relu_net(net, x)) for net in (weights, normed))
            flips = [(there.argmax(1) != here.argmax(1)).sum() for there, here in pairs]
            yield corrected("as many decisions change", gap(flips[0], flips[1]))
            if size > 0.1:  # noise enough to change some
                yield printed("fewer decisions change under SN", broken(flips[1] < flips[0]))
        top = _relu_net(normed, x).topk(2, 1).values
        step = normal(generator, 40, widths[0])
        safe = 0.999 * (top[:, :1] - top[:, 1:]) / 2**0.5 * step / step.norm(dim=1, keepdim=True)
        kept = _relu_net(normed, x + safe).argmax(1) == _relu_net(normed, x).argmax(1)
        yield corrected("shorter noise than margin/sqrt(2) changes none", broken(bool(kept.all())))


@theorem("S4-conv")
def _convolution(generator: torch.Generator) -> Iterator[Check]:
    for B, channels, side in ((2, 1, 2), (4, 3, 3), (8, 2, 1), (5, 2, 4)):
        Y = functional.conv2d(normal(generator, B, 2, side + 2, side + 2), normal(generator, channels, 2, 3, 3))
        truth = functional.batch_norm(Y, None, None, training=True, eps=TINY)
        each = (Y - Y.mean(0)) / Y.std(0, correction=0)
        rows = Y.transpose(0, 1).reshape(channels, -1)
        pooled = standardize(rows)[0].reshape(channels, B, side, side).transpose(0, 1)
        yield printed("statistics at each position", gap(truth, each))
        yield corrected("statistics over batch and positions", gap(truth, pooled))


@theorem("S4-L2")
def _euler(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator, sizes=(3, 8), per_size=3):
        X = normal(generator, unit.m, 4)
        w = normal(generator, 4)
        loss = _loss_by_weights(unit, X)
        for factor in (-1.0, 0.0):
            yield printed(f"f(lambda x) = f(x) at lambda = {factor:g}", gap(loss(factor * w), loss(w)))
        for factor in (0.01, 0.5, 30.0):
            yield corrected("f(lambda x) = f(x) for lambda > 0", gap(loss(factor * w), loss(w)))
        slope = gradient(loss, w)
        size = w.norm() * slope.norm()
        yield corrected("x^T grad f = 0", gap(w @ slope, 0.0, size))
        yield conclusion("weights are orthogonal to their gradient", gap(w @ slope, 0.0, size))


@theorem("S4-L3a")
def _rows_or_blocks(generator: torch.Generator) -> Iterator[Check]:
    for m in (4, 8):
        W, X, mix = normal(generator, m, 5), normal(generator, 5, 6, 3), normal(generator, m, 6, 3)
        for name, normalize in _NORMALIZERS.items():
            slope = gradient(lambda W, f, X, mix: (torch.sin(f(W, X)) * mix).sum(), W, normalize, X, mix)
            inner = (W * slope).sum(1)
            size = W.norm() * slope.norm()
            blocks = inner.reshape({"LN": 1, "GN": 2}.get(name, m), -1).sum(1)
            yield printed(f"{name}: every row", gap(inner, 0.0, size))
            yield corrected(f"{name}: its blocks", gap(blocks, 0.0, size))
            grown = (W - 0.1 * slope).square().sum()
            expected = after_sgd_step(W.square().sum(), slope.square().sum(), 0.1)
            yield conclusion("the norm of all weights grows as Lemma 3 says", gap(grown, expected))


@theorem("S4-L3b")
def _growth(generator: torch.Generator) -> Iterator[Check]:
    W = normal(generator, 3, 5)
    for _ in range(12):
        X, target, rate = normal(generator, 5, 7), normal(generator, 3, 7), 10.0 ** uniform(generator, -2, 1)
        slope = gradient(row_loss, W, X, target)
        after = W - rate * slope
        law = after_sgd_step(W.square().sum(1), slope.square().sum(1), rate)
        yield printed("the law, row by row", gap(after.square().sum(1), torch.as_tensor(law)))
        yield printed("the norm increases", broken(bool((after.norm(dim=1) > W.norm(dim=1)).all())))
        decayed = (1 - rate * 0.05) * W - rate * slope
        yield fact("change of |W|^2 with weight decay 0.05", decayed.square().sum() - W.square().sum())
        W = after


@theorem("S4-adv")
def _attack(generator: torch.Generator) -> Iterator[Check]:
    for n, B in ((2, 4), (4, 12), (6, 9)):
        X, W, out = normal(generator, n, B), normal(generator, 5, n), normal(generator, 3, 5)
        labels = torch.randint(3, (B,), generator=generator)
        before = _attacked_loss(X, W, out, labels, 1.0)
        for c in (10.0, 1000.0):
            after = _attacked_loss(X, c * W, out, labels, 1.0)
            yield printed("loss under attack grows with the norm", broken(after > before * (1 + 1e-6)))
            yield corrected("loss under attack is the same", gap(after, before))
            slopes = [gradient(_network_loss, X, V, out, labels, 1.0) for V in (W, c * W)]
            yield corrected("input gradients are the same", gap(*slopes))
        louder = gradient(_network_loss, X, W, out, labels, 2.0).norm() / slopes[0].norm()
        yield fact("input gradient with gamma doubled, over before", louder)


@theorem("S4-5.4")
def _orthogonal(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        v, m = gradient(unit.normalized_loss, unit.y), unit.m
        size = abs(unit.gamma) / unit.s * unit.g.norm()
        yield printed("<dL/dy, yh> = 0", gap(v @ unit.yh, 0.0, size * m**0.5))
        product = (torch.eye(m) - 1 / m) @ (torch.eye(m) - torch.outer(unit.yh, unit.yh) / m)
        yield printed("the product of projections", gap(product, project(unit.yh), 1.0))
        yield printed("dL/dy", gap(v, unit.gamma / unit.s * (unit.g @ product), size))
        eps = 0.1 * float(unit.s) ** 2
        blurred = gradient(unit.normalized_loss, unit.y, eps)
        yield fact("cosine with eps = 0.1 s^2", blurred @ unit.yh / (blurred.norm() * m**0.5))


@theorem("S4-5.4b")
def _santurkar_term(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        size = unit.g.norm() * unit.m**0.5
        yield printed("<g, yh> = 0", gap(unit.g @ unit.yh, 0.0, size))
        slope = gradient(unit.loss_of_gamma, torch.tensor(unit.gamma))
        yield corrected("<g, yh> = dL/dgamma", gap(unit.g @ unit.yh, slope, size))
        v = gradient(unit.normalized_loss, unit.y)
        yield corrected("<dLhat/dy, yh> = 0", gap(v @ unit.yh, 0.0, size * abs(unit.gamma) / unit.s))


@theorem("S4-gauge")
def _gauge(generator: torch.Generator) -> Iterator[Check]:
    for n, B in ((1, 4), (3, 9), (5, 30)):
        X, target = normal(generator, n, B), normal(generator, B)
        w = torch.linalg.solve(covariance(X), (X - X.mean(1, keepdim=True)) @ target)
        gamma = standardize(w @ X)[0] @ target / B
        here = torch.cat([gamma[None], target.mean()[None]])
        for c in (1.0, 100.0):
            sigma = standardize(c * w @ X)[1]
            yield printed("gamma^2 is near sigma^2 at the minimum", gap(gamma**2, sigma**2))
            slope = gradient(_fit_loss, torch.cat([c * w, here]), X, target)
            yield corrected("the same minimum at every scale of W", gap(slope, 0.0, target.norm()))
            spread = torch.std(gamma * standardize(w @ X)[0], correction=0)
            yield corrected("gamma is the spread of the fitted output", gap(gamma, spread))


# -- what the numbers of its tables say --------------------------------------------------------------------------------

IMAGES = 32
# BN, BN+WD, GN, GN+WD, LN, LN+WD, WN, WN+WD, as printed; Table 2 has "4327" for the Gaussian noise of GN+WD
CLEAN = (
    (0.9687, 0.9375, 0.9687, 0.9375, 0.8711, 0.9687, 0.8679, 0.9062),
    (0.6875, 0.6563, 0.6257, 0.6063, 0.6358, 0.6279, 0.6147, 0.6072),
)
NOISE = (
    (0.8125, 0.7812, 0.9062, 0.8437, 0.8437, 0.8002, 0.7060, 0.7187),
    (0.4596, 0.4953, 0.4098, 4327, 0.3983, 0.4278, 0.3476, 0.3874),
)
NOISE_GAP = (
    (0.1562, 0.1563, 0.0625, 0.0938, 0.0274, 0.1685, 0.1619, 0.1875),
    (0.2279, 0.1610, 0.2159, 0.1736, 0.2375, 0.2001, 0.2671, 0.2198),
)
ATTACK = (
    (0.5380, 0.6000, 0.5793, 0.5815, 0.5253, 0.5333, 0.5031, 0.4687),
    (0.1397, 0.1558, 0.2366, 0.2813, 0.2354, 0.2531, 0.1647, 0.1965),
)
ATTACK_GAP = (
    (0.4307, 0.3375, 0.3894, 0.3560, 0.3458, 0.4354, 0.3648, 0.4375),
    (0.5478, 0.5005, 0.3891, 0.3250, 0.4004, 0.3748, 0.4500, 0.4077),
)
MISPRINTS = {("noise", 1, 3): 0.4327, ("attack gap", 1, 7): 0.4107}
ROUNDED = 1.1e-4  # four digits, differences of rounded numbers


@bibliographic("S4-tab")
def _differences(generator: torch.Generator) -> Iterator[Check]:
    right = 0
    for table in (0, 1):
        for column in range(8):
            for name, attacked, gaps in (("noise", NOISE, NOISE_GAP), ("attack", ATTACK, ATTACK_GAP)):
                clean, value, told = CLEAN[table][column], attacked[table][column], gaps[table][column]
                off = abs(clean - value - told)
                right += off < ROUNDED
                yield printed("clean minus attacked is the printed difference", off, tolerance=ROUNDED)
                value = MISPRINTS.get((name, table, column), value)
                told = MISPRINTS.get((f"{name} gap", table, column), told)
                yield corrected("the same with two entries corrected", abs(clean - value - told), tolerance=ROUNDED)
    small = sum(abs(value - round(IMAGES * value) / IMAGES) < ROUNDED for value in (*CLEAN[0], *NOISE[0]))
    yield corrected("Table 1: twelve accuracies are multiples of 1/32", broken(small == 12))
    for row in (CLEAN[0], NOISE[0]):
        for pair in zip(row[::2], row[1::2], strict=True):
            low, high = zip(*(_exact_interval(round(IMAGES * value)) for value in pair), strict=True)
            yield corrected("Table 1: intervals with and without decay overlap", broken(max(low) < min(high)))
    yield fact("Table 1: lower end of the interval of 31 of 32", _exact_interval(31)[0])
    yield conclusion("all but two of 32 entries agree", broken(right >= 30))
    yield fact("entries that agree", right)


def _draw_white(generator: torch.Generator, n: int, B: int) -> Tensor:
    """Draw `[n, B]` inputs of mean 0 and covariance exactly the identity."""
    X = normal(generator, B, n)
    return B**0.5 * torch.linalg.qr(X - X.mean(0))[0].T


def _centred_unit_rows(W: Tensor) -> Tensor:
    centred = W - W.mean(1, keepdim=True)
    return centred / centred.norm(dim=1, keepdim=True)


def _loss_by_weights(unit: Unit, X: Tensor) -> Loss:
    return lambda w: unit.normalized_loss(X @ w)


def _fit_loss(theta: Tensor, X: Tensor, target: Tensor) -> Tensor:
    return (theta[-2] * standardize(theta[:-2] @ X)[0] + theta[-1] - target).square().sum() / 2


def _network_loss(X: Tensor, W: Tensor, out: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """Return the cross entropy of linear, BN, tanh, linear on inputs `[n, B]`."""
    return functional.cross_entropy((out @ torch.tanh(gamma * standardize(W @ X)[0])).T, labels)


def _attacked_loss(X: Tensor, W: Tensor, out: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """Return the loss after three gradient-sign steps of 0.05 on the inputs."""
    moved = X
    for _ in range(3):
        moved = moved + 0.05 * gradient(_network_loss, moved, W, out, labels, gamma).sign()
    return _network_loss(moved, W, out, labels, gamma)


def _convolve(W: Tensor, X: Tensor) -> Tensor:
    """Apply a 1x1 convolution: weights `[m, n]`, inputs `[n, B, positions]`, outputs `[m, B, positions]`."""
    return torch.einsum("mn,nbp->mbp", W, X)


def _standardize_over(Y: Tensor, *axes: int) -> Tensor:
    centred = Y - Y.mean(axes, keepdim=True)
    return centred / centred.square().mean(axes, keepdim=True).sqrt()


_NORMALIZERS: dict[str, Loss] = {
    "BN": lambda W, X: _standardize_over(_convolve(W, X), 1, 2),
    "LN": lambda W, X: _standardize_over(_convolve(W, X), 0, 2),
    "IN": lambda W, X: _standardize_over(_convolve(W, X), 2),
    "GN": lambda W, X: _standardize_over(_convolve(W, X).unflatten(0, (2, -1)), 1, 3).flatten(0, 1),
    "WN": lambda W, X: _convolve(W / W.norm(dim=1, keepdim=True), X),
    "CWN": lambda W, X: _convolve(_centred_unit_rows(W), X),
    "WS": lambda W, X: _convolve(W.shape[1] ** 0.5 * _centred_unit_rows(W), X),
}


def _relu_net(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    for W in weights[:-1]:
        x = torch.relu(x @ W.T)
    return x @ weights[-1].T


def _exact_interval(right: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a share, by Clopper and Pearson, from `right` of 32 images."""
    low = betaincinv(right, IMAGES - right + 1, 0.025) if right else 0.0
    high = betaincinv(right + 1, IMAGES - right, 0.975) if right < IMAGES else 1.0
    return float(low), float(high)
