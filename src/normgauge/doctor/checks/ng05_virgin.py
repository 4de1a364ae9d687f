"""NG05: stored statistics were never updated.

Mean 0 and variance 1 are what the constructor wrote, so in eval mode the layer does not normalize. Causes: a
checkpoint without buffers, momentum 0, a teacher that copies parameters only, no pass in train mode.
Fix: Measure them on training data:
    model = ng.recalibrate_norms(model, loader).model
References: Lightning#14866, mean-teacher#9, keras-io#198, higher#55.
"""

from normgauge.doctor.finding import Exam, NormBase, Sign, Signs, check
from normgauge.doctor.probes.statistics import is_virgin, stored_gap


@check("error", exactness="state_only")
def _look(exam: Exam) -> Signs:
    calls = {call.where: call for call in (exam.quiet.norms if exam.quiet else []) if call.stored is not None}
    for name, module in exam.modules.items():
        if not isinstance(module, NormBase) or module.running_mean is None or module.running_var is None:
            continue
        stored = (module.running_mean, module.running_var)
        call, fresh = calls.get(name), is_virgin(stored)
        shift, ratio = stored_gap(call)[:2] if call is not None and call.kind == "batch" else (0.0, 0.0)
        off = f"the data are {shift:.2g} deviations away, with variance {2.718281828**ratio:.2g} times or a fraction"
        if module.momentum == 0 and module.track_running_stats:
            yield Sign(
                name, f"momentum 0: nothing is ever stored; {off}", 1 + shift + ratio, "error" if fresh else "warning"
            )
        elif fresh and exam.trained and max(shift, ratio) > 0.2:
            count = 0 if module.num_batches_tracked is None else int(module.num_batches_tracked)
            said = f"mean 0 and variance 1 after {count} counted batches in a trained model; {off}"
            yield Sign(name, said, 1 + shift + ratio, repair=exam.recalibration)
