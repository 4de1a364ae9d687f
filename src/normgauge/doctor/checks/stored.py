"""Checks of what is stored for eval mode: never written, poisoned, of another network."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from normgauge.doctor.finding import Affine, Exam, NormBase, Sign, Signs, check, setting
from normgauge.doctor.probes.statistics import excess, is_virgin, root_mean_square, sampling_floor, stored_gap
from normgauge.network import first_tensor
from normgauge.surgery import freeze_norms

SLOW, LEFT = 0.01, 0.05  # momentum below any in use but by design, and the share of the first values it has left
FAR = 2.0  # limits; one limit is half a stored deviation, or a factor of two of it
LARGE, WIDE, NOISE = 0.5, 0.3, 0.3  # torch's default is 0.1; TensorFlow's 0.9 to 0.999 means 0.1 to 0.001 here
SHIFT = 1.2  # of the variance: 10 % of the deviation
Instance = nn.modules.instancenorm._InstanceNorm


@check("warning", exactness="changes_function")
def frozen_moves(exam: Exam) -> Signs:
    """NG03: a frozen BatchNorm still moves.

    requires_grad=False stops the gradient, not the running statistics, and .eval() on a layer is undone by the next
    model.train(). The frozen part therefore becomes another function while the rest trains.
    Fix: Freeze the statistics too, so that train() cannot undo it:
        model = ng.freeze_norms(model, example=batch).model
    References: pytorch#86590, pytorch#66073, lightly#1438, Lightning#21652.
    """
    trainable = [name for name, value in exam.model.named_parameters() if value.requires_grad]
    if exam.train is None or not trainable:
        return
    for name, module in exam.batch_norms():
        mean = exam.train.buffers.get(f"{name}.running_mean")
        if mean is None or module.running_mean is None:
            continue
        own = list(module.parameters())
        parent = name.rpartition(".")[0]
        around = own or list((exam.model.get_submodule(parent) if parent else exam.model).parameters())
        frozen = bool(around) and not any(value.requires_grad for value in around)
        undone = exam.training[""] and not exam.training[name]
        moved = root_mean_square((mean - module.running_mean) / (module.running_var + module.eps).sqrt())
        if moved > 0 and (frozen or undone):
            why = "all its parameters are frozen" if frozen else "it came in eval mode, which train() undoes"
            freeze = partial(freeze_norms, where=name, **exam.operation)
            said = f"{why}, yet one batch moves its mean by {moved:.2g} deviations"
            yield Sign(name, said, 0.5 + moved, repair=freeze)


@check("warning", exactness="state_only")
def half_frozen(exam: Exam) -> Signs:
    """NG04: half-frozen: batch statistics in training, stale ones in eval.

    track_running_stats was set to False after construction: training uses the batch and updates nothing, eval uses what
    was stored long ago. The two modes drift apart with every step.
    Fix: Track again and recalibrate, or freeze for good:
        module.track_running_stats = True
    References: pytorch#20967, pytorch#37823, Lightning#15063.
    """
    for name, module in exam.modules.items():
        if isinstance(module, NormBase) and not module.track_running_stats and module.running_mean is not None:
            said = "track_running_stats is False, yet running_mean is there and eval reads it"
            yield Sign(name, said, 0.9, repair=setting(name, track_running_stats=True))


@check("error", exactness="state_only")
def virgin(exam: Exam) -> Signs:
    """NG05: stored statistics were never updated.

    Mean 0 and variance 1 are what the constructor wrote, so in eval mode the layer does not normalize. Causes: a
    checkpoint without buffers, momentum 0, a teacher that copies parameters only, no pass in train mode.
    Fix: Measure them on training data:
        model = ng.recalibrate_norms(model, loader).model
    References: Lightning#14866, mean-teacher#9, keras-io#198, higher#55.
    """
    calls = {call.where: call for call in (exam.quiet.norms if exam.quiet else []) if call.stored is not None}
    for name, module in exam.modules.items():
        if not isinstance(module, NormBase) or module.running_mean is None or module.running_var is None:
            continue
        stored = (module.running_mean, module.running_var)
        call, fresh = calls.get(name), is_virgin(stored)
        shift, ratio = stored_gap(call)[:2] if call is not None and call.kind == "batch" else (0.0, 0.0)
        off = f"the data are {shift:.2g} deviations away, with variance {2.718281828**ratio:.2g} times or a fraction"
        if module.momentum == 0 and module.track_running_stats:
            said = f"momentum 0: nothing is ever stored; {off}"
            yield Sign(name, said, 1 + shift + ratio, "error" if fresh else "warning")
        elif fresh and exam.trained and max(shift, ratio) > 0.2:
            count = 0 if module.num_batches_tracked is None else int(module.num_batches_tracked)
            said = f"mean 0 and variance 1 after {count} counted batches in a trained model; {off}"
            yield Sign(name, said, 1 + shift + ratio, repair=exam.recalibration)


@check("warning", needs="data", exactness="state_only")
def mode_gap(exam: Exam) -> Signs:
    """NG06: eval mode is another network than train mode.

    On the same batch, with dropout off, the stored statistics are far from the batch's own. The first layer named is
    where it begins: every layer before it agrees.
    Fix: Recalibrate on training data, and look why they are off (other findings name causes):
        model = ng.recalibrate_norms(model, loader).model
    References: pytorch#4741, pytorch#5406, vision#2079.
    """
    quiet, still = exam.quiet, exam.eval
    if quiet is None or still is None or not exam.trained:
        return
    a, b = first_tensor(quiet.outputs), first_tensor(still.outputs)
    moved = float((a - b).norm() / a.norm()) if a is not None and b is not None and a.shape == b.shape else 0.0
    for call in quiet.norms:
        if call.kind != "batch" or call.stored is None or not call.own or call.count < 16 or is_virgin(call.stored):
            continue
        off = excess(call, getattr(call.module, "momentum", 0.1))
        if off > FAR:
            shift, ratio, floor = stored_gap(call)
            said = (
                f"its input is {shift:.2g} stored deviations off (sampling gives {floor:.2g}), its variance by a factor"
                f" of {2.718281828**ratio:.2g}; the loss is {quiet.loss:.3g} in train and {still.loss:.3g} in eval mode"
            )
            slow, batches = (getattr(call.module, name, None) for name in ("momentum", "num_batches_tracked"))
            if slow and slow < SLOW and batches is not None and (left := (1 - slow) ** int(batches)) > LEFT:
                said += (
                    f"; momentum {slow:g} is the cause: after {int(batches)} batches {left:.0%} of them is the start"
                )
            proved = exam.patient.targets and still.loss > 2 * quiet.loss + 0.5 and moved > 0.5
            yield Sign(call.where, said, off, "error" if proved else "warning", exam.recalibration)
            return


@check("warning", exactness="state_only")
def momentum(exam: Exam) -> Signs:
    """NG07: BatchNorm momentum counts the other way round.

    torch's momentum is the share of the new batch, TensorFlow's that of the old value. With a large one the stored
    statistics are those of the last batch, and eval follows its noise.
    Fix: Take one minus it, then recalibrate:
        module.momentum = 1 - module.momentum
    References: pytorch/vision#8250, pytorch/vision#8312, EfficientNet-PyTorch#3.
    """
    calls = {call.where: call for call in exam.norms if call.kind == "batch" and len(call.x) > 1}
    for name, module in exam.modules.items():
        momentum = getattr(module, "momentum", None)
        if not isinstance(module, NormBase) or not module.track_running_stats or not momentum or momentum < WIDE:
            continue
        batches, call, wrong = (2 - momentum) / momentum, calls.get(name), momentum > LARGE
        noise = sampling_floor(call, call.moments[1], 1e9) / batches**0.5 if call is not None else 0.0
        said = f"momentum {momentum:g}: the stored mean is that of {batches:.2g} batches, off by {noise:.2g} deviations"
        fix = setting(name, momentum=1 - momentum) if wrong else None
        yield Sign(name, said, momentum, "error" if wrong and noise > NOISE else None, fix)


@check("warning", exactness="state_only")
def averaged(exam: Exam) -> Signs:
    """NG08: averaged weights with statistics that are not theirs.

    The weights are an average over training, the statistics are those of the last model, which nobody averaged.
    Contested for slow moving averages (timm#106 found them good enough): measure both.
    Fix: Recalibrate the averaged model, or average buffers as well:
        model = ng.recalibrate_norms(averaged, loader).model
        averaged = AveragedModel(model, use_buffers=True)  # from the start
    References: timm#106, timm#224, pytorch#49082, Lightning#8811.
    """
    for name, module in exam.modules.items():
        if isinstance(module, AveragedModel) and not module.use_buffers and int(module.n_averaged) > 1:
            tracked = [m for m in module.modules() if isinstance(m, NormBase) and m.running_mean is not None]
            if tracked:
                said = f"{int(module.n_averaged)} models averaged, statistics of the last one in {len(tracked)} layers"
                yield Sign(name, said, 0.7)


@check("warning", exactness="state_only")
def checkpointing(exam: Exam) -> Signs:
    """NG09: activation checkpointing updates the statistics twice.

    The forward pass is computed again in the backward pass, and BatchNorm counts both. Its memory is half as long as
    the momentum says; nothing else changes.
    Fix: Take the momentum that gives the same memory:
        module.momentum = 1 - (1 - module.momentum) ** 0.5
    References: pytorch#96136, fairscale#1035, Samudra#572.
    """
    for name, (calls, updates) in exam.step.items():
        momentum = exam.modules[name].momentum
        if updates > calls > 0 and momentum:
            said = f"{calls} calls in the forward pass, {updates} updates in the step"
            yield Sign(name, said, 0.3, repair=setting(name, momentum=1 - (1 - momentum) ** (calls / updates)))


@check("error", exactness="state_only")
def poisoned(exam: Exam) -> Signs:
    """NG10: stored statistics are not finite.

    One batch with an infinity or NaN enters the running average and never leaves it. A gradient scaler skips the step,
    not the statistics: training looks fine and eval is garbage.
    Fix: Reset those channels and recalibrate; keep such batches out of the statistics:
        model = ng.guard_norms(model, example=batch).model
    References: pytorch#88474, pytorch#115500, SparseConvNet#190.
    """
    for name, module in exam.modules.items():
        stored = [getattr(module, key, None) for key in ("running_mean", "running_var")]
        if not isinstance(module, NormBase) and not all(isinstance(value, Tensor) for value in stored):
            continue
        bad = sum(int((~torch.isfinite(v)).sum()) for v in stored if v is not None)
        below = 0 if stored[1] is None else int((stored[1] < 0).sum())

        def repair(model: nn.Module, name: str = name) -> None:
            mean, variance = (getattr(model.get_submodule(name), key) for key in ("running_mean", "running_var"))
            lost = ~(torch.isfinite(mean) & torch.isfinite(variance) & (variance >= 0))
            mean[lost], variance[lost] = 0.0, 1.0

        if bad or below:
            said = f"{bad} entries are infinite or NaN" + (f", {below} variances negative" if below else "")
            yield Sign(name, said, 3.0, repair=repair)


@check("warning", exactness="state_only")
def dropout_before(exam: Exam) -> Signs:
    """NG15: dropout before BatchNorm shifts its variance in eval.

    Dropout raises the variance of what BatchNorm sees in training; in eval the stored variance is too large. Every such
    layer makes the outputs smaller in eval than in training.
    Fix: Put dropout after the last BatchNorm, or recalibrate with dropout off:
        model = ng.recalibrate_norms(model, loader).model
    References: arXiv 1801.05134, mlcolvar#267, TMO-Net#12.
    """
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
                    maker = f"{record.name} (p={record.module.p:g})"
                    yield Sign(call.where, f"{maker} makes its input's variance {ratio:.2g} times as large", ratio - 1)
                break
            if not isinstance(record.module, (*Affine, nn.ReLU, nn.Identity)):
                break


@check("warning", exactness="changes_function")
def instance_tracking(exam: Exam) -> Signs:
    """NG21: InstanceNorm with running statistics.

    In training every sample is normalized by itself, in eval by an average over samples: another function. The original
    style-transfer and CycleGAN code removed the option for that.
    Fix: Do not track, and drop the buffers:
        nn.InstanceNorm2d(channels, affine=True, track_running_stats=False)
    References: CycleGAN#395, stargan#140, pytorch#58843.
    """
    for name, module in exam.modules.items():
        if isinstance(module, Instance) and module.track_running_stats:
            pair = [next((c.y for c in p.norms if c.where == name), None) for p in (exam.quiet, exam.eval) if p]
            gap = 0.0
            if len(pair) == 2 and pair[0] is not None and pair[1] is not None:
                gap = float((pair[0] - pair[1]).norm() / pair[0].norm())

            def repair(model: nn.Module, name: str = name) -> None:
                twin = model.get_submodule(name)
                twin.track_running_stats, twin.running_mean, twin.running_var = False, None, None  # type: ignore[assignment]

            yield Sign(name, f"train and eval outputs differ by {gap:.2g} of their size", 0.5 + gap, repair=repair)


@check("warning", exactness="state_only")
def lost_buffers(exam: Exam) -> Signs:
    """NG46: parameters travel without their statistics.

    Adapters, moving averages and federated updates copy parameters; running statistics are buffers and stay behind. The
    receiver evaluates new weights with old statistics.
    Fix: Copy buffers as well, or recalibrate the receiver:
        for a, b in zip(target.buffers(), source.buffers()):
            a.copy_(b)
    References: peft#1732, PFLlib#260, mean-teacher#9.
    """

    def layers(module):  # type: ignore[no-untyped-def]
        return [m for m in module.modules() if isinstance(m, NormBase) and m.running_mean is not None]

    config = getattr(exam.model, "peft_config", None)
    if config is not None and layers(exam.model):
        saved = [n for c in config.values() for n in (getattr(c, "modules_to_save", None) or [])]
        lost = [n for n, m in exam.batch_norms() if m.running_mean is not None and not any(s in n for s in saved)]
        if lost and any(exam.training.get(name) for name in lost):
            yield Sign(lost[0], f"{len(lost)} layers update statistics that the adapter's checkpoint leaves out", 0.7)
    children = [(n, c) for n, c in exam.model.named_children() if layers(c) and not isinstance(c, NormBase)]
    shapes = {n: [tuple(p.shape) for p in c.parameters()] for n, c in children}
    for name, own in shapes.items():
        target, trained = exam.modules[name], [n for n, s in shapes.items() if s == own and n != name]
        if any(p.requires_grad for p in target.parameters()) or not trained:
            continue
        source = exam.modules[trained[0]]
        both = zip(target.parameters(), source.parameters(), strict=True)
        near = sum(float((p - q).detach().norm()) for p, q in both)
        size = sum(float(q.detach().norm()) for q in source.parameters())
        pairs = [(b, b.running_mean - a.running_mean) for a, b in zip(layers(target), layers(source), strict=False)]
        apart = [float((shift / (b.running_var + b.eps).sqrt()).abs().mean()) for b, shift in pairs]
        if near < 0.3 * size and max(apart, default=0.0) > 0.3 and near < 0.3 * max(apart) * size:
            said = f"weights within {near / size:.0%} of {trained[0]}'s, statistics {max(apart):.2g} deviations away"
            yield Sign(name, said, max(apart))
