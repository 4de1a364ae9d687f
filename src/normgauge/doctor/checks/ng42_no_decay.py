"""NG42: the effective rate collapses: no decay on weights whose length does not matter.

Every step of SGD is orthogonal to these weights and makes them longer, and the effective rate is lr/|w|^2.
Without decay nothing stops it. Some schedules rely on that; keep decay on these weights unless you mean it.
Fix: Keep weight decay on weights before a norm, and take it off gains:
    groups = ng.param_groups(objective, dict(lr=0.1, weight_decay=5e-4))
References: arXiv 1706.05350, arXiv 2006.08217, arXiv 2305.17212.
"""

import torch

from normgauge.doctor.finding import Exam, Sign, Signs, check

STEPS = 1e4


@check("info", needs="optimizer", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    bare = [n for n in exam.invariant if n in exam.groups and not exam.groups[n].get("weight_decay")]
    if not bare or exam.train is None:
        return
    values, worst, name = dict(exam.model.named_parameters()), 0.0, bare[0]
    for each in bare:
        group, size = exam.groups[each], float(values[each].detach().double().norm())
        plain = isinstance(exam.optimizer, torch.optim.SGD)
        step = group["lr"] * (
            float(exam.train.gradients[each].double().norm()) if plain else values[each].numel() ** 0.5
        )
        step /= (1 - group.get("momentum", 0.0)) if plain else 1.0
        growth = (size**2 + STEPS * step**2) / max(size**2, 1e-30)
        worst, name = max((worst, name), (growth, each))
    if worst > 2:
        said = f"{len(bare)} such weights; in {STEPS:g} steps like this one the effective rate falls {worst:.2g} times"
        yield Sign(
            name, said, min(worst / 100, 0.9), "warning" if worst > 100 and len(bare) == len(exam.invariant) else "info"
        )
