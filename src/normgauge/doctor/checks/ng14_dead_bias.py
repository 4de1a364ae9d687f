"""NG14: a bias before a norm that takes it away.

The mean over the batch is subtracted right after the bias was added, so it has no effect and no gradient. It costs
memory and, decayed or not, nothing else: tidy, not urgent.
Fix: Fold it into the stored mean and drop it:
    model = ng.strip_biases(model, example=batch).model
References: Pytorch-UNet#325, Mask_RCNN#1455, PyTorch tuning guide.
"""

from functools import partial

from normgauge.doctor.finding import Affine, Exam, Sign, Signs, check
from normgauge.surgery import strip_biases

DEAD = 1e-5  # of the weights' gradient: rounding gives 1e-7, a live bias 0.1


@check("info", needs="gradients", exactness="exact")
def _look(exam: Exam) -> Signs:
    if exam.train is None:
        return
    gradients = exam.train.gradients
    readers = {call.producer for call in exam.train.norms if call.kind in ("batch", "instance") and call.own}
    for name in readers - {""}:
        module = exam.modules[name]
        bias, weight = gradients.get(f"{name}.bias"), gradients.get(f"{name}.weight")
        if isinstance(module, Affine) and bias is not None and weight is not None and float(weight.norm()) > 0:
            share = float(bias.norm() / weight.norm())
            if share < DEAD:
                strip = partial(strip_biases, **exam.operation)
                yield Sign(name, f"its gradient is {share:.1g} of the weights'", 1e-3, repair=strip)
