"""NG45: norms slipped into the decay group.

There is a group without decay, so gains were meant to be left out, but some are decayed: filters by name or type miss
custom norms and names like bn1 or ln_1. Found by what the parameters do, not by how they are called.
Fix: Let the roles decide the groups:
    groups = ng.param_groups(objective, dict(lr=1e-3, weight_decay=0.1))
    optimizer = torch.optim.AdamW(groups)
References: transformers#35927, Fast-LLM#542, DeepSpeed#8440.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("warning", needs="optimizer", exactness="state_only")
def _look(exam: Exam) -> Signs:
    decay = {name: float(group.get("weight_decay") or 0.0) for name, group in exam.groups.items()}
    if all(decay.values()):
        return
    leaked = [name for name in exam.gains if decay.get(name)]
    kept = [name for name, value in decay.items() if not value]
    if leaked:
        said = f"{len(leaked)} of {len(exam.gains)} gains decay by {decay[leaked[0]]:g}, {len(kept)} others do not"
        yield Sign(leaked[0], said, decay[leaked[0]] + len(leaked) / len(exam.gains) / 10)
