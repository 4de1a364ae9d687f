"""NG01: too few values per channel for batch statistics.

Mean and variance of so few values are mostly noise, and of two values all that is left is a sign. What counts is the
batch of one device times the positions, also in the last, smaller batch of an epoch.
Fix: Use a larger batch, drop_last=True, or a norm without batch statistics:
    surgery = ng.swap_norms(model, "group", example=batch)
References: pytorch#7716, mmsegmentation#272, chemprop#680.
"""

import math

from torch.utils.data import DataLoader

from normgauge.doctor.finding import Exam, Sign, Signs, check

FEW = 16  # values per channel: the batch variance has a relative deviation of 0.36


@check("warning", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    if exam.train is None and any("more than 1 value per channel" in note for note in exam.notes):
        single = [call.where for call in exam.norms if call.kind == "batch" and call.count < 2]
        yield Sign([*single, "(model)"][0], "one value per channel: train mode raises", 2.0, "error")
    seen: set[str] = set()
    for call in exam.train.norms if exam.train else []:
        if call.kind != "batch" or not call.own or call.where in seen:
            continue
        seen.add(call.where)
        last, size = _last_batch(exam.loader), max(exam.samples, 1)
        left = call.count * last / size if last else math.inf
        if call.count <= 2:
            yield Sign(call.where, f"{call.count} values per channel: every output is +1 or -1", 1.5, "error")
        elif call.count < FEW:
            noise = math.sqrt(2 / (call.count - 1))
            yield Sign(
                call.where, f"{call.count} values per channel: its variance is off by {noise:.0%} typically", noise
            )
        elif left < 2:
            yield Sign(call.where, f"the last batch of {last} leaves one value per channel: it raises", 1.2, "error")
        elif left < FEW / 2:
            yield Sign(call.where, f"the last batch of {last} leaves {left:.0f} values per channel", 0.5)


def _last_batch(loader: object) -> int:
    """Return the size of a smaller last batch, 0 where there is none."""
    if not isinstance(loader, DataLoader) or loader.drop_last or not loader.batch_size:
        return 0
    try:
        return len(loader.dataset) % loader.batch_size  # type: ignore[arg-type]
    except TypeError:  # a data set without a length
        return 0
