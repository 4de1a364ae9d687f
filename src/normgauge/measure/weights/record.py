"""What an optimizer did to its parameters over some steps, kept as means from which their equilibrium follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.measure.weights.laws import law_of
from normgauge.objective import Objective

# Steps weigh as the cube of their number: half of a mean comes from the last sixth of the steps, little from the start.
FORGETTING = 3


class UpdateRecord:
    """Means of `w^2` and `u^2 |w|^2` per entry over the steps taken inside `with UpdateRecord(optimizer) as record:`.

    The update is `u = (a w - w') / lr`, a the share of the weight that decay leaves, and `|w|` the norm of the tensor:
    their product does not change while the norm relaxes. Later steps weigh more. Give the record to
    `ng.weight_dynamics` after the first tenth of a training, which it does not change.

    Cost: a copy of the parameters during a step, two kept, all in float64, and a few passes over them a step.

    Raises:
        InputError: for something that is no optimizer.

    Examples:
        >>> w = torch.nn.Parameter(torch.tensor([2.0]))
        >>> optimizer = torch.optim.SGD([w], lr=0.5, weight_decay=0.1)
        >>> with UpdateRecord(optimizer) as record:
        ...     w.grad = torch.tensor([3.0])
        ...     _ = optimizer.step()
        >>> record.steps, [round(float(mean), 4) for mean in record.means[w]]
        (1, [4.0, 36.0])
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            remedy = "Pass the optimizer that is stepped"
            raise InputError("UpdateRecord", "it records a torch.optim.Optimizer", type(optimizer).__name__, remedy)
        self.optimizer, self.steps = optimizer, 0
        self.means: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._before: dict[Tensor, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> UpdateRecord:
        """Begin to record."""
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._remember),
            self.optimizer.register_step_post_hook(self._add),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._before = {}

    def of(self, objective: Objective) -> dict[str, tuple[Tensor, Tensor]]:
        """Return, by the names of the objective's parameters, mean squares of weights and of updates at that norm."""
        named = [(name, self.means.get(parameter)) for name, parameter in objective.model.named_parameters()]
        return {name: (means[0], means[1] / means[0].sum()) for name, means in named if means is not None}

    def _remember(self, *_: Any) -> None:
        moving = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._before = {parameter: parameter.detach().to(torch.float64, copy=True) for parameter in moving}

    @torch.no_grad()
    def _add(self, *_: Any) -> None:
        self.steps += 1
        share = (FORGETTING + 1) / (self.steps + FORGETTING)
        for group in self.optimizer.param_groups:
            law = law_of(self.optimizer, group)
            for parameter in group["params"]:
                if parameter not in self._before or not law.rate > 0:
                    continue
                weight = self._before[parameter]
                update = (law.keep * weight - parameter.detach().double()) / law.rate
                values = weight.square(), update.square() * weight.square().sum()
                for mean, new in zip(self.means.setdefault(parameter, values), values, strict=True):
                    mean.lerp_(new, share)
        self._before = {}
