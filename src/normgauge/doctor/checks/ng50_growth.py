"""NG50: the residual stream grows with depth.

Each block adds to the stream, and its norm divides by the stream's size: late blocks change less and less.
Some growth is normal (the root of the depth); far more makes late blocks idle and low precision coarse.
Fix: Scale the branches down at the start, or norm their outputs (sandwich):
    nn.init.normal_(block.proj.weight, std=0.02 / (2 * depth) ** 0.5)
References: arXiv 2502.05795, marin#1368, arXiv 2206.00330.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check

TIMES, LARGE = 8.0, 20.0  # times the root of the number of norms; small embeddings grow without harm


@check("warning", needs="data", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    found = exam.eval or exam.train
    rows = [c for c in (found.norms if found else []) if c.kind in ("layer", "rms", "custom")]
    width = max((c.x.shape[-1] for c in rows), default=0)
    stream = [(c.where, float(c.x.double().square().mean().sqrt())) for c in rows if c.x.shape[-1] == width]
    if len(stream) >= 6 and stream[0][1] > 0 and stream[-1][1] > LARGE:
        growth = stream[-1][1] / stream[0][1]
        if growth > TIMES * len(stream) ** 0.5:
            yield Sign(stream[-1][0], f"the stream is {growth:.3g} times as large as at the first norm", growth / 100)
    logits = [size for _, size in found.attention] if found else []
    if len(logits) >= 4 and logits[-1] > 10 and logits[-1] > 10 * max(logits[0], 1.0):
        yield Sign(found.attention[-1][0], f"attention logits grow from {logits[0]:.2g} to {logits[-1]:.2g}", 0.5)  # type: ignore[union-attr]
