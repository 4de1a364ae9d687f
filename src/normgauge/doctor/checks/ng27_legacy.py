"""NG27: weight_norm or spectral_norm of the old kind.

The hooks of torch.nn.utils.weight_norm are deprecated: they recompute at every call, do not copy, and name parameters
weight_g and weight_v. Checkpoints and libraries now expect parametrizations.
Fix: Move to parametrizations; values stay:
    model = ng.surgery.migrate_weight_norm(model, example=batch).model
References: pytorch#103001, transformers#26796, darts#2387.
"""

from functools import partial

from normgauge.doctor.finding import Exam, Sign, Signs, check
from normgauge.surgery import migrate_weight_norm


@check("info", exactness="exact")
def _look(exam: Exam) -> Signs:
    for name, module in exam.modules.items():
        for hook in module._forward_pre_hooks.values():
            if type(hook).__name__ in ("WeightNorm", "SpectralNorm"):
                migrate = partial(migrate_weight_norm, **exam.operation)
                yield Sign(name, f"a {type(hook).__name__} hook on {hook.name!r}", repair=migrate)
