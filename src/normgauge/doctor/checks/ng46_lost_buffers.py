"""NG46: parameters travel without their statistics.

Adapters, moving averages and federated updates copy parameters; running statistics are buffers and stay behind.
The receiver evaluates new weights with old statistics.
Fix: Copy buffers as well, or recalibrate the receiver:
    for a, b in zip(target.buffers(), source.buffers()):
        a.copy_(b)
References: peft#1732, PFLlib#260, mean-teacher#9.
"""

from normgauge.doctor.finding import Exam, NormBase, Sign, Signs, check


@check("warning", exactness="state_only")
def _look(exam: Exam) -> Signs:
    def layers(module):  # type: ignore[no-untyped-def]
        return [m for m in module.modules() if isinstance(m, NormBase) and m.running_mean is not None]

    config = getattr(exam.model, "peft_config", None)
    if config is not None and layers(exam.model):
        saved = [n for c in config.values() for n in (getattr(c, "modules_to_save", None) or [])]
        lost = [n for n, m in exam.batch_norms() if m.running_mean is not None and not any(s in n for s in saved)]
        if lost and any(exam.training.get(name) for name in lost):
            yield Sign(lost[0], f"{len(lost)} layers update statistics that the adapter's checkpoint leaves out", 0.7)
    shapes = {
        n: [tuple(p.shape) for p in c.parameters()]
        for n, c in exam.model.named_children()
        if layers(c) and not isinstance(c, NormBase)
    }
    for name, own in shapes.items():
        target, trained = exam.modules[name], [n for n, s in shapes.items() if s == own and n != name]
        if any(p.requires_grad for p in target.parameters()) or not trained:
            continue
        source = exam.modules[trained[0]]
        pairs = list(zip(layers(target), layers(source), strict=False))
        near = sum(
            float((p - q).detach().norm()) for p, q in zip(target.parameters(), source.parameters(), strict=True)
        )
        size = sum(float(q.detach().norm()) for q in source.parameters())
        apart = [
            float(((b.running_mean - a.running_mean) / (b.running_var + b.eps).sqrt()).abs().mean()) for a, b in pairs
        ]
        if near < 0.3 * size and max(apart, default=0.0) > 0.3 and near < 0.3 * max(apart) * size:
            said = f"weights within {near / size:.0%} of {trained[0]}'s, statistics {max(apart):.2g} deviations away"
            yield Sign(name, said, max(apart))
