"""Checks of where norms stand and what stands around them."""

import copy
import re
from functools import partial

import torch
from torch import nn
from torch.nn.utils import parametrize

from normgauge.doctor.finding import Affine, Exam, Sign, Signs, check
from normgauge.network import role_of
from normgauge.surgery import migrate_weight_norm, strip_biases

DEAD = 1e-5  # of the weights' gradient: rounding gives 1e-7, a live bias 0.1
Stack = (nn.TransformerEncoder, nn.TransformerDecoder)
DEEP = 12  # layers with norms behind the additions that train without warm-up


@check("info")
def conversion(exam: Exam) -> Signs:
    """NG13: convert_sync_batchnorm would change this network.

    It replaces every subclass of BatchNorm by a plain one and drops what the subclass adds, such as an activation. The
    converted network trains and scores, and is another function.
    Fix: Convert with a function that keeps the subclass, and compare the outputs before and after:
        ng.checkup(converted, batch, against=model).divergence
    References: pytorch#187298, timm#1254, bias_free_denoising#3.
    """
    plain = {nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward}
    for name, module in exam.batch_norms():
        if type(module).forward not in plain and not isinstance(module, nn.modules.batchnorm._LazyNormBase):
            gap = 1.0
            for call in exam.eval.calls(name)[:1] if exam.eval else []:
                if call.given is not None and call.made is not None:
                    with torch.no_grad():
                        made = nn.BatchNorm1d.forward(copy.deepcopy(module).eval(), call.given)
                    gap = float((made - call.made).abs().max() / call.made.abs().max())
            if gap > 1e-5:
                said = f"{type(module).__name__} has a forward of its own; without it outputs move by {gap:.2g}"
                yield Sign(name, said)


@check("info", needs="gradients", exactness="exact")
def dead_bias(exam: Exam) -> Signs:
    """NG14: a bias before a norm that takes it away.

    The mean over the batch is subtracted right after the bias was added, so it has no effect and no gradient. It costs
    memory and, decayed or not, nothing else: tidy, not urgent.
    Fix: Fold it into the stored mean and drop it:
        model = ng.strip_biases(model, example=batch).model
    References: Pytorch-UNet#325, Mask_RCNN#1455, PyTorch tuning guide.
    """
    if exam.train is None:
        return
    gradients = exam.train.gradients
    readers = {call.producer for call in exam.train.norms if call.kind in ("batch", "instance") and call.own}
    for name in readers - {""}:
        module = exam.modules[name]
        bias, weight = gradients.get(f"{name}.bias"), gradients.get(f"{name}.weight")
        if isinstance(module, Affine) and bias is not None and weight is not None and float(weight.norm()) > 0:
            share = float(bias.norm() / weight.norm())
            if share < DEAD:
                strip = partial(strip_biases, **exam.operation)
                yield Sign(name, f"its gradient is {share:.1g} of the weights'", 1e-3, repair=strip)


@check("warning", exactness="changes_function")
def axis(exam: Exam) -> Signs:
    """NG22: normalized along another axis than the features.

    The layer before writes its features to one axis, the norm takes another one for its channels; sizes happen to
    agree. Statistics then mix what should be apart and keep apart what should be mixed.
    Fix: Move the features to where the norm looks for them:
        y = norm(x.transpose(1, -1)).transpose(1, -1)
    References: ConvNeXt#112, pytorch#71465, AS-MLP#6.
    """
    for call in {c.where: c for c in exam.norms}.values():
        maker = (exam.train or exam.eval).chain(call.producer) if call.producer else ()  # type: ignore[union-attr]
        for record in maker:
            if isinstance(record.module, nn.Linear) and call.kind in ("batch", "instance") and call.x.ndim == 3:
                said = f"{record.name} writes features to the last axis, the channels here are axis 1"
                yield Sign(call.where, said, 1.0)
            elif isinstance(record.module, nn.modules.conv._ConvNd) and call.kind in ("layer", "rms"):
                if call.count == call.x.shape[-1] and call.x.ndim > 3:
                    said = f"{record.name} writes channels to axis 1, the norm is over the last one"
                    yield Sign(call.where, said, 1.0)
            else:
                continue
            break


@check("info", exactness="changes_function")
def torch_transformer(exam: Exam) -> Signs:
    """NG23: a default of torch's Transformer that is not what one expects.

    By default nn.Transformer puts norms behind the additions, where deep stacks need warm-up. nn.TransformerEncoder
    copies one layer, so that all start with the same weights, and with norm_first=True it has no last norm unless given
    one.
    Fix: Say what you want, and draw the copies anew:
        nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width))
    References: pytorch#55270, pytorch#24930, pytorch#50086, arXiv 2002.04745.
    """
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


@check("warning", exactness="changes_function")
def normalized_twice(exam: Exam) -> Signs:
    """NG26: spectral or weight norm right before a norm that undoes it.

    BatchNorm divides by the scale that the parametrization has just set, so the bound it was meant to give is gone. It
    costs a power iteration per step and changes nothing.
    Fix: Drop one of the two; for a Lipschitz bound, drop the BatchNorm:
        torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    References: Self-Attention-GAN#9, pytorch-spectral-norm-gan#17, sngan_projection#38.
    """
    for call in {c.where: c for c in exam.norms}.values():
        module = exam.modules.get(call.producer)
        if module is None or call.kind not in ("batch", "instance") or not call.own:
            continue
        parts = list(module.parametrizations.weight) if parametrize.is_parametrized(module) else []
        kinds = [type(part).__name__ for part in (*parts, *module._forward_pre_hooks.values())]
        spectral = any("spectral" in kind.lower() for kind in kinds)
        if spectral or any("weightnorm" in kind.lower() for kind in kinds):
            said = f"{call.where} divides by the scale that {'spectral' if spectral else 'weight'}_norm sets here"
            yield Sign(call.producer, said, 0.6 if spectral else 0.1, "warning" if spectral else "info")


@check("info", exactness="exact")
def legacy(exam: Exam) -> Signs:
    """NG27: weight_norm or spectral_norm of the old kind.

    The hooks of torch.nn.utils.weight_norm are deprecated: they recompute at every call, do not copy, and name
    parameters weight_g and weight_v. Checkpoints and libraries now expect parametrizations.
    Fix: Move to parametrizations; values stay:
        model = ng.surgery.migrate_weight_norm(model, example=batch).model
    References: pytorch#103001, transformers#26796, darts#2387.
    """
    for name, module in exam.modules.items():
        for hook in module._forward_pre_hooks.values():
            if type(hook).__name__ in ("WeightNorm", "SpectralNorm"):
                migrate = partial(migrate_weight_norm, **exam.operation)
                yield Sign(name, f"a {type(hook).__name__} hook on {hook.name!r}", repair=migrate)


@check("info")
def fold(exam: Exam) -> Signs:
    """NG28: folding this BatchNorm would change another path.

    The layer before it is used more than once, and not every use is followed by this BatchNorm. Fusing tools that look
    at one use scale the weights for all of them, silently.
    Fix: Fold with proof, or leave these two apart:
        ng.fold_norms(model, example=batch).refused  # names such pairs
    References: pytorch#197539, pytorch#104593, pytorch#122070.
    """
    for call in {c.where: c for c in exam.norms if c.kind == "batch" and c.producer}.values():
        uses = (exam.train or exam.eval).calls(call.producer)  # type: ignore[union-attr]
        followed = sum(c.producer == call.producer and c.where == call.where for c in exam.norms)
        if isinstance(exam.modules[call.producer], Affine) and len(uses) > followed:
            yield Sign(call.producer, f"called {len(uses)} times, {followed} times before {call.where}", 0.1)


@check("info", exactness="changes_function", slow=True)
def functional(exam: Exam) -> Signs:
    """NG31: torch.func refuses this BatchNorm in train mode.

    grad, vmap and jvp of torch.func cannot write running statistics in place, so per-sample gradients and ensembles
    raise. Harmless unless you use them.
    Fix: Let the layers keep no statistics there, or use norms without batch statistics:
        torch.func.replace_all_batch_norm_modules_(model)
    References: functorch#384, pytorch#85533.
    """
    tracked = [name for name, module in exam.batch_norms() if module.track_running_stats]
    wrapped = any(hasattr(value, "grad_sample") for value in exam.model.parameters())
    if tracked:
        also = " and parameters carry per-sample gradients" if wrapped else ""
        said = f"{len(tracked)} layers update buffers in place{also}"
        yield Sign(tracked[0], said, 0.5 if wrapped else 0.0, "warning" if wrapped else "info")


@check("info", exactness="changes_function")
def groups(exam: Exam) -> Signs:
    """NG36: GroupNorm with one channel per group.

    num_groups counts the groups, not the channels in one; with as many groups as channels it is InstanceNorm. That
    discards the contrast of every channel, which classification usually needs.
    Fix: Divide the channels by the size you want:
        nn.GroupNorm(channels // size, channels)
    References: 3d-mri#12, mmcv#723, opacus#390.
    """
    for name, module in exam.modules.items():
        if isinstance(module, nn.GroupNorm) and 1 < module.num_groups == module.num_channels:
            yield Sign(name, f"{module.num_groups} groups for {module.num_channels} channels", 0.2)


@check("warning", exactness="changes_function")
def unused(exam: Exam) -> Signs:
    """NG47: a norm that is never called, or without effect.

    It is built, trained by nobody and saved in every checkpoint, while the activations it was meant for go
    unnormalized. Usually a line of the forward was forgotten, or its result is not used.
    Fix: Call it where it belongs, or delete it:
        x = self.norm(x)
    References: modelzoo#85, LA_MIL#3, timm#1851.
    """
    if exam.train is None and exam.eval is None:
        return
    called = {name for p in (exam.train, exam.eval) if p is not None for name in p.blocks}
    functional = {n for call in exam.norms for n in call.parameters}
    for name, module in exam.modules.items():
        own = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
        norm = role_of(module) == "normalizer" and "parametriz" not in name and not any(module.children())
        parent = name.rpartition(".")[0] or "(model)"
        if norm and name not in called and own and parent in called and not functional & set(own):
            yield Sign(name, f"{type(module).__name__} is not called in either mode", 0.8)
    for name, call in exam.gains.items():
        slope = None if exam.train is None else exam.train.gradients.get(name)
        if exam.train is not None and exam.train.gradients and slope is None and call.module is not None:
            yield Sign(call.where, f"it is called, and the loss does not depend on {name}", 0.7)


@check("error", exactness="state_only")
def averaged_vectors(exam: Exam) -> Signs:
    """NG49: averaged vectors of spectral norm.

    Spectral norm keeps two unit vectors as buffers; their average over training is shorter and points nowhere. The
    estimated norm is then too small and the weights too large.
    Fix: Do not average these buffers, and iterate anew:
        layer.train()
        for _ in range(20):
            layer(x)  # a power iteration each
    References: miles-credit#394, ema-pytorch#29.
    """
    for name, buffer in exam.model.named_buffers():
        key = name.rpartition(".")[2]
        spectral = key in ("_u", "_v") or key.endswith(("weight_u", "weight_v"))
        if spectral and buffer.ndim == 1 and buffer.numel() > 1:
            length = float(buffer.double().norm())
            if abs(length - 1) > 1e-3:
                yield Sign(name, f"a unit vector of length {length:.3g}", 1.0)


@check("warning", exactness="changes_function")
def final_norm(exam: Exam) -> Signs:
    """NG51: the last norm is missing, or placements are mixed.

    Blocks that norm their inputs leave a stream nobody has normalized: the head reads it at whatever size it has grown
    to. Blocks that place norms differently let the stream jump in size between them.
    Fix: Norm the stream before the head:
        logits = head(nn.LayerNorm(width)(x))
    References: arXiv 2002.04745, pytorch#24930, NeMo#2197.
    """
    found = exam.eval or exam.train
    rows = [c for c in (found.norms if found else []) if c.kind in ("layer", "rms", "custom") and c.module is not None]
    if found is None or len(rows) < 3:
        return
    last = rows[-1]
    block = re.match(r"(.*\.)?(\d+)\.", last.where + ".")
    if block is None or not int(block[2]) or last.where == block[0].rstrip("."):
        return
    before = f"{block[1] or ''}{int(block[2]) - 1}{last.where[len(block[0]) - 1 :]}"
    made = found.blocks.get(block[0].rstrip("."))
    behind = [r for r in found.records if r.number > last.number and isinstance(r.module, Affine)]
    outside = [r for r in behind if not r.name.startswith(block[0])]
    inside = [r for r in behind if r.name.startswith(block[0])]
    if made is None or before not in {c.where for c in rows} or not inside or not outside:
        return
    if made.shape == last.y.shape and bool((made.detach() == last.y).all()):
        return  # the block ends in its norm
    size = float(made.detach().double().square().mean().sqrt())
    said = f"it reads a stream of size {size:.2g} that no norm follows; the last is {last.where}"
    yield Sign(outside[0].name, said, 0.6)
