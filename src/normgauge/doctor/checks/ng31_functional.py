"""NG31: torch.func refuses this BatchNorm in train mode.

grad, vmap and jvp of torch.func cannot write running statistics in place, so per-sample gradients and ensembles raise.
Harmless unless you use them.
Fix: Let the layers keep no statistics there, or use norms without batch statistics:
    torch.func.replace_all_batch_norm_modules_(model)
References: functorch#384, pytorch#85533.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("info", exactness="changes_function", slow=True)
def _look(exam: Exam) -> Signs:
    tracked = [name for name, module in exam.batch_norms() if module.track_running_stats]
    wrapped = any(hasattr(value, "grad_sample") for value in exam.model.parameters())
    if tracked:
        said = f"{len(tracked)} layers update buffers in place" + (
            " and parameters carry per-sample gradients" if wrapped else ""
        )
        yield Sign(tracked[0], said, 0.5 if wrapped else 0.0, "warning" if wrapped else "info")
