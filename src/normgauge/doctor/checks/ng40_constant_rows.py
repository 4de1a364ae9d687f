"""NG40: rows without any spread reach a norm.

A row of equal values has variance zero: the norm gives its bias, and multiplies gradients by up to 1/sqrt(eps).
Identical samples in a batch do the same to batch statistics. Padding that is masked later is harmless.
Fix: Mask such rows before the norm, or find who makes them:
    x = x + 0 * mask  # look at (x.std(-1) == 0).nonzero()
References: Fast-LLM#220, pytorch#41527.
"""

import torch

from normgauge.doctor.finding import Exam, Sign, Signs, check

SHARE = 0.02


@check("warning", needs="data")
def _look(exam: Exam) -> Signs:
    for call in {c.where: c for c in reversed(exam.norms)}.values():
        if call.kind in ("layer", "rms", "l2", "custom") and call.count > 3:
            rows = call.x.double().flatten(0, -2) if call.kind == "custom" else call.x.double().reshape(-1, call.count)
            flat = (rows.amax(1) == rows.amin(1)) if call.kind == "layer" else ~rows.any(1)
            share = float(flat.double().mean())
            if share > SHARE:
                yield Sign(call.where, f"{share:.0%} of its {len(rows)} rows do not vary", share)
                return
    first = next((t for t in (c.x for c in exam.norms if c.kind == "batch")), None)
    if first is not None and len(first) > 3:
        same = 1 - len(torch.unique(first.double().flatten(1), dim=0)) / len(first)
        if same > 0.3:
            where = next(c.where for c in exam.norms if c.kind == "batch")
            yield Sign(where, f"{same:.0%} of the samples of the batch repeat another one", same)
