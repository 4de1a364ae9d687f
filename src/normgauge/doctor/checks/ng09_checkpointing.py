"""NG09: activation checkpointing updates the statistics twice.

The forward pass is computed again in the backward pass, and BatchNorm counts both. Its memory is half as long as the
momentum says; nothing else changes.
Fix: Take the momentum that gives the same memory:
    module.momentum = 1 - (1 - module.momentum) ** 0.5
References: pytorch#96136, fairscale#1035, Samudra#572.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check, setting


@check("warning", exactness="state_only")
def _look(exam: Exam) -> Signs:
    for name, (calls, updates) in exam.step.items():
        momentum = exam.modules[name].momentum
        if updates > calls > 0 and momentum:
            said = f"{calls} calls in the forward pass, {updates} updates in the step"
            yield Sign(name, said, 0.3, repair=setting(name, momentum=1 - (1 - momentum) ** (calls / updates)))
