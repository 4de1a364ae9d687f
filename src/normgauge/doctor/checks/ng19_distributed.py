"""NG19: statistics of one process only.

Under DistributedDataParallel every process normalizes by its own share of the batch and keeps its own statistics.
With a small share they are noise, and without broadcast the processes evaluate different networks.
Fix: Share the statistics, or average them before eval:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
References: pytorch#22095, timm#110, mmdetection#4582, fvcore#152.
"""

from torch import nn

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("warning", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    wrapper = exam.patient.wrapper
    if not isinstance(wrapper, nn.parallel.DistributedDataParallel):
        return
    own = [(n, m) for n, m in exam.batch_norms() if not isinstance(m, nn.SyncBatchNorm) and m.running_mean is not None]
    counts = {call.where: call.count for call in exam.norms if call.kind == "batch"}
    if own and not wrapper.broadcast_buffers:
        yield Sign(own[0][0], f"broadcast_buffers=False: {len(own)} layers keep other statistics on every process", 0.8)
    for name, _ in own:
        if counts.get(name, 99) < 32:
            yield Sign(name, f"{counts[name]} values per channel on this process, not shared", 0.5)
