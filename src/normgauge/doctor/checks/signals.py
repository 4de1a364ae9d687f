"""Checks of sizes of activations, gains, logits and gradients."""

import copy
import math

import torch

from normgauge.doctor.finding import Exam, Sign, Signs, check
from normgauge.network import KeepDouble, first_tensor

HALF = (torch.float16, torch.bfloat16)
FACTOR, RATE = 100.0, 1.1  # from the last layer to the first, and per layer
SHARE = 0.1  # of the channels
LOGIT, STREAM = 50.0, 1e3
TIMES, LARGE = 8.0, 20.0  # times the root of the number of norms; small embeddings grow without harm


@check("warning", exactness="state_only")
def precision(exam: Exam) -> Signs:
    """NG11: a normalizer loses its numbers to low precision.

    Squares of half-precision numbers overflow above 256 and vanish below 1e-4; an eps below the smallest is zero. The
    output is then 0, infinite or NaN, or running statistics stop moving, without a word.
    Fix: Keep statistics, gains and the computation of norms in float32, whatever the model's type:
        module.float()  # and cast its input: module(x.float()).to(x.dtype)
    References: pytorch#32137, pytorch#66707, diffusers#13316, minimind#301.
    """
    for call in {call.where: call for call in exam.norms}.values():
        stored = getattr(call.module, "running_var", None)
        if stored is not None and stored.dtype in HALF:
            said = f"running statistics in {stored.dtype}: steps below {torch.finfo(stored.dtype).eps / 2:.1g} are lost"
            yield Sign(call.where, said, 0.5)
        if call.y.dtype not in HALF or not torch.isfinite(call.x).all():
            continue
        if not torch.isfinite(call.y).all():
            yield Sign(call.where, f"finite inputs in {call.x.dtype} give infinite or NaN outputs", 3.0, "error")
        elif call.eps < torch.finfo(call.x.dtype).smallest_normal / 1024 and call.kind == "l2":
            yield Sign(call.where, f"eps {call.eps:g} is zero in {call.x.dtype}: a row of zeros gives NaN", 0.6)
        elif call.module is not None and call.own:
            twin = copy.deepcopy(call.module).double().train(call.module.training)
            with torch.no_grad(), KeepDouble():
                truth = first_tensor(twin(call.x.double()))
            gap = float((call.y.double() - truth).abs().max() / truth.abs().max())  # type: ignore[union-attr, operator]
            if not gap <= 8 * torch.finfo(call.y.dtype).eps:
                said = f"its outputs are {gap:.2g} off those in float64"
                yield Sign(call.where, said, 2.0, None if gap <= 0.05 else "error")


@check("warning", needs="gradients", exactness="changes_function")
def explosion(exam: Exam) -> Signs:
    """NG24: gradients explode through a deep BatchNorm network.

    Without skips every BatchNorm layer multiplies the gradient by about 1.2 at the start, whatever the weights' scale.
    Fifty layers make 1e4: the first layers take steps of noise, the last hardly move.
    Fix: Add skip connections, or begin with a small gain in each branch:
        nn.init.zeros_(block.norm.weight)  # with a skip around the block
    References: arXiv 1902.08129, arXiv 2310.02012.
    """
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
        rate = math.exp(-slope)
        said = f"the gradient grows {rate:.3g} times per layer towards the input, {total:.2g} in {len(sizes)}"
        yield Sign(sizes[0][0], said, math.log10(total))


@check("info", needs="data", exactness="changes_function")
def dead_channels(exam: Exam) -> Signs:
    """NG29: channels that are switched off, or that almost never vary.

    A gain of zero removes a channel; a channel whose variance is below eps turns a shift of 0.1 into one of 30 in eval.
    Gains of zero at the end of every branch are a known start and are not counted.
    Fix: Take dead channels away, with proof:
        surgery = ng.prune_norms(model, "gamma", 0.1, example)
    References: network-slimming#46, Fast-LLM#220, simsiam#28.
    """
    for call in {c.where: c for c in exam.norms}.values():
        weight = getattr(call.module, "weight", None)
        if weight is not None and weight.ndim and weight.numel() > 1 and exam.identity(call).gain == "w":
            size = weight.detach().abs().double()
            dead = float((size < 1e-3 * size.median()).double().mean())
            if dead > SHARE and float(size.max()) > 0:
                yield Sign(call.where, f"{dead:.0%} of its gains are below a thousandth of the median", dead)
        if call.kind == "batch" and call.stored is not None:
            stored = call.stored[1].double()
            flat = float(((stored < call.eps) & (stored < 1e-4 * stored.max())).double().mean())
            if flat > SHARE:
                reach = 1 / call.eps**0.5
                said = f"{flat:.0%} of its channels have a variance below eps: eval multiplies shifts by {reach:.0f}"
                yield Sign(call.where, said, 0.5 + flat, "warning")


@check("warning", exactness="changes_function")
def initialization(exam: Exam) -> Signs:
    """NG30: gains that were never set to one.

    Gains start at 1 (or at 0 where the layer computes 1 + w). Drawn like weights, left uninitialised, or started by the
    other convention they scale every activation by the wrong factor.
    Fix: Reset the norms before training; do not touch a trained model:
        module.reset_parameters()
    References: llm-foundry#1745, TransformerEngine#2528, transformers#45050.
    """
    for call in {c.where: c for c in exam.norms}.values():
        weight = getattr(call.module, "weight", None)
        if weight is None or not weight.is_floating_point() or not weight.ndim or weight.numel() < 2:
            continue
        if not torch.isfinite(weight).all():
            yield Sign(call.where, f"{int((~torch.isfinite(weight)).sum())} gains are infinite or NaN", 3.0, "error")
            continue
        law = exam.identity(call).gain
        mean, spread = float(weight.detach().double().mean()), float(weight.detach().double().std())
        if law == "w" and abs(mean) < 0.1 and spread > 0 and 0.005 < spread < 0.1 and abs(mean) < spread:
            yield Sign(call.where, f"gains have mean {mean:.2g} and deviation {spread:.2g}: drawn like weights", 1.0)
        elif law == "1+w" and mean == 1.0 and spread == 0:
            yield Sign(call.where, "the layer computes 1 + w and all w are 1: every output is doubled", 1.0)


@check("warning", needs="data", exactness="changes_function")
def logits(exam: Exam) -> Signs:
    """NG34: attention logits or a norm's input are huge.

    Softmax of logits beyond 50 is one-hot: its gradient is gone, and a small change of the weights makes the loss jump.
    A stream a thousand times the size it started with does the same to the norms that read it.
    Fix: Normalize queries and keys, or bound the logits; lower the rate until then:
        q, k = (F.rms_norm(t, t.shape[-1:]) for t in (q, k))
    References: arXiv 2302.05442, marin#1368, PixelDiT#14.
    """
    found = exam.eval or exam.train
    if found is None:
        return
    where, most = max(found.attention, key=lambda item: item[1], default=("", 0.0))
    if most > LOGIT:
        yield Sign(where, f"the largest attention logit is {most:.3g}", most / LOGIT)
    sizes = [(c.where, float(c.x.double().square().mean().sqrt())) for c in found.norms if c.kind != "batch"]
    if len(sizes) > 2:
        where, most = max(sizes, key=lambda item: item[1])
        if most > LARGE and most > STREAM * max(sizes[0][1], 1e-3):
            yield Sign(where, f"its input has size {most:.3g}, the first norm's {sizes[0][1]:.2g}", 0.5)


@check("warning", needs="data", exactness="changes_function")
def growth(exam: Exam) -> Signs:
    """NG50: the residual stream grows with depth.

    Each block adds to the stream, and its norm divides by the stream's size: late blocks change less and less. Some
    growth is normal (the root of the depth); far more makes late blocks idle and low precision coarse.
    Fix: Scale the branches down at the start, or norm their outputs (sandwich):
        nn.init.normal_(block.proj.weight, std=0.02 / (2 * depth) ** 0.5)
    References: arXiv 2502.05795, marin#1368, arXiv 2206.00330.
    """
    found = exam.eval or exam.train
    rows = [c for c in (found.norms if found else []) if c.kind in ("layer", "rms", "custom")]
    width = max((c.x.shape[-1] for c in rows), default=0)
    stream = [(c.where, float(c.x.double().square().mean().sqrt())) for c in rows if c.x.shape[-1] == width]
    if len(stream) >= 6 and stream[0][1] > 0 and stream[-1][1] > LARGE:
        growth = stream[-1][1] / stream[0][1]
        if growth > TIMES * len(stream) ** 0.5:
            yield Sign(stream[-1][0], f"the stream is {growth:.3g} times as large as at the first norm", growth / 100)
    logits = [size for _, size in found.attention] if found else []
    if len(logits) >= 4 and logits[-1] > 10 and logits[-1] > 10 * max(logits[0], 1.0):
        yield Sign(found.attention[-1][0], f"attention logits grow from {logits[0]:.2g} to {logits[-1]:.2g}", 0.5)  # type: ignore[union-attr]
