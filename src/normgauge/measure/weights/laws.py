"""Which law of weight dynamics an optimizer obeys, read from its class and groups."""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from normgauge.theory import weight_dynamics as theory
from normgauge.theory.weight_dynamics import Equilibrium

_HYPERBALL = re.compile("Hyperball|(Adam|Muon)H$")  # as their authors and Emerging-Optimizers call these classes


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
        return float(self.group.get("lr", math.nan))

    @property
    def decay(self) -> float:
        """The weight decay."""
        return float(self.group.get("weight_decay", 0.0))

    @property
    def momentum(self) -> float:
        """The momentum, beta1 for Adam."""
        return float(self.group["betas"][0] if "betas" in self.group else self.group.get("momentum", 0.0))

    @property
    def _passed(self) -> float:
        """The share of a gradient that enters SGD's buffer."""
        return 1 - float(self.group["dampening"]) if self.momentum else 1.0

    @property
    def keep(self) -> float:
        """The share of the weight that decay leaves in a step; SGD's goes through the buffer, all of it in the end."""
        if self.name in ("sphere", "hyperball"):
            return 1.0
        return 1 - self.rate * self.decay * (self._passed / (1 - self.momentum) if self.name == "sgd" else 1.0)

    def effective_rate(self, norm: float) -> float:
        """Return the rate for the direction `w / |w|`."""
        if self.name == "sgd":
            return theory.sgd_effective_rate(self.rate, norm, self.momentum, 1 - self._passed)
        if self.name in ("adamw", "adam_l2", "muon"):
            return self.rate / norm
        if self.name == "hyperball":
            return self.rate
        return self.rate / norm**2 if self.name in ("sphere", "gradient descent") else math.nan

    @property
    def memory(self) -> float:
        """`sum_k rho_k a^k` of SGD's updates made of independent gradients."""
        first = theory.momentum_filter(self.momentum, bool(self.group.get("nesterov", False)))[1]
        return theory.filtered_memory(first, self.momentum, self.keep)

    def equilibrium(self, size: int, G: float, norm: float, shape: tuple[int, ...] = ()) -> Equilibrium:
        """Return where the norm of a block is heading, `shape` that of the one matrix it belongs to."""
        nesterov = bool(self.group.get("nesterov", False))
        if self.name == "sgd":
            return theory.sgd_equilibrium(self.rate, self.decay, G, self.momentum, 1 - self._passed, nesterov)
        if self.name == "adamw":
            return theory.adamw_equilibrium(self.rate, self.decay, size, self.momentum)
        if self.name == "adam_l2":
            return theory.adam_l2_equilibrium(self.rate, self.decay, size, G, self.momentum)
        if self.name == "muon" and len(shape) == 2:
            scale = 0.2 * math.sqrt(max(shape)) if self.group.get("adjust_lr_fn") == "match_rms_adamw" else None
            own: dict[str, Any] = {
                "coefficients": tuple(self.group["ns_coefficients"]),
                "iterations": int(self.group["ns_steps"]),
            }
            whole = theory.muon_equilibrium(
                self.rate, self.decay, (shape[0], shape[1]), self.momentum, nesterov, scale=scale, **own
            )
            return whole._replace(norm=whole.norm * math.sqrt(size / math.prod(shape)))
        if self.name == "hyperball":
            return theory.hyperball_equilibrium(self.rate, norm, self.momentum, nesterov)
        if self.name == "sphere":
            return Equilibrium(norm, math.nan, 0.0)
        return Equilibrium(math.nan, math.nan, math.nan)


def law_of(optimizer: torch.optim.Optimizer | None, group: dict[str, Any] | None) -> Law:
    """Return the law; an optimizer that is not known has none, and says so."""
    if optimizer is None:
        return Law("gradient flow", {}, 4.0, "no optimizer given: under gradient flow the norm stays")
    if group is None:
        return Law("frozen", {}, 4.0, "not among the optimizer's parameters: it does not move")
    if "radius" in group and group.get("geometry") != "euclidean":
        return Law("sphere", group, 4.0, "on a sphere: the norm is fixed")
    if _HYPERBALL.search(type(optimizer).__name__):
        return Law("hyperball", group, 2.0, "hyperball: the norm is fixed and the angle of a step nearly atan(lr)")
    if isinstance(optimizer, torch.optim.AdamW) or (
        isinstance(optimizer, torch.optim.Adam) and group.get("decoupled_weight_decay")
    ):
        return Law("adamw", group, 2.0, "AdamW: |w|^2 settles near lr size / (2 weight_decay), whatever the gradients")
    if isinstance(optimizer, torch.optim.Adam):
        return Law("adam_l2", group, 3.0, "Adam with L2: |w|^3 settles at lr sqrt(size G) / (2 weight_decay)")
    if isinstance(optimizer, torch.optim.SGD):
        return Law("sgd", group, 4.0, "SGD: |w|^4 settles at lr G / (2 weight_decay (1 - momentum))")
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        law = "|w|^2 settles at lr |u|^2 (1 + 2 memory) / (2 weight_decay - lr weight_decay^2)"
        return Law("muon", group, 2.0, f"Muon: {law}")
    return Law("unknown", group, 4.0, f"no law is known for {type(optimizer).__name__}; the next norm is exact")
