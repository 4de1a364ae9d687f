"""NG27: weight_norm or spectral_norm of the old kind.

The hooks of torch.nn.utils.weight_norm are deprecated: they recompute at every call, do not copy, and name parameters
weight_g and weight_v. Checkpoints and libraries now expect parametrizations.

Fix: Move to parametrizations; values stay:
    nn.utils.remove_weight_norm(layer)
    nn.utils.parametrizations.weight_norm(layer)

References: pytorch#103001, transformers#26796, darts#2387.
"""

from torch import nn
from torch.nn.utils import parametrizations, remove_weight_norm
from torch.nn.utils.weight_norm import WeightNorm

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("info", exactness="exact")
def _look(exam: Exam) -> Signs:
    for name, module in exam.modules.items():
        for hook in module._forward_pre_hooks.values():
            if type(hook).__name__ in ("WeightNorm", "SpectralNorm"):

                def repair(model: nn.Module, name: str = name, hook: WeightNorm = hook) -> None:
                    layer = model.get_submodule(name)
                    remove_weight_norm(layer, hook.name)
                    parametrizations.weight_norm(layer, hook.name, hook.dim)

                old = repair if isinstance(hook, WeightNorm) else None
                yield Sign(name, f"a {type(hook).__name__} hook on {hook.name!r}", repair=old)
