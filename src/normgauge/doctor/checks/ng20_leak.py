"""NG20: samples see each other in training.

With batch statistics the output of a sample depends on the others of its batch: intended in most supervised training.
It leaks information in contrastive and meta-learning, breaks per-sample privacy (DP-SGD) and targets in RL.
Fix: Where samples must not meet, normalize each by itself:
    surgery = ng.swap_norms(model, "group", example=batch)
References: moco#137, opacus#319, higher#55, SB3#553.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("info", exactness="changes_function", slow=True)
def _look(exam: Exam) -> Signs:
    gap, rounding = exam.rows("train")
    if gap > max(1e-3, rounding):
        where = next((call.where for call in exam.norms if call.kind == "batch" and call.own), "(model)")
        if where != "(model)":
            yield Sign(where, f"without half of the batch the first sample's output changes by {gap:.2g} of its size")
