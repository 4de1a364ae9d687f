"""NG28: folding this BatchNorm would change another path.

The layer before it is used more than once, and not every use is followed by this BatchNorm.
Fusing tools that look at one use scale the weights for all of them, silently.
Fix: Fold with proof, or leave these two apart:
    ng.fold_norms(model, example=batch).refused  # names such pairs
References: pytorch#197539, pytorch#104593, pytorch#122070.
"""

from normgauge.doctor.finding import Affine, Exam, Sign, Signs, check


@check("info")
def _look(exam: Exam) -> Signs:
    for call in {c.where: c for c in exam.norms if c.kind == "batch" and c.producer}.values():
        uses = (exam.train or exam.eval).calls(call.producer)  # type: ignore[union-attr]
        followed = sum(c.producer == call.producer and c.where == call.where for c in exam.norms)
        if isinstance(exam.modules[call.producer], Affine) and len(uses) > followed:
            yield Sign(call.producer, f"called {len(uses)} times, {followed} times before {call.where}", 0.1)
