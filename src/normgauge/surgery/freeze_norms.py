"""`freeze_norms`: running statistics that no `train()` brings back to life."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn

from normgauge.results import instrument
from normgauge.surgery._operate import Options, Patient, Where, is_selected, operate, require_selection
from normgauge.surgery._statistics import Frozen, class_over, has_statistics
from normgauge.surgery._surgery import Surgery


@instrument
def freeze_norms(
    model: nn.Module, *, example: Any, where: Where = None, affine: bool = False, **options: Unpack[Options]
) -> Surgery:
    """Freeze normalizers at their stored statistics: `train()` does not wake them, copies and pickles keep it.

    The module keeps its class (`isinstance` holds), parameters and keys; a class over it answers `train()`. One whose
    `track_running_stats` was switched off later used batch statistics in training: it is frozen as well.

    Kind: exact in eval mode; in train mode the normalizer does what it did in eval mode. Cost: five forward passes.

    Args:
        model: any model.
        example: a tensor, tuple or mapping of inputs.
        where: glob, names or predicate(name, module); all normalizers with statistics by default.
        affine: stop training their gains and shifts too.

    Examples:
        >>> import torch
        >>> done = freeze_norms(nn.Sequential(nn.BatchNorm1d(2)), example=torch.randn(4, 2))
        >>> done.model.train()[0].training
        False
    """

    def edit(patient: Patient) -> str:
        for name, module in patient.model.named_modules():
            if not has_statistics(module) or not is_selected(where, name, module) or isinstance(module, Frozen):
                continue
            if not all(bool(value.isfinite().all()) for value in (module.running_mean, module.running_var)):
                patient.refuse(name, "its running statistics are not finite: recalibrate first")
                continue
            module.__class__ = class_over(Frozen, type(module))
            module.eval()
            if affine:
                module.requires_grad_(False)
            never = int(getattr(module, "num_batches_tracked", None) or 0) == 0
            patient.did(name, "frozen" + (" at statistics that were never updated" if never else ""))
        require_selection("freeze_norms", where, model, [row["normalizer"] for row in patient.rows])
        return "exact in eval mode; in train mode as in eval mode"

    done = operate("freeze_norms", model, example, edit, **options)
    for module in done.model.modules():  # flags were those of the user's model again
        if isinstance(module, Frozen):
            module.train()
    return done
