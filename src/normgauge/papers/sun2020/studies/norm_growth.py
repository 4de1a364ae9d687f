"""Fig. 3: norms of normalized weights over training, with and without weight decay, against law and equilibrium."""

import math

import torch
from torch import nn

from normgauge.errors import NonFiniteError
from normgauge.lab.models.normalized import direction_weight, joint_norm, joint_parameters, normalized_layers
from normgauge.lab.runs.evaluate import evaluate
from normgauge.papers.language import Record, Spec, build, fit, register
from normgauge.theory.norm_growth import after_sgd_step
from normgauge.theory.weight_dynamics import sgd_equilibrium

WATCHED = 1  # the second normalized layer: the first of the first block, as in the paper


@register("norm-growth")
def run(spec: Spec, record: Record) -> None:
    """Train with SGD without momentum (for which the law is exact) and follow one layer's weights at every step."""
    (network, dataset), steps, rate = build(spec), int(spec["steps"]), float(spec["lr"])
    decay = float(spec["decay"]) if spec["decayed"] else 0.0
    part = normalized_layers(network)[WATCHED]
    weight, together = direction_weight(part), joint_parameters(part)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, weight_decay=decay)
    norms: list[float] = []
    products: list[float] = []
    law = joint_norm(together) ** 2

    def watch(step: int, _: nn.Module) -> None:
        norms.append(joint_norm([weight]))
        if not math.isfinite(norms[-1]):
            raise NonFiniteError(f"norm-growth: the weights were not finite at step {step}")
        if step % max(1, steps // 50) == 0 or step == steps:
            record(step, "watched_norm", norms[-1])

    def follow_law(step: int, loss: float) -> None:
        nonlocal law
        slope = joint_norm([p.grad for p in together if p.grad is not None])
        law = float(after_sgd_step((1 - rate * decay) ** 2 * law, slope**2, rate))
        products.append(slope**2 * joint_norm(together) ** 2)

    looks = {"at": range(steps + 1), "watch": watch, "on_gradient": follow_law}
    fit(spec, network, dataset, optimizer, ceiling=math.inf, **looks).whole()
    third = max(1, steps // 3)
    record(steps, "norm_growth", norms[-1] / norms[0] - 1)
    record(steps, "late_norm_growth", norms[-1] / norms[-1 - third] - 1)
    record(steps, "law_error", abs(math.sqrt(law) / joint_norm(together) - 1))
    if decay:
        record(steps, "equilibrium", sgd_equilibrium(rate, decay, sum(products[-third:]) / third).norm)
        record(steps, "joint_norm", joint_norm(together))
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
