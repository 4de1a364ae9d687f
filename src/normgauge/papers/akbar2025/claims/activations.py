"""S0 (Akbar 2025), what BN does to the activations: cues, dead units, explosion with depth; sections 5.1, 7.2."""

from collections.abc import Iterator

import torch
from torch import Tensor

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances.draws import normal, uniform
from normgauge.theory.batchnorm_calculus import standardize

WIDTH, NETWORKS = 48, 4


@theorem("S0-cue")
def _magnitude_cue(generator: torch.Generator) -> Iterator[Check]:
    for m in (8, 20, 60):
        label = torch.arange(m) % 2 == 0
        x = torch.where(label, 3.0, 0.5) + uniform(generator, 0.1, 0.4) * normal(generator, m)
        unit, offset = 10.0 ** uniform(generator, -2, 2), uniform(generator, -5, 5)
        zh = standardize(unit * x + offset)[0]
        before, after = _separation(x, label), _separation(zh, label)
        yield printed("the difference between the classes is removed", float(after / before))
        yield corrected("it is what it was", gap(after, before))
        yield corrected("and so is the order of the samples", broken(bool((x.argsort() == zh.argsort()).all())))
        alone = [standardize(unit * x[part] + offset)[0].mean() for part in (label, ~label)]
        yield corrected("batches of one class: the means agree", gap(alone[0], alone[1], 1.0))
        yield fact("distance of the classes over the spread within, standardized", after)


@theorem("S0-dying")
def _dying_units(generator: torch.Generator) -> Iterator[Check]:
    for m in (2, 5, 16):
        z, gamma = normal(generator, m) - 1e3, uniform(generator, 0.5, 2)
        zh = standardize(z)[0]
        outlier = standardize(torch.eye(m)[0])[0]  # the largest value a standardized sample can have
        bound = gamma * (m - 1) ** 0.5
        yield corrected("no sample is above sqrt(m - 1)", gap(outlier.max(), (m - 1) ** 0.5))
        for beta in (0.0, -1.001 * bound):
            a = gamma * zh + beta
            yield printed("the inputs have mean zero", gap(a.mean(), 0.0, gamma))
            yield corrected("their mean is beta", gap(a.mean(), beta, 1.0))
        yield corrected("below the bound the unit is off", broken(not bool((a > 0).any())))
        yield corrected("and on the worst batch too", broken(not bool((gamma * outlier + beta > 0).any())))
        yield conclusion("with beta = 0 the bias does not switch it off", broken(bool((zh > 0).any() & (zh < 0).any())))


@theorem("S0-explode")
def _explosion(generator: torch.Generator) -> Iterator[Check]:
    seed = int(torch.randint(2**31, (), generator=generator))
    plain = {c: _growth_with_depth(seed, c, normalized=False) for c in (1.0, 3.0)}
    normed = {c: _growth_with_depth(seed, c, normalized=True) for c in (1.0, 3.0)}
    yield printed("at He's weights gradients grow less with BN", broken(normed[1.0] < plain[1.0]))
    yield corrected("c times: c per layer without BN", gap(plain[3.0], 3 * plain[1.0]))
    yield corrected("with BN the rate does not depend on c", gap(normed[3.0], normed[1.0]))
    yield conclusion("at three times He's weights they grow less with BN", broken(normed[3.0] < plain[3.0]))
    for name, rates in (("without", plain), ("with", normed)):
        yield fact(f"growth per layer at He's weights, {name} BN", rates[1.0])


def _separation(x: Tensor, label: Tensor) -> Tensor:
    spread = ((x[label].var(correction=0) + x[~label].var(correction=0)) / 2).sqrt()
    return (x[label].mean() - x[~label].mean()).abs() / spread


def _growth_with_depth(seed: int, c: float, normalized: bool) -> float:
    """Return the growth per layer, from depth 6 to 12, of the first layer's gradient norm (geometric mean)."""
    logs = []
    for depth in (6, 12):
        draws = torch.Generator().manual_seed(seed)  # the same networks for every c
        for _ in range(NETWORKS):
            layers = [c * (2 / WIDTH) ** 0.5 * normal(draws, WIDTH, WIDTH) for _ in range(depth)]
            h, first = normal(draws, WIDTH, 16), layers[0].requires_grad_()
            for W in layers:
                h = torch.relu(standardize(W @ h)[0] if normalized else W @ h)
            slope = torch.autograd.grad((h * normal(draws, WIDTH, 16)).sum(), first)[0]
            logs.append(float(slope.norm().log()))
    return float(torch.tensor((sum(logs[NETWORKS:]) - sum(logs[:NETWORKS])) / (6 * NETWORKS)).exp())
