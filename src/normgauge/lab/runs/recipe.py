"""How a network is trained: optimizer, schedule, clipping, augmentation, or a user's own step, loss and metric."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from normgauge import optim
from normgauge.errors import InputError, unknown_name
from normgauge.lab.data import Dataset
from normgauge.lab.imports import call_function, import_function, name_of
from normgauge.lab.runs.digests import FUNCTIONS
from normgauge.lab.runs.train import Step
from normgauge.objective import Objective
from normgauge.records import Spec
from normgauge.symmetry import param_groups

#: Optimizer -> the rates that are tried where none are given, of the small size.
RATES: dict[str, tuple[float, ...]] = {
    "sgd": (0.03, 0.1, 0.3, 1.0, 3.0),
    "momentum": (0.003, 0.01, 0.03, 0.1, 0.3),
    "adamw": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "muon": (1e-3, 3e-3, 1e-2, 3e-2, 0.1),
    "sphere-sgd": (0.03, 0.1, 0.3, 1.0, 3.0),
    "sphere-adam": (1e-3, 3e-3, 1e-2, 3e-2, 0.1),
}
#: Schedule -> factor on the rate from the share of training that is done; "warmup" rises over the first tenth.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "step": lambda done: 0.1 ** (int(done >= 0.5) + int(done >= 0.75)),
    "warmup": lambda done: min(1.0, 10 * done),
    "warmup-cosine": lambda done: min(10 * done, 0.5 * (1 + math.cos(math.pi * max(0.0, done - 0.1) / 0.9))),
}


@dataclass(frozen=True)
class Recipe:
    """How every arm is trained; each knob of it can be an arm instead.

    Attributes:
        optimizer: sgd, momentum, adamw, muon (matrices; AdamW for the rest), sphere-sgd, sphere-adam (weights whose
            scale is free live on spheres), or `optimizer(network, lr) -> Optimizer` of a module, or its name.
        weight_decay: of the optimizer; its own default if `None`. None on spheres.
        momentum: of momentum, muon and sphere-sgd; 0.9 (muon 0.95) if `None`.
        schedule: constant; cosine to 0; step, a tenth at a half and at three quarters; warmup over the first tenth;
            warmup-cosine.
        clip: the largest norm of the gradient.
        augment: shift and flip images.
        train_step: `train_step(network, (inputs, targets), optimizer) -> loss`, a step of one's own in the place of
            loss, clipping and augmentation.
        loss: `loss(outputs, targets) -> Tensor`, in the place of cross-entropy or squared error.
        metric: `metric(outputs, targets) -> float` on a whole split, what arms are compared by.
        better: "higher" or "lower", of the metric.

    Examples:
        >>> Recipe(optimizer="adamw", schedule="cosine").knobs()
        {'optimizer': 'adamw', 'schedule': 'cosine'}
    """

    optimizer: str | Callable[..., Any] = "sgd"
    weight_decay: float | None = None
    momentum: float | None = None
    schedule: str = "constant"
    clip: float | None = None
    augment: bool = False
    train_step: str | Callable[..., Any] | None = None
    loss: str | Callable[..., Any] | None = None
    metric: str | Callable[..., Any] | None = None
    better: str = "higher"

    def knobs(self) -> dict[str, Any]:
        """Return the recipe as knobs of a spec: functions by name, what is usual left out, the optimizer always."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        named = {name: name_of(value) if callable(value) else value for name, value in given.items()}
        usual = {item.name: item.default for item in fields(self)}
        return {name: value for name, value in named.items() if name == "optimizer" or value != usual[name]}


KNOBS = frozenset(item.name for item in fields(Recipe))


def check_recipe(knobs: Mapping[str, Any]) -> None:
    """Refuse a recipe that no run could follow."""
    name = str(knobs.get("optimizer", "sgd"))
    if name not in RATES and ":" not in name:
        raise unknown_name("optimizer", name, RATES, "Or pass package.module:function")
    if knobs.get("schedule", "constant") not in SCHEDULES:
        raise unknown_name("schedule", knobs["schedule"], SCHEDULES)
    for knob in FUNCTIONS[1:]:
        if ":" in str(knobs.get(knob, "")):
            import_function(knob, knobs[knob], "a function")
    numbers = {knob: knobs[knob] for knob in ("weight_decay", "momentum", "clip") if knobs.get(knob) is not None}
    bad = {knob: value for knob, value in numbers.items() if not (isinstance(value, (int, float)) and value >= 0)}
    if bad or knobs.get("better", "higher") not in ("higher", "lower"):
        got = str(bad or knobs["better"])
        raise InputError("recipe", "numbers are not negative, better is 'higher' or 'lower'", got, "Correct it")
    if knobs.get("train_step") and (knobs.get("clip") or knobs.get("augment")):
        rule = "a step of one's own takes the place of clipping and augmentation"
        raise InputError("recipe", rule, "both", "Clip and augment in train_step, or leave it out")


def equip(data: Dataset, spec: Spec) -> Dataset:
    """Return the data with the spec's own loss and metric in the place of theirs."""
    own = {knob: import_function(knob, spec[knob], "a function") for knob in ("loss", "metric") if spec.get(knob)}
    return replace(data, own_loss=own.get("loss"), metric=own.get("metric")) if own else data


def make_optimizer(network: nn.Module, spec: Spec, data: Dataset | None = None) -> torch.optim.Optimizer:
    """Return the optimizer of a spec (`optimizer`, `lr`, `weight_decay`, `momentum`) over a network's parameters.

    Spheres hold the weights whose scale changes nothing, as `ng.param_groups` finds them on some of the data; all
    others are flat. Muon takes the matrices, with the size of AdamW's updates, so that both share the rate.
    """
    name, rate, given = str(spec.get("optimizer", "sgd")), float(spec["lr"]), network.parameters()
    decay: dict[str, Any] = {} if spec.get("weight_decay") is None else {"weight_decay": float(spec["weight_decay"])}
    momentum = float(0.9 if spec.get("momentum") is None else spec["momentum"])
    if ":" in name:
        made = call_function("optimizer", name, "a function optimizer(network, lr)", network, rate)
        if not isinstance(made, torch.optim.Optimizer):
            raise InputError(f"optimizer {name!r}", "it gives a torch optimizer", type(made).__name__, "Return it")
        return made
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(given, lr=rate, momentum=momentum if name == "momentum" else 0.0, **decay)
    if name == "adamw":
        return torch.optim.AdamW(given, lr=rate, **decay)
    if name == "muon":
        shared: dict[str, Any] = {"lr": rate, "weight_decay": 0.1, **decay}
        muon: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", **shared}
        muon["momentum"] = 0.95 if spec.get("momentum") is None else momentum
        matrices, rest = ([p for p in network.parameters() if p.requires_grad and (p.ndim == 2) == m] for m in (1, 0))
        parts = [torch.optim.Muon(matrices, **muon)] if matrices else []
        return Joined(*parts, *([torch.optim.AdamW(rest, **shared)] if rest else []))
    if data is None or name not in RATES:
        raise unknown_name("optimizer", name, RATES)
    rows = slice(0, 16)
    objective = Objective(network, data.loss, (data.train[0][rows], data.train[1][rows]), mode="train")
    groups = list(param_groups(objective, {"weight_decay": 0.0, **decay}, geometry=True))
    if name == "sphere-adam":
        return optim.SphereAdam(groups, lr=rate)
    return optim.SphereSGD(groups, lr=rate, momentum=momentum)


class Joined(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, which holds their groups and their state."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        groups = [{**group, "part": k} for k, part in enumerate(parts) for group in part.param_groups]
        self.parts = parts
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> Any:
        """Step them all."""
        loss = None if closure is None else closure()
        for k, part in enumerate(self.parts):
            part.state, part.param_groups = self.state, [g for g in self.param_groups if g["part"] == k]
            type(part).step(part)
        return loss


def make_schedule(spec: Spec) -> Callable[[int], float] | None:
    """Return step -> factor on the rate; `None` where it is constant.

    Examples:
        >>> factor = make_schedule({"schedule": "step", "steps": 8})
        >>> [round(factor(step), 2) for step in (0, 3, 4, 7)]
        [1.0, 1.0, 0.1, 0.01]
    """
    shape, steps = SCHEDULES[spec.get("schedule", "constant")], int(spec["steps"])
    if shape is SCHEDULES["constant"]:
        return None
    # a rise begins with the first step's share, not with 0, which would waste it
    return lambda step: shape((step + 1) / steps if "warmup" in spec["schedule"] else step / steps)


def own_step(network: nn.Module, data: Dataset, optimizer: torch.optim.Optimizer, spec: Spec) -> Step | None:
    """Return the spec's own step for `train`, `None` where it has none."""
    if not spec.get("train_step"):
        return None
    path, (inputs, targets) = str(spec["train_step"]), data.train
    import_function("train_step", path, "a function train_step(network, batch, optimizer)")

    def step(rows: Tensor) -> float:
        network.train()
        loss = call_function("train_step", path, "a function", network, (inputs[rows], targets[rows]), optimizer)
        if not isinstance(loss, (float, int, Tensor)) or (isinstance(loss, Tensor) and loss.numel() != 1):
            rule = "it returns the loss, one number"
            raise InputError(f"train_step {path!r}", rule, type(loss).__name__, "Return it")
        return float(loss)

    return step
