"""S0 Experiment 2: loss, gradient norm and curvature of a 3-layer network of width 10, with and without BN."""

import itertools
import math
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor, nn

from normgauge.errors import NonFiniteError
from normgauge.measure.curvature.spectrum import quotient_spectrum
from normgauge.objective import Objective
from normgauge.papers.language import Record, Spec, fit, register
from normgauge.papers.networks import relu_network
from normgauge.rng import generator
from normgauge.symmetry import Symmetries, symmetries

CONVERGED = 0.1  # of the targets' variance, which is 1


@register("conditioning")
def run(spec: Spec, record: Record) -> None:
    """Train by full-batch descent, then take the spectrum of the curvature, plain and with symmetries divided out."""
    seed, steps = int(spec["seed"]), int(spec["steps"])
    width = int(spec["width"])
    inputs, targets = _regression(seed, int(spec["samples"]))
    network = relu_network((10, width, width, 1), spec["norm"], seed, bias=spec["norm"] == "none")
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    losses: list[float] = []
    slopes: list[float] = []

    def look(step: int, loss: float) -> None:
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in network.parameters() if p.grad is not None))
        if not math.isfinite(norm) or loss > 100:
            return
        losses.append(loss)
        slopes.append(norm)
        if step % max(1, steps // 100) == 0:
            record(step, "loss", loss)
            record(step, "gradient_norm", norm)

    stop = {"until": lambda step, _: len(losses) < step, "ceiling": math.inf}
    fit(spec, network, (inputs, targets), optimizer, batch=None, loss=nn.functional.mse_loss, on_gradient=look, **stop)
    _record_course(record, losses, slopes, steps)
    if len(losses) < steps:
        raise NonFiniteError(f"conditioning: the loss left every range at step {len(losses)}")
    record(steps, "train_loss", losses[-1])
    record(steps, "gradient_norm", slopes[-1])
    if spec["rate"] != "shared":
        objective = Objective(network, nn.functional.mse_loss, (inputs, targets), mode="train")
        _record_curvature(record, steps, objective, float(spec["lr"]))


def _regression(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    """Return Gaussian inputs and sin(a.x) with a tenth of noise, standardized."""
    source = generator(seed)
    inputs = torch.randn(samples, 10, generator=source, dtype=torch.float64)
    direction = torch.randn(10, generator=source, dtype=torch.float64)
    noise = torch.randn(samples, generator=source, dtype=torch.float64)
    raw = torch.sin(inputs @ direction / direction.norm()) + 0.1 * noise
    return inputs, ((raw - raw.mean()) / raw.std(unbiased=False))[:, None]


def _record_course(record: Record, losses: Sequence[float], slopes: Sequence[float], steps: int) -> None:
    reached = next((step for step, loss in enumerate(losses) if loss <= CONVERGED), None)
    record(steps, "steps_to_converge", steps if reached is None else reached)  # the budget where it never got there
    rises = sum(later > earlier for earlier, later in itertools.pairwise(losses))
    record(steps, "rises", rises / max(len(losses) - 1, 1))
    record(steps, "spike", max(slopes) / median(slopes) if slopes else math.nan)


def _record_curvature(record: Record, steps: int, objective: Objective, rate: float) -> None:
    model_symmetries = symmetries(objective)
    values = _eigenvalues_off_symmetries(objective, model_symmetries)
    sizes = values.abs()
    sizes = sizes[sizes > 1e-12 * sizes.max()]  # dead units have no curvature at all
    record(steps, "lambda_max", float(values.max()))
    record(steps, "edge", float(values.max()) * rate / 2)
    record(steps, "condition_number", float(sizes.max() / sizes.min()))
    record(steps, "bulk_condition", float(sizes.max() / sizes.median()))
    record(steps, "negative_share", float((values < -1e-12 * sizes.max()).double().mean()))
    for rank, value in enumerate(sorted(values.tolist(), reverse=True)):
        record(steps, "eigenvalue", value, layer=str(rank))
    quotient = quotient_spectrum(objective, symmetries=model_symmetries, top=1)
    record(steps, "quotient_lambda_max", quotient.sharpness)
    record(steps, "quotient_condition", math.nan if quotient.condition is None else quotient.condition)


def _eigenvalues_off_symmetries(objective: Objective, model_symmetries: Symmetries) -> Tensor:
    """Return the eigenvalues of the Hessian between directions orthogonal to the symmetries: without zero modes."""
    point = objective.flatten(objective.parameters)
    count = sum(map(len, model_symmetries.families)) + 5  # a few more random vectors than generators span them
    draws = torch.randn(count, len(point), generator=generator(0), dtype=point.dtype)
    moved = torch.stack([row - model_symmetries.project(row, point) for row in draws])
    _, sizes, vectors = torch.linalg.svd(moved)  # the rows past the rank are the complement of the symmetries
    basis = vectors[int((sizes > 1e-9 * sizes[0]).sum()) :].T
    return torch.linalg.eigvalsh(basis.T @ objective.hessian().matmat(basis))
