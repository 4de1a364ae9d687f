"""Which networks the mean-field theory of batch normalization speaks of."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.network import Made, Network, replaced
from normgauge.network import Step as NetworkStep
from normgauge.objective import Objective
from normgauge.theory import mean_field

_UNIT = 1e-6  # gains within this of 1 and shifts of 0 are those of the theory
COVERED = (
    "the theory here covers plain chains Linear, BatchNorm1d (gain 1, shift 0, statistics of the batch), activation"
)


def why_not_covered(objective: Objective, activation: str) -> str:
    """Return why the prediction does not speak of the objective's network; empty where it does.

    Asked of the recorded steps up to the last Linear: each reads the one before and nothing else, and they are Linear,
    BatchNorm1d and the activation in turn. Activations are told by their values. That the weights are independent, of
    mean zero and many, cannot be asked of one network: it is so at initialization.

    Cost: one forward pass.
    """
    steps = Network.of(objective).record().steps
    last = max((step.number for step in steps if isinstance(step.module, nn.Linear)), default=-1)
    letters, makers = "", {-1}
    for step in steps[: last + 1]:
        if len(step.reads) != 1 or step.reads[0] not in makers:
            return f"{step.name!r} reads more than the layer before it (a skip or a branch)"
        letter = _letter(step, objective, activation)
        if len(letter) > 1:
            return letter
        letters += letter
        makers = {step.number} if letter else makers | {step.number}  # an identity may give its input back as it came
    phi = "" if activation == "identity" else "A"
    if not re.fullmatch(f"(B?{phi}|B|A)?L(B{phi}L)+", letters):
        return "its layers are not Linear, BatchNorm1d and the activation in turn"
    return ""


def _letter(step: NetworkStep, objective: Objective, activation: str) -> str:
    """Return L, B, A or nothing (an identity) for a step, or a sentence on what else it is."""
    layer = step.module
    if isinstance(layer, nn.Linear):
        return "L" if len(step.inputs[0]) == 2 else f"{step.name!r} acts on more than one vector per sample"
    if isinstance(layer, nn.BatchNorm1d):
        if objective.mode != "train" and layer.track_running_stats:
            return f"{step.name!r} uses stored statistics"
        pairs = ((layer.weight, 1.0), (layer.bias, 0.0))
        if any(value is not None and float((value.detach() - unit).abs().max()) > _UNIT for value, unit in pairs):
            return f"{step.name!r} has gains other than 1 or shifts other than 0"
        return "B"
    y = torch.linspace(-4.0, 4.0, 41, dtype=torch.float64)[:, None]
    phi = torch.from_numpy(mean_field.activation_values(activation, y.numpy()))
    values = _values(step, y)
    for letter, wanted in (("", y), ("A", phi)):
        if values is not None and values.shape == y.shape and torch.allclose(values.double(), wanted, atol=1e-5):
            return letter
    return f"{step.name!r} ({step.kind}) is not the activation {activation}"


def _values(step: NetworkStep, y: Tensor) -> Any:
    args, kwargs = replaced((step.args, step.kwargs), Made, lambda _: y)
    try:
        with torch.no_grad():
            return step.function(*args, **{**kwargs, **({"inplace": False} if "inplace" in kwargs else {})})
    except (RuntimeError, ValueError, TypeError, IndexError):  # a layer that wants other shapes acts not by entry
        return None
