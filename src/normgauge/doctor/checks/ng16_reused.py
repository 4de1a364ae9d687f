"""NG16: one BatchNorm for inputs that differ.

The layer is called several times in a pass on differently distributed inputs, each normalized by its own statistics.
Eval uses the mixture of both, which fits neither; reuse on alike inputs would be harmless.
Fix: Statistics of their own for each use, gains shared if you like:
    self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(uses))
References: pytorch#1738, pytorch#8985, darts#28, ganhacks#9.
"""

from normgauge.doctor.finding import Exam, NormCall, Sign, Signs, check
from normgauge.doctor.probes.statistics import FAR, call_gap


@check("warning", needs="data")
def _look(exam: Exam) -> Signs:
    uses: dict[str, list[NormCall]] = {}
    for call in exam.train.norms if exam.train else []:
        if call.kind == "batch" and call.own and call.stored is not None:
            uses.setdefault(call.where, []).append(call)
    for name, calls in uses.items():
        gap, floor = max((call_gap(calls[0], other) for other in calls[1:]), default=(0.0, 0.0))
        if gap > max(FAR, 3 * floor):
            yield Sign(name, f"{len(calls)} calls in a pass, whose means are {gap:.2g} deviations apart", gap)
