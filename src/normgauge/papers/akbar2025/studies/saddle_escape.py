"""S0 sec. 5.1: steps to leave a constructed saddle, with and without BN, under batch noise and matched noise."""

import math

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.lab.runs.train import Batches
from normgauge.papers.language import Record, Spec, register
from normgauge.rng import generator

INPUTS, HIDDEN, SAMPLES = 10, 8, 512
OFFSET = 1e-6  # how far from the saddle all runs start, in a random direction
LEFT = 0.95  # left once the loss is below this share of the saddle's
EPS = 1e-5


class Saddle:
    """f(x) = v.tanh(n(W x)) at v = 0, with targets orthogonal to every hidden unit: a strict saddle of full batch.

    There the gradient is zero in v (orthogonality) and in W (v = 0); the mixed second derivative is not, so the loss
    falls to second order along a joint direction of W and v. n is batch normalization or nothing.
    """

    def __init__(self, norm: str, seed: int) -> None:
        source = generator(seed)
        self.normalized = norm == "batch"
        self.inputs = torch.randn(SAMPLES, INPUTS, generator=source, dtype=torch.float64)
        self.weight = torch.randn(HIDDEN, INPUTS, generator=source, dtype=torch.float64) / math.sqrt(INPUTS)
        pair = torch.randn(2, INPUTS, generator=source, dtype=torch.float64) / math.sqrt(INPUTS)
        raw = torch.tanh(2 * self.inputs @ pair.T).sum(1)  # what a few hidden units could learn
        hidden = self.hidden(self.weight, torch.arange(SAMPLES), whole=False)
        fitted = hidden @ torch.linalg.lstsq(hidden, raw[:, None]).solution
        rest = raw - fitted[:, 0]
        self.targets = rest / rest.square().mean().sqrt()

    def hidden(self, weight: Tensor, rows: Tensor, *, whole: bool) -> Tensor:
        """Return the hidden units of some rows, normalized by their own statistics or by those of all samples."""
        scores = self.inputs[rows] @ weight.T
        if self.normalized:
            other = self.inputs @ weight.T if whole else scores
            scores = (scores - other.mean(0)) / (other.var(0, unbiased=False) + EPS).sqrt()
        return torch.tanh(scores)

    def loss(self, weight: Tensor, output: Tensor, rows: Tensor, *, whole: bool = False) -> Tensor:
        """Return half the mean squared error on some rows."""
        return 0.5 * (self.hidden(weight, rows, whole=whole) @ output - self.targets[rows]).square().mean()


@register("saddle-escape")
def run(spec: Spec, record: Record) -> None:
    """Descend from beside the saddle under one kind of noise and count the steps until the loss has fallen by 5 %."""
    seed, steps, noise = int(spec["seed"]), int(spec["steps"]), spec["noise"]
    saddle = Saddle(spec["norm"], seed)
    source = generator(7000 + seed)
    weight, output = (
        value + OFFSET * torch.randn(value.shape, generator=source, dtype=torch.float64)
        for value in (saddle.weight, torch.zeros(HIDDEN, dtype=torch.float64))
    )
    everything = torch.arange(SAMPLES)
    bottom = most_negative(saddle)
    record(0, "lambda_min", bottom)
    first = float(saddle.loss(weight, output, everything))
    batches = Batches(SAMPLES, int(spec["batch"]), seed)
    sizes = _noise_sizes(saddle, int(spec["batch"]))
    entries = zip(sizes, (weight.numel(), HIDDEN), strict=True)
    record(0, "noise_size", math.sqrt(sum(size**2 * count for size, count in entries)))
    left = steps
    for step in range(steps + 1):
        now = float(saddle.loss(weight, output, everything))
        if not math.isfinite(now):
            raise NonFiniteError(f"saddle-escape: the loss was not finite at step {step}")
        if step % max(1, steps // 60) == 0:
            record(step, "loss", now / first)
        if now <= LEFT * first:
            left = step
            break
        rows = next(batches) if noise in ("sampling", "batch") else everything
        if noise == "independent":
            rows = torch.randperm(SAMPLES, generator=source)[: int(spec["batch"])]
        slopes = _gradient(saddle, weight, output, rows, whole=noise == "sampling")
        for value, slope, size in zip((weight, output), slopes, sizes, strict=True):
            value -= float(spec["lr"]) * slope
            if noise == "gradient":
                value -= float(spec["lr"]) * size * torch.randn(value.shape, generator=source, dtype=torch.float64)
    record(left, "steps_to_escape", max(left, 1))  # the budget where it never left
    record(left, "escaped", float(left < steps))


def _gradient(saddle: Saddle, weight: Tensor, output: Tensor, rows: Tensor, *, whole: bool) -> tuple[Tensor, ...]:
    leaves = [value.detach().requires_grad_() for value in (weight, output)]
    return torch.autograd.grad(saddle.loss(leaves[0], leaves[1], rows, whole=whole), leaves)


def _noise_sizes(saddle: Saddle, batch: int, draws: int = 64) -> list[float]:
    """Return the root mean square of a mini-batch gradient's entries near the saddle, for W and for v.

    Near, not at it: there v = 0 and W has no gradient. The distance is that of the start.
    """
    source = generator(99)
    output = OFFSET * torch.randn(HIDDEN, generator=source, dtype=torch.float64)
    totals = [0.0, 0.0]
    for _ in range(draws):
        rows = torch.randperm(SAMPLES, generator=source)[:batch]
        for index, slope in enumerate(_gradient(saddle, saddle.weight, output, rows, whole=False)):
            totals[index] += float(slope.square().mean()) / draws
    return [math.sqrt(total) for total in totals]


def most_negative(saddle: Saddle) -> float:
    """Return the smallest eigenvalue of the full-batch Hessian at the saddle."""
    point = torch.cat([saddle.weight.reshape(-1), torch.zeros(HIDDEN, dtype=torch.float64)])

    def flat(values: Tensor) -> Tensor:
        weight = values[: saddle.weight.numel()].reshape(saddle.weight.shape)
        return saddle.loss(weight, values[saddle.weight.numel() :], torch.arange(SAMPLES))

    hessian = torch.autograd.functional.hessian(flat, point)
    return float(torch.linalg.eigvalsh(hessian)[0])
