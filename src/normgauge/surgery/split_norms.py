"""`split_norms`: statistics of their own for each place a shared normalizer is used at."""

from __future__ import annotations

import copy
from typing import Any, Unpack

from torch import Tensor, nn

from normgauge.network import exchange
from normgauge.results import instrument
from normgauge.surgery._operate import Options, Patient, Where, is_selected, operate
from normgauge.surgery._statistics import has_statistics
from normgauge.surgery._surgery import Surgery


class SplitNorm(nn.Module):
    """One normalizer per use in a forward pass: the first call goes to the first, and so on; gains are shared."""

    def __init__(self, norm: nn.Module, uses: int) -> None:
        super().__init__()
        shared = {id(value): value for value in norm.parameters()}
        self.uses = nn.ModuleList([norm, *(copy.deepcopy(norm, dict(shared)) for _ in range(uses - 1))])
        self.turn = 0

    def forward(self, input: Tensor) -> Tensor:
        """Normalize with the statistics of this use."""
        self.turn += 1
        return self.uses[(self.turn - 1) % len(self.uses)](input)


def begin_pass(model: nn.Module, _: Any) -> None:
    """Let the first call of a forward pass be the first use again."""
    for module in model.modules():
        if isinstance(module, SplitNorm):
            module.turn = 0


@instrument
def split_norms(model: nn.Module, *, example: Any, where: Where = None, **options: Unpack[Options]) -> Surgery:
    """Give a normalizer that is called several times in a forward pass statistics per call; gain and shift stay shared.

    A shared BatchNorm mixes distributions that differ (steps of a recurrence, two branches), and evaluates neither
    well. All copies begin with the statistics there were; train on, or recalibrate, to let them part.

    Kind: exact in both modes at first. Cost: nine forward passes.
    """

    def edit(patient: Patient) -> str:
        graph = patient.graph
        places = list(patient.model.named_modules(remove_duplicate=False))
        for name, module in list(patient.model.named_modules()):
            times = sum(step.module is module for step in graph.steps)
            if has_statistics(module) and is_selected(where, name, module) and times > 1:
                split = SplitNorm(module, times)
                for place in [place for place, other in places if other is module]:
                    exchange(patient.model, place, split)
                patient.did(name, f"statistics for each of {times} uses")
        if patient.rows:
            patient.model.register_forward_pre_hook(begin_pass)
        return "exact in train and eval mode, until the statistics part"

    return operate("split_norms", model, example, edit, modes=("eval", "train"), **options)
