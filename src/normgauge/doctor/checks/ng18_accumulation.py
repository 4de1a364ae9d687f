"""NG18: gradient accumulation does not enlarge BatchNorm's batch.

Statistics are taken of each micro-batch, and updated once per micro-batch instead of once per step.
The memory is shorter than the momentum says, and the noise is that of the small batch.
Fix: Take the momentum that gives the same memory with k micro-batches per step, or a norm without batch statistics:
    module.momentum = 1 - (1 - module.momentum) ** (1 / k)
References: pytorch#46516, yolov5#1630, accelerate#791.
"""

import torch

from normgauge.doctor.finding import Exam, Sign, Signs, check, setting


@check("info", needs="optimizer", exactness="state_only")
def _look(exam: Exam) -> Signs:
    states = exam.optimizer.state.values() if exam.optimizer is not None else ()
    steps = [float(torch.as_tensor(state["step"])) for state in states if "step" in state]
    for name, module in exam.batch_norms():
        if not steps or module.num_batches_tracked is None or not module.momentum:
            continue
        per_step = exam.step.get(name, (1, 1))[1] or 1
        ratio = float(module.num_batches_tracked) / max(*steps, 1.0) / per_step
        call = next((call for call in exam.norms if call.where == name), None)
        if 1.8 < ratio < 1000 and max(steps) > 4:
            few = call is not None and call.count < 32
            said = f"{int(module.num_batches_tracked)} updates in {max(steps):.0f} optimizer steps"
            fix = setting(name, momentum=1 - (1 - module.momentum) ** (1 / round(ratio)))
            yield Sign(name, said, 0.2 + 0.1 * few, "warning" if few else "info", fix)
