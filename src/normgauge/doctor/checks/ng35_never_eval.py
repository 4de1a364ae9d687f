"""NG35: eval mode still uses the statistics of the batch.

A norm that ignores eval() gives a sample other outputs in other company: one image alone is not scored like in a batch.
Intended in some GANs and test-time adaptation; else a hard-coded training=True, or a train() that overrides.
Fix: Pass the flag on:
    F.batch_norm(x, mean, var, weight, bias, training=self.training)
References: smp#128, TRADES#3, examples#514.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("error", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    for call in {c.where: c for c in (exam.eval.norms if exam.eval else [])}.values():
        if call.kind == "batch" and call.own:
            gap, rounding = exam.rows("eval")
            if gap > max(1e-3, rounding):
                meant = call.stored is None
                said = f"without half of the batch the first sample's output changes by {gap:.2g} of its size"
                yield Sign(call.where, said, gap, "warning" if meant else "error")
