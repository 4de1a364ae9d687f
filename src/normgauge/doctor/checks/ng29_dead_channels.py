"""NG29: channels that are switched off, or that almost never vary.

A gain of zero removes a channel; a channel whose variance is below eps turns a shift of 0.1 into one of 30 in eval.
Gains of zero at the end of every branch are a known start and are not counted.
Fix: Take dead channels away, with proof:
    surgery = ng.prune_norms(model, "gamma", 0.1, example)
References: network-slimming#46, Fast-LLM#220, simsiam#28.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check

SHARE = 0.1


@check("info", needs="data", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    for call in {c.where: c for c in exam.norms}.values():
        weight = getattr(call.module, "weight", None)
        if weight is not None and weight.ndim and weight.numel() > 1 and exam.identity(call).gain == "w":
            size = weight.detach().abs().double()
            dead = float((size < 1e-3 * size.median()).double().mean())
            if dead > SHARE and float(size.max()) > 0:
                yield Sign(call.where, f"{dead:.0%} of its gains are below a thousandth of the median", dead)
        if call.kind == "batch" and call.stored is not None:
            stored = call.stored[1].double()
            flat = float(((stored < call.eps) & (stored < 1e-4 * stored.max())).double().mean())
            if flat > SHARE:
                reach = 1 / call.eps**0.5
                said = f"{flat:.0%} of its channels have a variance below eps: eval multiplies shifts by {reach:.0f}"
                yield Sign(call.where, said, 0.5 + flat, "warning")
