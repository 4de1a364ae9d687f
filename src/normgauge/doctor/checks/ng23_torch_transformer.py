"""NG23: a default of torch's Transformer that is not what one expects.

By default nn.Transformer puts norms behind the additions, where deep stacks need warm-up. nn.TransformerEncoder copies
one layer, so that all start with the same weights, and with norm_first=True it has no last norm unless given one.
Fix: Say what you want, and draw the copies anew:
    nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width))
References: pytorch#55270, pytorch#24930, pytorch#50086, arXiv 2002.04745.
"""

import torch
from torch import nn

from normgauge.doctor.finding import Exam, Sign, Signs, check

Stack = (nn.TransformerEncoder, nn.TransformerDecoder)
DEEP = 12  # layers with norms behind the additions that train without warm-up


@check("info", exactness="changes_function")
def _look(exam: Exam) -> Signs:
    for name, module in exam.modules.items():
        if not isinstance(module, Stack) or len(module.layers) < 2:
            continue
        first, second = module.layers[0], module.layers[1]
        if all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True)):
            yield Sign(name, f"all {len(module.layers)} layers have the same weights", 0.3)
        if getattr(first, "norm_first", True) and module.norm is None and (exam.train or exam.eval) is not None:
            made = (exam.train or exam.eval).blocks.get(name)  # type: ignore[union-attr]
            size = 0.0 if made is None else float(made.detach().double().square().mean().sqrt())
            yield Sign(name, f"norm_first without a last norm: its outputs have size {size:.2g}", size, "warning")
        if not getattr(first, "norm_first", True) and len(module.layers) > DEEP:
            yield Sign(name, f"{len(module.layers)} layers with norms behind the additions: warm up the rate", 0.4)
        if not getattr(first, "norm_first", True) and module.norm is not None:
            yield Sign(name, "its last layer ends in a norm, and a second one follows", 0.1)
