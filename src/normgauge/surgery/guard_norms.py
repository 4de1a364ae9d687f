"""`guard_norms`: statistics that one bad batch, a checkpoint or accumulated gradients do not spoil."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn

from normgauge.errors import InputError
from normgauge.results import instrument
from normgauge.surgery._operate import Options, Patient, Where, is_selected, operate, require_selection
from normgauge.surgery._statistics import Guarded, class_over, has_statistics
from normgauge.surgery._surgery import Surgery


@instrument
def guard_norms(
    model: nn.Module, *, example: Any, where: Where = None, accumulation: int = 1, **options: Unpack[Options]
) -> Surgery:
    r"""Guard running statistics: no update from a batch that is not finite, none from a checkpoint's second pass.

    With gradients accumulated over k batches the statistics would forget k times as fast: the momentum m becomes
    $1 - (1 - m)^{1/k}$, so that k updates by equal batches are one update of before.

    Kind: exact in both modes on finite inputs. Cost: nine forward passes.

    Args:
        model: any model.
        example: a tensor, tuple or mapping of inputs.
        where: glob, names or predicate(name, module); all normalizers with statistics by default.
        accumulation: batches per optimizer step.

    Examples:
        >>> import torch
        >>> model = guard_norms(nn.Sequential(nn.BatchNorm1d(2)), example=torch.randn(4, 2)).model.train()
        >>> _ = model(torch.full((4, 2), torch.inf))
        >>> model[0].running_mean
        tensor([0., 0.])
    """
    if accumulation < 1:
        rule = "accumulation is the number of batches per optimizer step"
        raise InputError("guard_norms", rule, str(accumulation), "Give 1 without accumulation")

    def edit(patient: Patient) -> str:
        for name, module in patient.model.named_modules():
            if not has_statistics(module) or not is_selected(where, name, module) or isinstance(module, Guarded):
                continue
            if not all(bool(value.isfinite().all()) for value in (module.running_mean, module.running_var)):
                patient.refuse(name, "its running statistics are not finite already: recalibrate first")
                continue
            module.__class__ = class_over(Guarded, type(module))
            momentum: Any = module.momentum
            corrected = ""
            if accumulation > 1 and momentum is not None:
                module.momentum = 1 - (1 - momentum) ** (1 / accumulation)
                corrected = f", momentum {momentum:g} -> {module.momentum:.4g}"
            patient.did(name, f"guarded{corrected}")
        require_selection("guard_norms", where, model, [row["normalizer"] for row in patient.rows])
        return "exact in train and eval mode on finite inputs"

    return operate("guard_norms", model, example, edit, modes=("eval", "train"), **options)
