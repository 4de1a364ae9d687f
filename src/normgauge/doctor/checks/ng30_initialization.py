"""NG30: gains that were never set to one.

Gains start at 1 (or at 0 where the layer computes 1 + w). Drawn like weights, left uninitialised, or started by the
other convention they scale every activation by the wrong factor.
Fix: Reset the norms before training; do not touch a trained model:
    module.reset_parameters()
References: llm-foundry#1745, TransformerEngine#2528, transformers#45050.
"""

import torch

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("warning", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    for call in {c.where: c for c in exam.norms}.values():
        weight = getattr(call.module, "weight", None)
        if weight is None or not weight.is_floating_point() or not weight.ndim or weight.numel() < 2:
            continue
        if not torch.isfinite(weight).all():
            yield Sign(call.where, f"{int((~torch.isfinite(weight)).sum())} gains are infinite or NaN", 3.0, "error")
            continue
        law = exam.identity(call).gain
        mean, spread = float(weight.detach().double().mean()), float(weight.detach().double().std())
        if law == "w" and abs(mean) < 0.1 and spread > 0 and 0.005 < spread < 0.1 and abs(mean) < spread:
            yield Sign(call.where, f"gains have mean {mean:.2g} and deviation {spread:.2g}: drawn like weights", 1.0)
        elif law == "1+w" and mean == 1.0 and spread == 0:
            yield Sign(call.where, "the layer computes 1 + w and all w are 1: every output is doubled", 1.0)
