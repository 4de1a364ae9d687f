"""NG15: dropout before BatchNorm shifts its variance in eval.

Dropout raises the variance of what BatchNorm sees in training; in eval the stored variance is too large.
Every such layer makes the outputs smaller in eval than in training.
Fix: Put dropout after the last BatchNorm, or recalibrate with dropout off:
    model = ng.recalibrate_norms(model, loader).model
References: arXiv 1801.05134, mlcolvar#267, TMO-Net#12.
"""

from torch import nn

from normgauge.doctor.finding import Affine, Exam, Sign, Signs, check

SHIFT = 1.2  # of the variance: 10 % of the deviation


@check("warning", exactness="state_only")
def _look(exam: Exam) -> Signs:
    if exam.train is None or exam.quiet is None:
        return
    still = {call.where: call for call in exam.quiet.norms}
    for call in exam.train.norms:
        if call.kind != "batch" or not call.own or call.where not in still:
            continue
        for record in exam.train.chain(call.producer):
            if isinstance(record.module, nn.modules.dropout._DropoutNd) and record.module.p:
                ratio = float((call.moments[1] / still[call.where].moments[1].clamp_min(1e-12)).median())
                if ratio > SHIFT:
                    said = (
                        f"{record.name} (p={record.module.p:g}) makes its input's variance {ratio:.2g} times as large"
                    )
                    yield Sign(call.where, said, ratio - 1)
                break
            if not isinstance(record.module, (*Affine, nn.ReLU, nn.Identity)):
                break
