"""NG36: GroupNorm with one channel per group.

num_groups counts the groups, not the channels in one; with as many groups as channels it is InstanceNorm.
That discards the contrast of every channel, which classification usually needs.
Fix: Divide the channels by the size you want:
    nn.GroupNorm(channels // size, channels)
References: 3d-mri#12, mmcv#723, opacus#390.
"""

from torch import nn

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("info", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    for name, module in exam.modules.items():
        if isinstance(module, nn.GroupNorm) and 1 < module.num_groups == module.num_channels:
            yield Sign(name, f"{module.num_groups} groups for {module.num_channels} channels", 0.2)
