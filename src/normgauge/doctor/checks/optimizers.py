"""Checks of what an optimizer does to gains and to weights before a norm."""

import torch

from normgauge.doctor.finding import Exam, Sign, Signs, check

STEPS = 1e4


@check("info", needs="optimizer", exactness="state_only")
def decayed_gains(exam: Exam) -> Signs:
    """NG12: weight decay on all gains and shifts.

    Decay pulls gains towards zero, which nobody asked for. For: ResNet and GPT recipes leave them out; against:
    measured gains are small and disagree (van Laarhoven 2017, Summers and Dinneen 2020). Gains stored as 1+w decay to
    1.
    Fix: Let the roles decide the groups:
        groups = ng.param_groups(objective, dict(lr=1e-3, weight_decay=0.1))
        optimizer = torch.optim.AdamW(groups)
    References: pytorch#1402, yolov5#4104, transformers#35927.
    """
    decay = {name: float(group.get("weight_decay") or 0.0) for name, group in exam.groups.items()}
    inside = [name for name in exam.gains if decay.get(name)]
    if inside and all(decay.values()):
        most = max(decay[name] for name in inside)
        yield Sign(inside[0], f"{len(inside)} gains and shifts, the first here, decay by {most:g}", most)


@check("info", needs="optimizer", exactness="changes_function")
def invariant(exam: Exam) -> Signs:
    """NG25: Adam's L2 penalty on weights whose length does not matter.

    The loss does not change when these weights are scaled, so their decay only sets the effective rate. An L2 term
    inside of Adam is divided by the gradient's size and acts on each entry differently; AdamW decays evenly.
    Fix: Decouple the decay, and keep it on these weights:
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    References: arXiv 1711.05101, AdamP#13, arXiv 2305.17212.
    """
    if type(exam.optimizer) not in (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam):
        return
    groups = [(name, exam.groups.get(name, {})) for name in exam.invariant]
    inside = [n for n, group in groups if group.get("weight_decay") and not group.get("decoupled_weight_decay")]
    if inside:
        decay = exam.groups[inside[0]]["weight_decay"]
        said = f"{len(inside)} scale-invariant weights, the first here, with an L2 term of {decay:g}"
        yield Sign(inside[0], said)


@check("info", needs="optimizer", exactness="changes_function")
def no_decay(exam: Exam) -> Signs:
    """NG42: the effective rate collapses: no decay on weights whose length does not matter.

    Every step of SGD is orthogonal to these weights and makes them longer, and the effective rate is lr/|w|^2. Without
    decay nothing stops it. Some schedules rely on that; keep decay on these weights unless you mean it.
    Fix: Keep weight decay on weights before a norm, and take it off gains:
        groups = ng.param_groups(objective, dict(lr=0.1, weight_decay=5e-4))
    References: arXiv 1706.05350, arXiv 2006.08217, arXiv 2305.17212.
    """
    bare = [n for n in exam.invariant if n in exam.groups and not exam.groups[n].get("weight_decay")]
    if not bare or exam.train is None:
        return
    values, worst, name = dict(exam.model.named_parameters()), 0.0, bare[0]
    for each in bare:
        group, size = exam.groups[each], float(values[each].detach().double().norm())
        step = group["lr"] * values[each].numel() ** 0.5
        if isinstance(exam.optimizer, torch.optim.SGD):
            step = group["lr"] * float(exam.train.gradients[each].double().norm()) / (1 - group.get("momentum", 0.0))
        growth = (size**2 + STEPS * step**2) / max(size**2, 1e-30)
        worst, name = max((worst, name), (growth, each))
    if worst > 2:
        said = f"{len(bare)} such weights; in {STEPS:g} steps like this one the effective rate falls {worst:.2g} times"
        all_bare = len(bare) == len(exam.invariant)
        yield Sign(name, said, min(worst / 100, 0.9), "warning" if worst > 100 and all_bare else "info")


@check("warning", exactness="state_only")
def stuck_gains(exam: Exam) -> Signs:
    """NG44: gains that cannot move in their type.

    Next to 1 a bfloat16 number has no neighbour nearer than 0.004, so a step of 0.001 is rounded away, every time. The
    gains stay at their start for the whole training while everything else learns.
    Fix: Keep gains in float32, or let the optimizer hold a float32 copy:
        norm.float()  # and in its forward: norm(x.float()).to(x.dtype)
    References: flame#47, flash-linear-attention#676, axolotl#3670.
    """
    values, stuck = dict(exam.model.named_parameters()), []
    for name in exam.gains:
        value = values.get(name)
        if value is None or value.dtype not in (torch.float16, torch.bfloat16) or not value.requires_grad:
            continue
        group = exam.groups.get(name)
        if exam.optimizer is not None and group is None:
            continue  # the optimizer holds copies
        rate = 1e-3 if group is None else float(group["lr"])
        slope = exam.train.gradients.get(name) if exam.train is not None else None
        plain = isinstance(exam.optimizer, torch.optim.SGD)
        step = rate * (slope.double() if plain and slope is not None else torch.ones_like(value, dtype=torch.float64))
        down, up = ((value.detach().double() + sign * step).to(value.dtype) != value for sign in (-1, 1))
        if float((down | up).double().mean()) < 0.1:
            stuck.append((name, rate, str(value.dtype)))
    if stuck:
        name, rate, dtype = stuck[0]
        given = "" if exam.optimizer is not None else " (no optimizer given: Adam's default)"
        said = f"{len(stuck)} gains in {dtype}: a step at rate {rate:g}{given} changes fewer than 10 % of their entries"
        yield Sign(name, said, 0.9, "error" if exam.optimizer is not None else "warning")


@check("warning", needs="optimizer", exactness="state_only")
def leaking_decay(exam: Exam) -> Signs:
    """NG45: norms slipped into the decay group.

    There is a group without decay, so gains were meant to be left out, but some are decayed: filters by name or type
    miss custom norms and names like bn1 or ln_1. Found by what the parameters do, not by how they are called.
    Fix: Let the roles decide the groups:
        groups = ng.param_groups(objective, dict(lr=1e-3, weight_decay=0.1))
        optimizer = torch.optim.AdamW(groups)
    References: transformers#35927, Fast-LLM#542, DeepSpeed#8440.
    """
    decay = {name: float(group.get("weight_decay") or 0.0) for name, group in exam.groups.items()}
    if all(decay.values()):
        return
    leaked = [name for name in exam.gains if decay.get(name)]
    kept = [name for name, value in decay.items() if not value]
    if leaked:
        said = f"{len(leaked)} of {len(exam.gains)} gains decay by {decay[leaked[0]]:g}, {len(kept)} others do not"
        yield Sign(leaked[0], said, decay[leaked[0]] + len(leaked) / len(exam.gains) / 10)
