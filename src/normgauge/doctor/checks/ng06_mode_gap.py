"""NG06: eval mode is another network than train mode.

On the same batch, with dropout off, the stored statistics are far from the batch's own. The first layer named is
where it begins: every layer before it agrees.
Fix: Recalibrate on training data, and look why they are off (other findings name causes):
    model = ng.recalibrate_norms(model, loader).model
References: pytorch#4741, pytorch#5406, vision#2079.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check
from normgauge.doctor.probes.statistics import excess, is_virgin, stored_gap
from normgauge.network import first_tensor

FAR = 2.0  # limits; one limit is half a stored deviation, or a factor of two of it


@check("warning", needs="data", exactness="state_only")
def _look(exam: Exam) -> Signs:
    quiet, still = exam.quiet, exam.eval
    if quiet is None or still is None or not exam.trained:
        return
    a, b = first_tensor(quiet.outputs), first_tensor(still.outputs)
    moved = float((a - b).norm() / a.norm()) if a is not None and b is not None and a.shape == b.shape else 0.0
    for call in quiet.norms:
        if call.kind != "batch" or call.stored is None or not call.own or call.count < 16 or is_virgin(call.stored):
            continue
        off = excess(call, getattr(call.module, "momentum", 0.1))
        if off > FAR:
            shift, ratio, floor = stored_gap(call)
            said = (
                f"its input is {shift:.2g} stored deviations off (sampling gives {floor:.2g}), its variance by a factor"
                f" of {2.718281828**ratio:.2g}; the loss is {quiet.loss:.3g} in train and {still.loss:.3g} in eval mode"
            )
            proved = exam.patient.targets and still.loss > 2 * quiet.loss + 0.5 and moved > 0.5
            yield Sign(call.where, said, off, "error" if proved else "warning", exam.recalibration)
            return
