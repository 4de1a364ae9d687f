"""NG43: far fewer samples than features in a BatchNorm over samples.

The centred batch spans at most one direction less than it has samples, so most directions of the features are not seen.
Its statistics per feature are right; what depends on their covariance is not.
Fix: A larger batch, or a norm of each sample:
    nn.LayerNorm(features)
References: arXiv 1804.08450, arXiv 1803.08494.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check

TIMES = 16


@check("info", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    for call in {c.where: c for c in exam.norms if c.kind == "batch" and c.own}.values():
        width = call.x.shape[1]
        if call.x.ndim == 2 and call.count * TIMES <= width:
            yield Sign(call.where, f"{call.count} samples for {width} features", 0.1)
