"""NG10: stored statistics are not finite.

One batch with an infinity or NaN enters the running average and never leaves it. A gradient scaler skips the step,
not the statistics: training looks fine and eval is garbage.
Fix: Reset those channels and recalibrate; keep such batches out of the statistics:
    model = ng.guard_norms(model, example=batch).model
References: pytorch#88474, pytorch#115500, SparseConvNet#190.
"""

import torch
from torch import Tensor, nn

from normgauge.doctor.finding import Exam, NormBase, Sign, Signs, check


@check("error", exactness="state_only")
def _look(exam: Exam) -> Signs:
    for name, module in exam.modules.items():
        stored = [getattr(module, key, None) for key in ("running_mean", "running_var")]
        if not isinstance(module, NormBase) and not all(isinstance(value, Tensor) for value in stored):
            continue
        bad = sum(int((~torch.isfinite(v)).sum()) for v in stored if v is not None)
        below = 0 if stored[1] is None else int((stored[1] < 0).sum())

        def repair(model: nn.Module, name: str = name) -> None:
            mean, variance = (getattr(model.get_submodule(name), key) for key in ("running_mean", "running_var"))
            lost = ~(torch.isfinite(mean) & torch.isfinite(variance) & (variance >= 0))
            mean[lost], variance[lost] = 0.0, 1.0

        if bad or below:
            said = f"{bad} entries are infinite or NaN" + (f", {below} variances negative" if below else "")
            yield Sign(name, said, 3.0, repair=repair)
