"""NG26: spectral or weight norm right before a norm that undoes it.

BatchNorm divides by the scale that the parametrization has just set, so the bound it was meant to give is gone.
It costs a power iteration per step and changes nothing.
Fix: Drop one of the two; for a Lipschitz bound, drop the BatchNorm:
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
References: Self-Attention-GAN#9, pytorch-spectral-norm-gan#17, sngan_projection#38.
"""

from torch.nn.utils import parametrize

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("warning", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    for call in {c.where: c for c in exam.norms}.values():
        module = exam.modules.get(call.producer)
        if module is None or call.kind not in ("batch", "instance") or not call.own:
            continue
        kinds = (
            [type(p).__name__ for p in module.parametrizations.weight] if parametrize.is_parametrized(module) else []
        )
        kinds += [type(hook).__name__ for hook in module._forward_pre_hooks.values()]
        spectral = any("spectral" in kind.lower() for kind in kinds)
        if spectral or any("weightnorm" in kind.lower() for kind in kinds):
            said = f"{call.where} divides by the scale that {'spectral' if spectral else 'weight'}_norm sets here"
            yield Sign(call.producer, said, 0.6 if spectral else 0.1, "warning" if spectral else "info")
