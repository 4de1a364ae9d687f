"""NG44: gains that cannot move in their type.

Next to 1 a bfloat16 number has no neighbour nearer than 0.004, so a step of 0.001 is rounded away, every time.
The gains stay at their start for the whole training while everything else learns.
Fix: Keep gains in float32, or let the optimizer hold a float32 copy:
    norm.float()  # and in its forward: norm(x.float()).to(x.dtype)
References: flame#47, flash-linear-attention#676, axolotl#3670.
"""

import torch

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("warning", exactness="state_only")
def _look(exam: Exam) -> Signs:
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
        moved = ((value.detach().double() - step).to(value.dtype) != value) | (
            (value.detach().double() + step).to(value.dtype) != value
        )
        if float(moved.double().mean()) < 0.1:
            stuck.append((name, rate, str(value.dtype)))
    if stuck:
        name, rate, dtype = stuck[0]
        given = "" if exam.optimizer is not None else " (no optimizer given: Adam's default)"
        said = f"{len(stuck)} gains in {dtype}: a step at rate {rate:g}{given} changes fewer than 10 % of their entries"
        yield Sign(name, said, 0.9, "error" if exam.optimizer is not None else "warning")
