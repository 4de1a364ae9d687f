"""NG07: BatchNorm momentum counts the other way round.

torch's momentum is the share of the new batch, TensorFlow's that of the old value. With a large one the stored
statistics are those of the last batch, and eval follows its noise.
Fix: Take one minus it, then recalibrate:
    module.momentum = 1 - module.momentum
References: pytorch/vision#8250, pytorch/vision#8312, EfficientNet-PyTorch#3.
"""

from normgauge.doctor.finding import Exam, NormBase, Sign, Signs, check, setting
from normgauge.doctor.probes.statistics import sampling_floor

LARGE, WIDE, NOISE = 0.5, 0.3, 0.3  # torch's default is 0.1; TensorFlow's 0.9 to 0.999 means 0.1 to 0.001 here


@check("warning", exactness="state_only")
def _look(exam: Exam) -> Signs:
    calls = {call.where: call for call in exam.norms if call.kind == "batch" and len(call.x) > 1}
    for name, module in exam.modules.items():
        momentum = getattr(module, "momentum", None)
        if not isinstance(module, NormBase) or not module.track_running_stats or not momentum or momentum < WIDE:
            continue
        batches, call, wrong = (2 - momentum) / momentum, calls.get(name), momentum > LARGE
        noise = sampling_floor(call, call.moments[1], 1e9) / batches**0.5 if call is not None else 0.0
        said = f"momentum {momentum:g}: the stored mean is that of {batches:.2g} batches, off by {noise:.2g} deviations"
        fix = setting(name, momentum=1 - momentum) if wrong else None
        yield Sign(name, said, momentum, "error" if wrong and noise > NOISE else None, fix)
