"""NG02: a normalizer erases its input.

A statistic of one value takes away that value, and one of two leaves only which is larger. The layer then gives the
same output whatever the network computed.
Fix: Normalize over at least 8 values: fewer groups, or LayerNorm over the features:
    nn.GroupNorm(groups, channels)  # channels * positions / groups >= 8
References: opacus#567, pytorch#19250, pytorch#45687.
"""

from torch import nn

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("error", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    seen: set[str] = set()
    for call in exam.norms:
        if call.where in seen or call.kind in ("batch", "custom") or not call.own:
            continue
        seen.add(call.where)
        least = 2 if call.centred else 1
        spread = float(call.y.double().std()) if call.count == 1 and call.centred else 0.0
        if call.count <= least:
            left = f"outputs vary by {spread:.1g}" if call.count == 1 and call.centred else "only signs are left"
            yield Sign(call.where, f"each statistic is of {call.count} values: {left}", 2.0)
        elif call.count == 3 and call.centred:
            yield Sign(call.where, "each statistic is of 3 values: one degree of freedom is left", 0.6, "warning")
    for record in (exam.train or exam.eval).records if exam.train or exam.eval else []:  # type: ignore[union-attr]
        if isinstance(record.module, nn.InstanceNorm1d) and record.given is not None and record.given.ndim == 2:
            said = f"InstanceNorm1d reads {tuple(record.given.shape)} as one sample of {record.given.shape[0]} channels"
            yield Sign(record.name, said, 1.0, "warning")
