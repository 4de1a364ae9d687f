"""NG07: BatchNorm momentum counts the other way round.

torch's momentum is the share of the new batch, TensorFlow's that of the old value. With a large one the stored
statistics are those of the last batch, and eval follows its noise.

Fix: Take one minus it, then recalibrate:
    module.momentum = 1 - module.momentum

References: pytorch/vision#8250, pytorch/vision#8312, EfficientNet-PyTorch#3.
"""

from normgauge.doctor.finding import Exam, NormBase, Sign, Signs, check, setting

LARGE, WIDE = 0.5, 0.3  # torch's default is 0.1; TensorFlow's 0.9 to 0.999 means 0.1 to 0.001 here


@check("error", exactness="state_only")
def _look(exam: Exam) -> Signs:
    for name, module in exam.modules.items():
        momentum = getattr(module, "momentum", None)
        if not isinstance(module, NormBase) or not module.track_running_stats or momentum is None:
            continue
        if momentum >= WIDE:
            said = f"momentum {momentum:g}: the stored statistics average about {(2 - momentum) / momentum:.2g} batches"
            wrong = momentum > LARGE
            repair = setting(name, momentum=1 - momentum) if wrong else None
            yield Sign(name, said, momentum, "error" if wrong else "warning", repair)
