"""Checks of which values share a statistic: too few, of other samples, of padding, of unlike batches."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader

from normgauge.doctor.finding import Exam, NormCall, Sign, Signs, check, setting
from normgauge.doctor.probes.statistics import FAR, call_gap
from normgauge.objective import take, tensors

COMPANY = "without half of the batch the first sample's output changes by {:.2g} of its size"
FEW = 16  # values per channel: the batch variance has a relative deviation of 0.36
ALIKE = 0.02  # of the rows
RATIO = 6.0  # variance of the batches' means over what chance gives, the median over features
NARROW = 16  # times as many features as samples


@check("warning", exactness="changes_function")
def few_values(exam: Exam) -> Signs:
    """NG01: too few values per channel for batch statistics.

    Mean and variance of so few values are mostly noise, and of two values all that is left is a sign. What counts is
    the batch of one device times the positions, also in the last, smaller batch of an epoch.
    Fix: Use a larger batch, drop_last=True, or a norm without batch statistics:
        surgery = ng.swap_norms(model, "group", example=batch)
    References: pytorch#7716, mmsegmentation#272, chemprop#680.
    """
    if exam.train is None and any("more than 1 value per channel" in note for note in exam.notes):
        single = [call.where for call in exam.norms if call.kind == "batch" and call.count < 2]
        yield Sign([*single, "(model)"][0], "one value per channel: train mode raises", 2.0, "error")
    seen: set[str] = set()
    for call in exam.train.norms if exam.train else []:
        if call.kind != "batch" or not call.own or call.where in seen:
            continue
        seen.add(call.where)
        last, size = _last_batch(exam.loader), max(exam.samples, 1)
        left = call.count * last / size if last else math.inf
        if call.count <= 2:
            yield Sign(call.where, f"{call.count} values per channel: every output is +1 or -1", 1.5, "error")
        elif call.count < FEW:
            noise = math.sqrt(2 / (call.count - 1))
            said = f"{call.count} values per channel: its variance is off by {noise:.0%} typically"
            yield Sign(call.where, said, noise)
        elif left < 2:
            yield Sign(call.where, f"the last batch of {last} leaves one value per channel: it raises", 1.2, "error")
        elif left < FEW / 2:
            yield Sign(call.where, f"the last batch of {last} leaves {left:.0f} values per channel", 0.5)


def _last_batch(loader: object) -> int:
    """Return the size of a smaller last batch, 0 where there is none."""
    if not isinstance(loader, DataLoader) or loader.drop_last or not loader.batch_size:
        return 0
    try:
        return len(loader.dataset) % loader.batch_size  # type: ignore[arg-type]
    except TypeError:  # a data set without a length
        return 0


@check("error", exactness="changes_function")
def tiny_groups(exam: Exam) -> Signs:
    """NG02: a normalizer erases its input.

    A statistic of one value takes away that value, and one of two leaves only which is larger. The layer then gives the
    same output whatever the network computed.
    Fix: Normalize over at least 8 values: fewer groups, or LayerNorm over the features:
        nn.GroupNorm(groups, channels)  # channels * positions / groups >= 8
    References: opacus#567, pytorch#19250, pytorch#45687.
    """
    seen: set[str] = set()
    for call in exam.norms:
        if call.where in seen or call.kind in ("batch", "custom") or not call.own:
            continue
        seen.add(call.where)
        least = 2 if call.centred else 1
        spread = float(call.y.double().std()) if call.count == 1 and call.centred else 0.0
        if call.count <= least:
            left = f"outputs vary by {spread:.1g}" if call.count == 1 and call.centred else "only signs are left"
            yield Sign(call.where, f"each statistic is of {call.count} values: {left}", 2.0)
        elif call.count == 3 and call.centred:
            yield Sign(call.where, "each statistic is of 3 values: one degree of freedom is left", 0.6, "warning")
    for record in (exam.train or exam.eval).records if exam.train or exam.eval else []:  # type: ignore[union-attr]
        if isinstance(record.module, nn.InstanceNorm1d) and record.given is not None and record.given.ndim == 2:
            said = f"InstanceNorm1d reads {tuple(record.given.shape)} as one sample of {record.given.shape[0]} channels"
            yield Sign(record.name, said, 1.0, "warning")


@check("warning", needs="data")
def reused(exam: Exam) -> Signs:
    """NG16: one BatchNorm for inputs that differ.

    The layer is called several times in a pass on differently distributed inputs, each normalized by its own
    statistics. Eval uses the mixture of both, which fits neither; reuse on alike inputs would be harmless.
    Fix: Statistics of their own for each use, gains shared if you like:
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(uses))
    References: pytorch#1738, pytorch#8985, darts#28, ganhacks#9.
    """
    uses: dict[str, list[NormCall]] = {}
    for call in exam.train.norms if exam.train else []:
        if call.kind == "batch" and call.own and call.stored is not None:
            uses.setdefault(call.where, []).append(call)
    for name, calls in uses.items():
        gap, floor = max((call_gap(calls[0], other) for other in calls[1:]), default=(0.0, 0.0))
        if gap > max(FAR, 3 * floor):
            yield Sign(name, f"{len(calls)} calls in a pass, whose means are {gap:.2g} deviations apart", gap)


@check("warning", needs="data")
def padding(exam: Exam) -> Signs:
    """NG17: padding enters the statistics.

    Positions that only fill up shorter sequences are counted in mean and variance over positions. The outputs of real
    positions then depend on how long the longest sequence of the batch is.
    Fix: Leave them out of the statistics, or normalize each position by itself:
        nn.LayerNorm(channels)  # over channels; or a masked BatchNorm
    References: pytorch#70529, pytorch#81985, deepspeech.pytorch#312.
    """
    for call in {c.where: c for c in reversed(exam.norms)}.values():
        if call.kind not in ("batch", "instance", "group") or call.x.ndim != 3 or not call.own or call.x.shape[2] < 4:
            continue
        same = (call.x == call.x[:, :, -1:]).all(1).flip(1)  # positions that repeat the last one, from the end
        tails = same.int().cumprod(1).sum(1)
        share = float((tails - 1).clamp_min(0).sum()) / (call.x.shape[0] * call.x.shape[2])
        if share > 0.05 and int(tails.max()) > int(tails.min()):
            said = f"{share:.0%} of the positions repeat the last one: tails of {int(tails.max())}"
            yield Sign(call.where, said, share)


@check("info", needs="optimizer", exactness="state_only")
def accumulation(exam: Exam) -> Signs:
    """NG18: gradient accumulation does not enlarge BatchNorm's batch.

    Statistics are taken of each micro-batch, and updated once per micro-batch instead of once per step. The memory is
    shorter than the momentum says, and the noise is that of the small batch.
    Fix: Take the momentum that gives the same memory with k micro-batches per step, or a norm without batch statistics:
        module.momentum = 1 - (1 - module.momentum) ** (1 / k)
    References: pytorch#46516, yolov5#1630, accelerate#791.
    """
    states = exam.optimizer.state.values() if exam.optimizer is not None else ()
    steps = [float(torch.as_tensor(state["step"])) for state in states if "step" in state]
    for name, module in exam.batch_norms():
        if not steps or module.num_batches_tracked is None or not module.momentum:
            continue
        per_step = exam.step.get(name, (1, 1))[1] or 1
        ratio = float(module.num_batches_tracked) / max(*steps, 1.0) / per_step
        call = next((call for call in exam.norms if call.where == name), None)
        if 1.8 < ratio < 1000 and max(steps) > 4:
            few = call is not None and call.count < 32
            said = f"{int(module.num_batches_tracked)} updates in {max(steps):.0f} optimizer steps"
            fix = setting(name, momentum=1 - (1 - module.momentum) ** (1 / round(ratio)))
            yield Sign(name, said, 0.2 + 0.1 * few, "warning" if few else "info", fix)


@check("warning", exactness="changes_function")
def distributed(exam: Exam) -> Signs:
    """NG19: statistics of one process only.

    Under DistributedDataParallel every process normalizes by its own share of the batch and keeps its own statistics.
    With a small share they are noise, and without broadcast the processes evaluate different networks.
    Fix: Share the statistics, or average them before eval:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    References: pytorch#22095, timm#110, mmdetection#4582, fvcore#152.
    """
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


@check("info", exactness="changes_function", slow=True)
def leak(exam: Exam) -> Signs:
    """NG20: samples see each other in training.

    With batch statistics the output of a sample depends on the others of its batch: intended in most supervised
    training. It leaks information in contrastive and meta-learning, breaks per-sample privacy (DP-SGD) and targets in
    RL.
    Fix: Where samples must not meet, normalize each by itself:
        surgery = ng.swap_norms(model, "group", example=batch)
    References: moco#137, opacus#319, higher#55, SB3#553.
    """
    gap, rounding = exam.rows("train")
    if gap > max(1e-3, rounding):
        for call in [call for call in exam.norms if call.kind == "batch" and call.own][:1]:
            yield Sign(call.where, COMPANY.format(gap))


@check("error", exactness="changes_function")
def never_eval(exam: Exam) -> Signs:
    """NG35: eval mode still uses the statistics of the batch.

    A norm that ignores eval() gives a sample other outputs in other company: one image alone is not scored like in a
    batch. Intended in some GANs and test-time adaptation; else a hard-coded training=True, or a train() that overrides.
    Fix: Pass the flag on:
        F.batch_norm(x, mean, var, weight, bias, training=self.training)
    References: smp#128, TRADES#3, examples#514.
    """
    for call in {c.where: c for c in (exam.eval.norms if exam.eval else [])}.values():
        if call.kind == "batch" and call.own:
            gap, rounding = exam.rows("eval")
            if gap > max(1e-3, rounding):
                yield Sign(call.where, COMPANY.format(gap), gap, "warning" if call.stored is None else "error")


@check("warning", needs="data")
def constant_rows(exam: Exam) -> Signs:
    """NG40: rows without any spread reach a norm.

    A row of equal values has variance zero: the norm gives its bias, and multiplies gradients by up to 1/sqrt(eps).
    Identical samples in a batch do the same to batch statistics. Padding that is masked later is harmless.
    Fix: Mask such rows before the norm, or find who makes them:
        x = x + 0 * mask  # look at (x.std(-1) == 0).nonzero()
    References: Fast-LLM#220, pytorch#41527.
    """
    for call in {c.where: c for c in reversed(exam.norms)}.values():
        if call.kind in ("layer", "rms", "l2", "custom") and call.count > 3:
            rows = call.x.double().flatten(0, -2) if call.kind == "custom" else call.x.double().reshape(-1, call.count)
            flat = (rows.amax(1) == rows.amin(1)) if call.kind == "layer" else ~rows.any(1)
            share = float(flat.double().mean())
            if share > ALIKE:
                yield Sign(call.where, f"{share:.0%} of its {len(rows)} rows do not vary", share)
                return
    for call in [call for call in exam.norms if call.kind == "batch" and len(call.x) > 3][:1]:
        same = 1 - len(torch.unique(call.x.double().flatten(1), dim=0)) / len(call.x)
        if same > 0.3:
            yield Sign(call.where, f"{same:.0%} of the samples of the batch repeat another one", same)


@check("warning", needs="loader")
def sorted_batches(exam: Exam) -> Signs:
    """NG41: batches are not drawn alike.

    The batches of the loader differ by far more than chance: sorted by class, by source or by length. Batch statistics
    then tell the network which kind of batch it is in, and stored ones fit no batch.
    Fix: Shuffle:
        DataLoader(dataset, batch_size=64, shuffle=True)
    References: arXiv 2105.07576, arXiv 1702.03275.
    """
    if not any(call.kind == "batch" for call in exam.norms):
        return
    batches = [list(tensors(batch)) for batch in take(exam.loader, 8)]
    inputs = [b[0].double().flatten(1)[:, :4096] for b in batches if b and b[0].is_floating_point() and len(b[0]) > 1]
    inputs = [x for x in inputs if x.shape[1:] == inputs[0].shape[1:]]
    labels = [b[1] for b in batches if len(b) > 1 and b[1].ndim == 1 and not b[1].is_floating_point()]
    ratio = 0.0
    if len(inputs) > 2:
        means, within = torch.stack([x.mean(0) for x in inputs]), torch.stack([x.var(0) for x in inputs]).mean(0)
        ratio = float((means.var(0) * len(inputs[0]) / within.clamp_min(1e-12)).median())
    # the share of batches of at least four with one class, where there are several classes
    single = [len(own.unique()) == 1 for own in labels if len(own) > 3] if len(labels) > 2 else []
    pure = sum(single) / len(single) if single and len(torch.cat(labels).unique()) > 1 else 0.0
    if ratio > RATIO or pure > 0.5:
        said = f"means of {len(batches)} batches vary {ratio:.2g} times as much as chance allows"
        said += f"; {pure:.0%} of them hold one class only" if pure else ""
        where = next(call.where for call in exam.norms if call.kind == "batch")
        yield Sign(where, said, max(ratio / RATIO, pure))


@check("info", exactness="changes_function")
def narrow_batch(exam: Exam) -> Signs:
    """NG43: far fewer samples than features in a BatchNorm over samples.

    The centred batch spans at most one direction less than it has samples, so most directions of the features are not
    seen. Its statistics per feature are right; what depends on their covariance is not.
    Fix: A larger batch, or a norm of each sample:
        nn.LayerNorm(features)
    References: arXiv 1804.08450, arXiv 1803.08494.
    """
    for call in {c.where: c for c in exam.norms if c.kind == "batch" and c.own}.values():
        width = call.x.shape[1]
        if call.x.ndim == 2 and call.count * NARROW <= width:
            yield Sign(call.where, f"{call.count} samples for {width} features", 0.1)


@check("error", exactness="changes_function")
def row_dependence(exam: Exam) -> Signs:
    """NG48: in eval a sample's output depends on the others.

    Scores change with the batch a sample is in, so results cannot be repeated one by one; rollouts differ from
    training. No BatchNorm explains it here: a custom norm, a softmax or a mean over the wrong axis does.
    Fix: Find the axis: the first module named is where the dependence begins:
        ng.identify(module, example=x).axes  # must not hold 0
    References: vllm#48271, sglang#28787, RL-Kernel#145.
    """
    if exam.eval is None or any(call.kind == "batch" and call.own for call in exam.eval.norms):
        return
    gap, rounding = exam.rows("eval")
    if max(1e-3, rounding) < gap < math.inf and not exam.sequence_first:
        known = all(call.module is not None for call in exam.eval.norms)
        places = [call.where for call in exam.eval.norms if known and 0 in exam.identity(call).axes]
        yield Sign([*places, "(model)"][0], COMPANY.format(gap), gap)
