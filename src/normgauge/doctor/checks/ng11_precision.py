"""NG11: a normalizer loses its numbers to low precision.

Squares of half-precision numbers overflow above 256 and vanish below 1e-4; an eps below the smallest is zero.
The output is then 0, infinite or NaN, or running statistics stop moving, without a word.
Fix: Keep statistics, gains and the computation of norms in float32, whatever the model's type:
    module.float()  # and cast its input: module(x.float()).to(x.dtype)
References: pytorch#32137, pytorch#66707, diffusers#13316, minimind#301.
"""

import copy

import torch

from normgauge.doctor.finding import Exam, Sign, Signs, check
from normgauge.network import KeepDouble, first_tensor

HALF = (torch.float16, torch.bfloat16)


@check("warning", exactness="state_only")
def _look(exam: Exam) -> Signs:
    for call in {call.where: call for call in exam.norms}.values():
        stored = getattr(call.module, "running_var", None)
        if stored is not None and stored.dtype in HALF:
            said = f"running statistics in {stored.dtype}: steps below {torch.finfo(stored.dtype).eps / 2:.1g} are lost"
            yield Sign(call.where, said, 0.5)
        if call.y.dtype not in HALF or not torch.isfinite(call.x).all():
            continue
        if not torch.isfinite(call.y).all():
            yield Sign(call.where, f"finite inputs in {call.x.dtype} give infinite or NaN outputs", 3.0, "error")
        elif call.eps < torch.finfo(call.x.dtype).smallest_normal / 1024 and call.kind == "l2":
            yield Sign(call.where, f"eps {call.eps:g} is zero in {call.x.dtype}: a row of zeros gives NaN", 0.6)
        elif call.module is not None and call.own:
            twin = copy.deepcopy(call.module).double().train(call.module.training)
            with torch.no_grad(), KeepDouble():
                truth = first_tensor(twin(call.x.double()))
            gap = float((call.y.double() - truth).abs().max() / truth.abs().max())  # type: ignore[union-attr, operator]
            if not gap <= 8 * torch.finfo(call.y.dtype).eps:
                said = f"its outputs are {gap:.2g} off those in float64"
                yield Sign(call.where, said, 2.0, None if gap <= 0.05 else "error")
