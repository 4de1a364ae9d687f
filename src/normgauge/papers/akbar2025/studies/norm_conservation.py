"""S0 Lemma 5.1: normalized weights keep their norm under gradient flow; finite steps obey an exact law instead."""

import math

import torch
from torch import Tensor, nn

from normgauge.errors import NonFiniteError
from normgauge.lab.models.normalized import normalized_layers
from normgauge.papers.language import Record, Spec, fit, register
from normgauge.papers.networks import dataset, relu_network
from normgauge.theory.norm_growth import after_sgd_step


@register("norm-conservation")
def run(spec: Spec, record: Record) -> None:
    """Train by SGD and follow, block by block, the squared norm and what the law makes of the gradients."""
    seed, steps, rate, decay = int(spec["seed"]), int(spec["steps"]), float(spec["lr"]), float(spec["decay"])
    digits = dataset(spec["data"])
    inputs, targets = (part[: int(spec["samples"])] for part in digits.train)
    inputs = inputs.double()
    network = relu_network((math.prod(digits.shape), 32, 32, digits.classes), spec["norm"], seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, weight_decay=decay)
    first = now = law = _squares(network, spec["norm"])
    change = 0.0
    stride = max(1, steps // 30)

    def watch(step: int, network: nn.Module) -> None:
        nonlocal now, change
        now = _squares(network, spec["norm"])
        change = max(change, float((now / first).sqrt().sub(1).abs().max()))
        if not math.isfinite(change):
            raise NonFiniteError(f"norm-conservation: the weights were not finite at step {step}")
        if step % stride == 0 or step == steps:
            record(step, "relative_norm", float((now / first).sqrt().mean()))
            record(step, "law_norm", float((law / first).sqrt().mean()))

    def follow_law(step: int, loss: float) -> None:
        nonlocal law
        slopes = _squares(network, spec["norm"], gradient=True)
        law = torch.as_tensor(after_sgd_step((1 - rate * decay) ** 2 * law, slopes, rate))

    looks = {"at": range(steps + 1), "watch": watch, "on_gradient": follow_law, "ceiling": math.inf}
    fit(spec, network, (inputs, targets), optimizer, loss=nn.functional.cross_entropy, **looks).whole()
    record(steps, "norm_change", change)
    record(steps, "law_error", float((law.sqrt() / now.sqrt()).sub(1).abs().max()))


def _squares(network: nn.Module, norm: str, *, gradient: bool = False) -> Tensor:
    """Return the squared norm of every block the normalizer leaves free (rows without one), or of its gradient."""
    squares = []
    for layer in normalized_layers(network):
        own = dict(layer.layer.named_parameters())
        values = {name: torch.as_tensor(value.grad) if gradient else value.detach() for name, value in own.items()}
        rows = values["parametrizations.weight.original1" if norm == "weight" else "weight"].square().sum(1)
        squares.append((rows.sum() + values["bias"].square().sum()).reshape(1) if norm == "layer" else rows)
    return torch.cat(squares)
