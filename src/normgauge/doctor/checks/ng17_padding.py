"""NG17: padding enters the statistics.

Positions that only fill up shorter sequences are counted in mean and variance over positions.
The outputs of real positions then depend on how long the longest sequence of the batch is.
Fix: Leave them out of the statistics, or normalize each position by itself:
    nn.LayerNorm(channels)  # over channels; or a masked BatchNorm
References: pytorch#70529, pytorch#81985, deepspeech.pytorch#312.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("warning", needs="data")
def _look(exam: Exam) -> Signs:
    for call in {c.where: c for c in reversed(exam.norms)}.values():
        if call.kind not in ("batch", "instance", "group") or call.x.ndim != 3 or not call.own or call.x.shape[2] < 4:
            continue
        same = (call.x == call.x[:, :, -1:]).all(1).flip(1)  # positions that repeat the last one, from the end
        tails = same.int().cumprod(1).sum(1)
        share = float((tails - 1).clamp_min(0).sum()) / (call.x.shape[0] * call.x.shape[2])
        if share > 0.05 and int(tails.max()) > int(tails.min()):
            yield Sign(
                call.where, f"{share:.0%} of the positions repeat the last one: tails of {int(tails.max())}", share
            )
