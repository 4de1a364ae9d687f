"""NG22: normalized along another axis than the features.

The layer before writes its features to one axis, the norm takes another one for its channels; sizes happen to agree.
Statistics then mix what should be apart and keep apart what should be mixed.
Fix: Move the features to where the norm looks for them:
    y = norm(x.transpose(1, -1)).transpose(1, -1)
References: ConvNeXt#112, pytorch#71465, AS-MLP#6.
"""

from torch import nn

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("warning", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    for call in {c.where: c for c in exam.norms}.values():
        maker = (exam.train or exam.eval).chain(call.producer) if call.producer else ()  # type: ignore[union-attr]
        for record in maker:
            if isinstance(record.module, nn.Linear) and call.kind in ("batch", "instance") and call.x.ndim == 3:
                yield Sign(
                    call.where, f"{record.name} writes features to the last axis, the channels here are axis 1", 1.0
                )
            elif isinstance(record.module, nn.modules.conv._ConvNd) and call.kind in ("layer", "rms"):
                if call.count == call.x.shape[-1] and call.x.ndim > 3:
                    yield Sign(
                        call.where, f"{record.name} writes channels to axis 1, the norm is over the last one", 1.0
                    )
            elif not isinstance(record.module, (nn.ReLU, nn.GELU, nn.SiLU, nn.Identity, nn.modules.dropout._DropoutNd)):
                continue
            else:
                continue
            break
