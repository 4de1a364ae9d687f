"""NG24: gradients explode through a deep BatchNorm network.

Without skips every BatchNorm layer multiplies the gradient by about 1.2 at the start, whatever the weights' scale.
Fifty layers make 1e4: the first layers take steps of noise, the last hardly move.
Fix: Add skip connections, or begin with a small gain in each branch:
    nn.init.zeros_(block.norm.weight)  # with a skip around the block
References: arXiv 1902.08129, arXiv 2310.02012.
"""

import math

from normgauge.doctor.finding import Exam, Sign, Signs, check

FACTOR, RATE = 100.0, 1.1  # from the last layer to the first, and per layer


@check("warning", needs="gradients", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    if exam.train is None or not any(call.kind == "batch" and call.own for call in exam.train.norms):
        return
    sizes = [(name, float(g.double().norm())) for name, g in exam.train.slopes]
    sizes = [(name, size) for name, size in sizes if size > 0 and math.isfinite(size)]
    if len(sizes) < 10:
        return
    logs, middle = [math.log(size) for _, size in sizes], (len(sizes) - 1) / 2
    spread = sum((i - middle) ** 2 for i in range(len(logs)))
    slope = sum((i - middle) * value for i, value in enumerate(logs)) / spread
    total = math.exp(-slope * (len(sizes) - 1))
    if math.exp(-slope) > RATE and total > FACTOR:
        said = (
            f"the gradient grows {math.exp(-slope):.3g} times per layer towards the input, {total:.2g} in {len(sizes)}"
        )
        yield Sign(sizes[0][0], said, math.log10(total))
