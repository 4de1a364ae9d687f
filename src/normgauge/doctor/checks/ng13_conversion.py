"""NG13: convert_sync_batchnorm would change this network.

It replaces every subclass of BatchNorm by a plain one and drops what the subclass adds, such as an activation.
The converted network trains and scores, and is another function.
Fix: Convert with a function that keeps the subclass, and compare the outputs before and after:
    ng.checkup(converted, batch, against=model).divergence
References: pytorch#187298, timm#1254, bias_free_denoising#3.
"""

import torch
from torch import nn

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("info")
def _look(exam: Exam) -> Signs:
    plain = {nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward}
    for name, module in exam.batch_norms():
        if type(module).forward not in plain and not isinstance(module, nn.modules.batchnorm._LazyNormBase):
            call = next((call for call in exam.norms if call.where == name), None)
            gap = 1.0 if call is None or exam.eval is None else _change(exam, name)
            if gap > 1e-5:
                yield Sign(
                    name, f"{type(module).__name__} has a forward of its own; without it outputs move by {gap:.2g}"
                )


def _change(exam: Exam, name: str) -> float:
    calls = exam.eval.calls(name) if exam.eval else []
    if not calls or calls[0].given is None or calls[0].made is None:
        return 1.0
    with torch.no_grad():
        plain = nn.BatchNorm1d.forward(exam.modules[name].eval(), calls[0].given)
    return float((plain - calls[0].made).abs().max() / calls[0].made.abs().max())
