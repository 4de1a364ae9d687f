"""Which law of weight dynamics an optimizer obeys, read from its class and groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from normgauge.theory import weight_dynamics as theory
from normgauge.theory.weight_dynamics import Equilibrium


@dataclass(frozen=True)
class Law:
    """How a scale-invariant block moves under one parameter group.

    Attributes:
        name: of the law.
        group: the options of the optimizer for this block.
        power: the power of the norm that relaxes exponentially.
        sentence: what the law says.
    """

    name: str
    group: dict[str, Any]
    power: float
    sentence: str

    @property
    def rate(self) -> float:
        """The learning rate."""
        return float(self.group.get("lr", float("nan")))

    @property
    def decay(self) -> float:
        """The weight decay."""
        return float(self.group.get("weight_decay", 0.0))

    def effective_rate(self, norm: float) -> float:
        """Return the rate for the direction `w / |w|`."""
        if self.name == "sgd":
            momentum, dampening = float(self.group["momentum"]), float(self.group["dampening"])
            return theory.sgd_effective_rate(self.rate, norm, momentum, dampening if momentum else 0.0)
        if self.name in ("adamw", "adam_l2"):
            return self.rate / norm
        return self.rate / norm**2 if self.name in ("sphere", "gradient descent") else float("nan")

    def equilibrium(self, size: int, G: float, norm: float) -> Equilibrium:
        """Return where the norm is heading."""
        if self.name == "sgd":
            momentum, dampening = float(self.group["momentum"]), float(self.group["dampening"])
            return theory.sgd_equilibrium(self.rate, self.decay, G, momentum, dampening if momentum else 0.0)
        if self.name == "adamw":
            return theory.adamw_equilibrium(self.rate, self.decay, size, float(self.group["betas"][0]))
        if self.name == "adam_l2":
            return theory.adam_l2_equilibrium(self.rate, self.decay, size, G, float(self.group["betas"][0]))
        if self.name == "sphere":
            return Equilibrium(norm, float("nan"), 0.0)
        return Equilibrium(float("nan"), float("nan"), float("nan"))


def law_of(optimizer: torch.optim.Optimizer | None, group: dict[str, Any] | None) -> Law:
    """Return the law; an optimizer that is not known has none, and says so."""
    if optimizer is None:
        return Law("gradient flow", {}, 4.0, "no optimizer given: under gradient flow the norm stays")
    if group is None:
        return Law("frozen", {}, 4.0, "not among the optimizer's parameters: it does not move")
    if "radius" in group and group.get("geometry") != "euclidean":
        return Law("sphere", group, 4.0, "on a sphere: the norm is fixed")
    if isinstance(optimizer, torch.optim.AdamW) or (
        isinstance(optimizer, torch.optim.Adam) and group.get("decoupled_weight_decay")
    ):
        return Law("adamw", group, 2.0, "AdamW: |w|^2 settles at lr size / (2 weight_decay), whatever the gradients")
    if isinstance(optimizer, torch.optim.Adam):
        return Law("adam_l2", group, 3.0, "Adam with L2: |w|^3 settles at lr sqrt(size G) / (2 weight_decay)")
    if isinstance(optimizer, torch.optim.SGD):
        return Law("sgd", group, 4.0, "SGD: |w|^4 settles at lr G / (2 weight_decay (1 - momentum))")
    return Law("unknown", group, 4.0, f"no law is known for {type(optimizer).__name__}; the next norm is exact")
