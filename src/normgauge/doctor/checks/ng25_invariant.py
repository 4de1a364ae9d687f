"""NG25: Adam's L2 penalty on weights whose length does not matter.

The loss does not change when these weights are scaled, so their decay only sets the effective rate.
An L2 term inside of Adam is divided by the gradient's size and acts on each entry differently; AdamW decays evenly.
Fix: Decouple the decay, and keep it on these weights:
    torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
References: arXiv 1711.05101, AdamP#13, arXiv 2305.17212.
"""

import torch

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("info", needs="optimizer", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    if type(exam.optimizer) not in (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam):
        return
    inside = [
        name
        for name in exam.invariant
        if (group := exam.groups.get(name, {})).get("weight_decay") and not group.get("decoupled_weight_decay")
    ]
    if inside:
        decay = exam.groups[inside[0]]["weight_decay"]
        said = f"{len(inside)} scale-invariant weights, the first here, with an L2 term of {decay:g}"
        yield Sign(inside[0], said)
