"""NG48: in eval a sample's output depends on the others.

Scores change with the batch a sample is in, so results cannot be repeated one by one; rollouts differ from training.
No BatchNorm explains it here: a custom norm, a softmax or a mean over the wrong axis does.
Fix: Find the axis: the first module named is where the dependence begins:
    ng.identify(module, example=x).axes  # must not hold 0
References: vllm#48271, sglang#28787, RL-Kernel#145.
"""

import torch

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("error", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    if exam.eval is None or any(call.kind == "batch" and call.own for call in exam.eval.norms):
        return
    gap, rounding = exam.rows("eval")
    if gap > max(1e-3, rounding) and torch.isfinite(torch.tensor(gap)):
        where = next((call.where for call in exam.eval.norms if 0 in exam.identity(call).axes), "(model)") \
            if all(call.module is not None for call in exam.eval.norms) else "(model)"  # fmt: skip
        yield Sign(where, f"without half of the batch the first sample's output changes by {gap:.2g} of its size", gap)
