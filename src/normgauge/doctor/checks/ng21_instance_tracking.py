"""NG21: InstanceNorm with running statistics.

In training every sample is normalized by itself, in eval by an average over samples: another function.
The original style-transfer and CycleGAN code removed the option for that.
Fix: Do not track, and drop the buffers:
    nn.InstanceNorm2d(channels, affine=True, track_running_stats=False)
References: CycleGAN#395, stargan#140, pytorch#58843.
"""

from torch import nn

from normgauge.doctor.finding import Exam, Sign, Signs, check

Instance = nn.modules.instancenorm._InstanceNorm


@check("warning", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    for name, module in exam.modules.items():
        if isinstance(module, Instance) and module.track_running_stats:
            pair = [next((c.y for c in p.norms if c.where == name), None) for p in (exam.quiet, exam.eval) if p]
            gap = 0.0
            if len(pair) == 2 and pair[0] is not None and pair[1] is not None:
                gap = float((pair[0] - pair[1]).norm() / pair[0].norm())

            def repair(model: nn.Module, name: str = name) -> None:
                twin = model.get_submodule(name)
                twin.track_running_stats, twin.running_mean, twin.running_var = False, None, None  # type: ignore[assignment]

            yield Sign(name, f"train and eval outputs differ by {gap:.2g} of their size", 0.5 + gap, repair=repair)
