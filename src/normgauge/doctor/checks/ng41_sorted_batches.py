"""NG41: batches are not drawn alike.

The batches of the loader differ by far more than chance: sorted by class, by source or by length.
Batch statistics then tell the network which kind of batch it is in, and stored ones fit no batch.
Fix: Shuffle:
    DataLoader(dataset, batch_size=64, shuffle=True)
References: arXiv 2105.07576, arXiv 1702.03275.
"""

import torch
from torch import Tensor

from normgauge.doctor.finding import Exam, Sign, Signs, check
from normgauge.objective import take, tensors

RATIO = 6.0  # variance of the batches' means over what chance gives, the median over features


@check("warning", needs="loader")
def _look(exam: Exam) -> Signs:
    if not any(call.kind == "batch" for call in exam.norms):
        return
    batches = [list(tensors(batch)) for batch in take(exam.loader, 8)]
    inputs = [b[0].double().flatten(1)[:, :4096] for b in batches if b and b[0].is_floating_point() and len(b[0]) > 1]
    inputs = [x for x in inputs if x.shape[1:] == inputs[0].shape[1:]]
    labels = [b[1] for b in batches if len(b) > 1 and b[1].ndim == 1 and not b[1].is_floating_point()]
    ratio, pure = 0.0, 0.0
    if len(inputs) > 2:
        means, within = torch.stack([x.mean(0) for x in inputs]), torch.stack([x.var(0) for x in inputs]).mean(0)
        ratio = float((means.var(0) * len(inputs[0]) / within.clamp_min(1e-12)).median())
    if len(labels) > 2:
        pure = _purity(labels)
    if ratio > RATIO or pure > 0.5:
        said = f"means of {len(batches)} batches vary {ratio:.2g} times as much as chance allows"
        said += f"; {pure:.0%} of them hold one class only" if pure else ""
        where = next(call.where for call in exam.norms if call.kind == "batch")
        yield Sign(where, said, max(ratio / RATIO, pure))


def _purity(labels: list[Tensor]) -> float:
    """Return the share of batches of at least four with one class, where there are several classes."""
    single = [len(own.unique()) == 1 for own in labels if len(own) > 3]
    return sum(single) / len(single) if single and len(torch.cat(labels).unique()) > 1 else 0.0
