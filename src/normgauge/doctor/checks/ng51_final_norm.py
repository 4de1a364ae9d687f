"""NG51: the last norm is missing, or placements are mixed.

Blocks that norm their inputs leave a stream nobody has normalized: the head reads it at whatever size it has grown to.
Blocks that place norms differently let the stream jump in size between them.
Fix: Norm the stream before the head:
    logits = head(nn.LayerNorm(width)(x))
References: arXiv 2002.04745, pytorch#24930, NeMo#2197.
"""

import re

from normgauge.doctor.finding import Affine, Exam, Sign, Signs, check


@check("warning", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    found = exam.eval or exam.train
    rows = [c for c in (found.norms if found else []) if c.kind in ("layer", "rms", "custom") and c.module is not None]
    if found is None or len(rows) < 3:
        return
    last = rows[-1]
    block = re.match(r"(.*\.)?(\d+)\.", last.where + ".")
    if block is None or not int(block[2]) or last.where == block[0].rstrip("."):
        return
    before = f"{block[1] or ''}{int(block[2]) - 1}{last.where[len(block[0]) - 1 :]}"
    made = found.blocks.get(block[0].rstrip("."))
    behind = [r for r in found.records if r.number > last.number and isinstance(r.module, Affine)]
    outside = [r for r in behind if not r.name.startswith(block[0])]
    inside = [r for r in behind if r.name.startswith(block[0])]
    if made is None or before not in {c.where for c in rows} or not inside or not outside:
        return
    if made.shape == last.y.shape and bool((made.detach() == last.y).all()):
        return  # the block ends in its norm
    size = float(made.detach().double().square().mean().sqrt())
    yield Sign(
        outside[0].name, f"it reads a stream of size {size:.2g} that no norm follows; the last is {last.where}", 0.6
    )
