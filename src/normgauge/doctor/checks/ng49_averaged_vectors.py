"""NG49: averaged vectors of spectral norm.

Spectral norm keeps two unit vectors as buffers; their average over training is shorter and points nowhere.
The estimated norm is then too small and the weights too large.
Fix: Do not average these buffers, and iterate anew:
    layer.train()
    for _ in range(20):
        layer(x)  # a power iteration each
References: miles-credit#394, ema-pytorch#29.
"""

from normgauge.doctor.finding import Exam, Sign, Signs, check


@check("error", exactness="state_only")
def _look(exam: Exam) -> Signs:
    for name, buffer in exam.model.named_buffers():
        key = name.rpartition(".")[2]
        spectral = key in ("_u", "_v") or key.endswith(("weight_u", "weight_v"))
        if spectral and buffer.ndim == 1 and buffer.numel() > 1:
            length = float(buffer.double().norm())
            if abs(length - 1) > 1e-3:
                yield Sign(name, f"a unit vector of length {length:.3g}", 1.0)
