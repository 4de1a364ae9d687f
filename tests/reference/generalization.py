"""Loops and dense matrices: the naive twins of partition, terms, norms, paths, folding and stability."""

import itertools
import math

import numpy as np
import torch


def cells_by_loop(points, labels, centers, radii):
    """Return {(centre, label): indices}; -1 for samples outside the ball of their nearest centre."""
    found = {}
    for i, point in enumerate(points):
        far = [math.dist(point.tolist(), center.tolist()) for center in centers]
        nearest = min(range(len(far)), key=far.__getitem__)
        key = (nearest, int(labels[i])) if far[nearest] <= float(radii[nearest]) else (-1, -1)
        found.setdefault(key, []).append(i)
    return found


def slack_by_hand(occupied, cells, samples, delta, largest):
    """Return g(D, delta) as S2 prints it."""
    share = occupied * math.log(2 * cells / delta) / samples
    return largest * (math.sqrt(2) + 1) * math.sqrt(share) + 2 * largest * share


def theorem_20_by_loop(losses, groups, distances, slopes, cells, delta, largest):
    """Return the right-hand side, each cell's term at most its share of C; the rest (-1) counts with C."""
    m = len(losses)
    total = sum(losses) / m
    for key, members in groups.items():
        rise = largest if key[0] < 0 else min(distances[key] * slopes[key], largest)
        total += len(members) / m * rise
    return total + slack_by_hand(len(groups), cells, m, delta, largest)


def transport_by_loop(shares, distances, slopes, cells, samples, delta):
    """Return gamma(L) + sqrt(N/m)."""
    mean = worst = 0.0
    for share, distance, slope in zip(shares, distances, slopes, strict=True):
        mean += share * distance * max(1.0, slope)
        worst = max(worst, distance * slope)
    return mean + worst * math.sqrt(math.log(4 / delta) / samples) + math.sqrt(cells / samples)


def noise_tradeoff(sharpness, samples):
    """Return the least of `sharpness mu^2/2 + ln(m)/(mu sqrt(m))` over a fine grid of mu."""
    mu = np.geomspace(1e-4, 1e4, 400_001)
    return float((sharpness * mu**2 / 2 + math.log(samples) / (mu * math.sqrt(samples))).min())


def rows_by_loop(sums, largest, samples):
    """Return (1/N) sum_l |W_l|_{2,1}^2 prod_{j != l} |W_j|_{2,inf}^2."""
    total = 0.0
    for i, value in enumerate(sums):
        product = value**2
        for j, top in enumerate(largest):
            product *= top**2 if j != i else 1.0
        total += product
    return total / samples


def path_norm(weights, biases):
    """Return the root of the sum over all paths of squared products; a path may start at a bias."""
    total = 0.0
    sizes = [weights[0].shape[1], *(w.shape[0] for w in weights)]
    for start in range(len(weights)):
        for units in itertools.product(*(range(n) for n in sizes[start:])):
            product = 1.0
            for depth, (a, b) in enumerate(itertools.pairwise(units)):
                product *= float(weights[start + depth][b, a]) ** 2
            total += product if start == 0 else 0.0
        for units in itertools.product(*(range(n) for n in sizes[start + 1 :])):
            product = float(biases[start][units[0]]) ** 2
            for depth, (a, b) in enumerate(itertools.pairwise(units)):
                product *= float(weights[start + 1 + depth][b, a]) ** 2
            total += product
    return math.sqrt(total)


def dense_of(layer, shape):
    """Return the matrix of a layer without its bias, column by column."""
    zero = torch.zeros(1, *shape)
    offset = layer(zero)
    columns = []
    for i in range(zero.numel()):
        unit = torch.zeros(zero.numel())
        unit[i] = 1.0
        columns.append((layer(unit.reshape(1, *shape)) - offset).flatten())
    return torch.stack(columns, dim=1).detach()


def spectral_complexity(matrices):
    """Return prod s_i (sum (b_i/s_i)^(2/3))^(3/2), b_i the sums of row norms."""
    s = [np.linalg.svd(m.numpy(), compute_uv=False)[0] for m in matrices]
    b = [sum(math.sqrt(float((row**2).sum())) for row in m) for m in matrices]
    return math.prod(s) * sum((y / x) ** (2 / 3) for x, y in zip(s, b, strict=True)) ** 1.5


def ridge(inputs, targets, penalty):
    """Return the weights that minimize the mean squared error plus penalty |w|^2."""
    m, n = inputs.shape
    return torch.linalg.solve(inputs.T @ inputs / m + penalty * torch.eye(n), inputs.T @ targets / m)


def printed_product(layers):
    """Return prod |W_k| sigma^-K of S2 Corollary 22 for (Linear, BatchNorm or None) pairs, gains included."""
    product, norms = 1.0, []
    for linear, norm in layers:
        product *= float(np.linalg.svd(linear.weight.detach().numpy(), compute_uv=False)[0])
        if norm is not None:
            inverse = [1 / math.sqrt(float(v) + norm.eps) for v in norm.running_var]
            norms.append(math.sqrt(sum(v * v for v in inverse)) * float(norm.weight.detach().abs().max()))
    return product * max(norms, default=1.0) ** len(norms)


def noisy_accuracy(model, inputs, labels, sigma, seed, draws):
    """Return the mean accuracy under noise of size sigma on every parameter, draw by draw."""
    source = torch.Generator().manual_seed(seed)
    origin = [p.detach().clone() for p in model.parameters()]
    total = 0.0
    for _ in range(draws):
        with torch.no_grad():
            for p, o in zip(model.parameters(), origin, strict=True):
                p.copy_(o + sigma * torch.randn(o.shape, generator=source))
            total += float((model(inputs).argmax(1) == labels).double().mean())
    with torch.no_grad():
        for p, o in zip(model.parameters(), origin, strict=True):
            p.copy_(o)
    return total / draws
