"""NG03: a frozen BatchNorm still moves.

requires_grad=False stops the gradient, not the running statistics, and .eval() on a layer is undone by the next
model.train(). The frozen part therefore becomes another function while the rest trains.
Fix: Freeze the statistics too, so that train() cannot undo it:
    model = ng.freeze_norms(model, example=batch).model
References: pytorch#86590, pytorch#66073, lightly#1438, Lightning#21652.
"""

from functools import partial

from normgauge.doctor.finding import Exam, Sign, Signs, check
from normgauge.doctor.probes.statistics import root_mean_square
from normgauge.surgery import freeze_norms


@check("warning", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    trainable = [name for name, value in exam.model.named_parameters() if value.requires_grad]
    if exam.train is None or not trainable:
        return
    for name, module in exam.batch_norms():
        mean = exam.train.buffers.get(f"{name}.running_mean")
        if mean is None or module.running_mean is None:
            continue
        own = list(module.parameters())
        parent = name.rpartition(".")[0]
        around = own or list((exam.model.get_submodule(parent) if parent else exam.model).parameters())
        frozen = bool(around) and not any(value.requires_grad for value in around)
        undone = exam.training[""] and not exam.training[name]
        moved = root_mean_square((mean - module.running_mean) / (module.running_var + module.eps).sqrt())
        if moved > 0 and (frozen or undone):
            why = "all its parameters are frozen" if frozen else "it came in eval mode, which train() undoes"
            freeze = partial(freeze_norms, where=name, **exam.operation)
            yield Sign(
                name, f"{why}, yet one batch moves its mean by {moved:.2g} deviations", 0.5 + moved, repair=freeze
            )
