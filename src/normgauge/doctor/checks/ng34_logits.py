"""NG34: attention logits or a norm's input are huge.

Softmax of logits beyond 50 is one-hot: its gradient is gone, and a small change of the weights makes the loss jump.
A stream a thousand times the size it started with does the same to the norms that read it.
Fix: Normalize queries and keys, or bound the logits; lower the rate until then:
    q, k = (F.rms_norm(t, t.shape[-1:]) for t in (q, k))
References: arXiv 2302.05442, marin#1368, PixelDiT#14.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check

LOGIT, STREAM = 50.0, 1e3


@check("warning", needs="data", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    found = exam.eval or exam.train
    if found is None:
        return
    where, most = max(found.attention, key=lambda item: item[1], default=("", 0.0))
    if most > LOGIT:
        yield Sign(where, f"the largest attention logit is {most:.3g}", most / LOGIT)
    sizes = [(c.where, float(c.x.double().square().mean().sqrt())) for c in found.norms if c.kind != "batch"]
    if len(sizes) > 2:
        where, most = max(sizes, key=lambda item: item[1])
        if most > STREAM * max(sizes[0][1], 1e-3):
            yield Sign(where, f"its input has size {most:.3g}, the first norm's {sizes[0][1]:.2g}", 0.5)
