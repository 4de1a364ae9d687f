"""NG08: averaged weights with statistics that are not theirs.

The weights are an average over training, the statistics are those of the last model, which nobody averaged. Contested
for slow moving averages (timm#106 found them good enough): measure both.
Fix: Recalibrate the averaged model, or average buffers as well:
    model = ng.recalibrate_norms(averaged, loader).model
    averaged = AveragedModel(model, use_buffers=True)  # from the start
References: timm#106, timm#224, pytorch#49082, Lightning#8811.
"""

from torch.optim.swa_utils import AveragedModel

from normgauge.doctor.finding import Exam, NormBase, Sign, Signs, check


@check("warning", exactness="state_only")
def _look(exam: Exam) -> Signs:
    for name, module in exam.modules.items():
        if isinstance(module, AveragedModel) and not module.use_buffers and int(module.n_averaged) > 1:
            tracked = [m for m in module.modules() if isinstance(m, NormBase) and m.running_mean is not None]
            if tracked:
                said = (
                    f"{int(module.n_averaged)} models averaged, {len(tracked)} layers with statistics of the last one"
                )
                yield Sign(name, said, 0.7)
