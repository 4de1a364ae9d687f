"""NG47: a norm that is never called, or without effect.

It is built, trained by nobody and saved in every checkpoint, while the activations it was meant for go unnormalized.
Usually a line of the forward was forgotten, or its result is not used.
Fix: Call it where it belongs, or delete it:
    x = self.norm(x)
References: modelzoo#85, LA_MIL#3, timm#1851.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check
from normgauge.network import role_of


@check("warning", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    if exam.train is None and exam.eval is None:
        return
    called = {name for p in (exam.train, exam.eval) if p is not None for name in p.blocks}
    functional = {n for call in exam.norms for n in call.parameters}
    for name, module in exam.modules.items():
        own = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
        norm = role_of(module) == "normalizer" and "parametriz" not in name and not any(module.children())
        parent = name.rpartition(".")[0] or "(model)"
        if norm and name not in called and own and parent in called and not functional & set(own):
            yield Sign(name, f"{type(module).__name__} is not called in either mode", 0.8)
    for name, call in exam.gains.items():
        slope = None if exam.train is None else exam.train.gradients.get(name)
        if exam.train is not None and exam.train.gradients and slope is None and call.module is not None:
            yield Sign(call.where, f"it is called, and the loss does not depend on {name}", 0.7)
