"""NG04: half-frozen: batch statistics in training, stale ones in eval.

track_running_stats was set to False after construction: training uses the batch and updates nothing, eval uses what
was stored long ago. The two modes drift apart with every step.
Fix: Track again and recalibrate, or freeze for good:
    module.track_running_stats = True
References: pytorch#20967, pytorch#37823, Lightning#15063.
"""

from normgauge.doctor.finding import Exam, NormBase, Sign, Signs, check, setting


@check("warning", exactness="state_only")
def _look(exam: Exam) -> Signs:
    for name, module in exam.modules.items():
        if isinstance(module, NormBase) and not module.track_running_stats and module.running_mean is not None:
            said = "track_running_stats is False, yet running_mean is there and eval reads it"
            yield Sign(name, said, 0.9, repair=setting(name, track_running_stats=True))
