"""Running statistics that stay frozen, stay finite, are kept per use, or are computed anew from data."""

import copy
import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from normgauge.errors import DataError, InputError
from normgauge.network import KeepDouble, double, exchange
from normgauge.objective import call_model, call_purely, tensors, untouched
from normgauge.results import instrument, spend
from normgauge.surgery import _operate
from normgauge.surgery._operate import Forward, Options, Patient, Where, hooked, operate
from normgauge.surgery._surgery import Surgery

_CLASSES: dict[tuple[type, type], type[nn.Module]] = {}
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Frozen:
    """Stays in evaluation mode whatever `train()` says."""

    def train(self, mode: bool = True) -> Self:
        """Stay as it is."""
        return super().train(False)  # type: ignore[misc]


class Guarded:
    """Keeps its statistics from batches that are not finite, and from the second pass of activation checkpoints."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalize; write statistics back only where they may be."""
        module: Any = self
        kept = {name: module._buffers[name] for name in _STATISTICS if module._buffers.get(name) is not None}
        if not module.training or not kept:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        try:
            for name, value in kept.items():
                setattr(module, name, value.clone())
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
            new = {name: getattr(module, name) for name in kept}
        finally:
            for name, value in kept.items():
                setattr(module, name, value)
        recomputing = torch._C._current_graph_task_id() != -1  # a forward inside of a backward pass
        if not recomputing:
            good = torch.stack([value.isfinite().all() for value in new.values()]).all()
            with torch.no_grad():
                for name, value in kept.items():  # no branch on a value: nothing waits for the device
                    value.copy_(torch.where(good, new[name], value))
        return result


def class_over(layer: type, base: type[nn.Module]) -> type[nn.Module]:
    """Return `base` under `layer`, called Frozen... or Guarded...; what it pickles is the two of them."""

    def reduce(self: nn.Module, protocol: int) -> Any:
        return _rebuild, (layer, base), self.__dict__

    if (layer, base) not in _CLASSES:
        _CLASSES[layer, base] = type(f"{layer.__name__}{base.__name__}", (layer, base), {"__reduce_ex__": reduce})
    return _CLASSES[layer, base]


def _rebuild(layer: type, base: type[nn.Module]) -> nn.Module:
    made = class_over(layer, base)
    return made.__new__(made)


def _choose(patient: Patient, operation: str, where: Where, over: type | None = None) -> dict[str, Any]:
    """Return the selected normalizers with statistics; none that is under `over` already, or not finite."""
    chosen = {}
    for name, module in patient.model.named_modules():
        if not _operate.has_statistics(module) or not _operate.is_selected(where, name, module):
            continue
        finite = all(bool(value.isfinite().all()) for value in (module.running_mean, module.running_var))
        if over is None or (finite and not isinstance(module, over)):
            chosen[name] = module
        elif not finite:
            patient.refuse(name, "its running statistics are not finite: recalibrate first")
    _operate.require_selection(operation, where, patient.model, [*chosen, *(name for name, _ in patient.refused)])
    return chosen


@instrument
def freeze_norms(
    model: nn.Module, *, example: Any, where: Where = None, affine: bool = False, **options: Unpack[Options]
) -> Surgery:
    """Freeze normalizers at their stored statistics: `train()` does not wake them, copies and pickles keep it.

    The module keeps its class (`isinstance` holds), parameters and keys; a class over it answers `train()`. One whose
    `track_running_stats` was switched off later used batch statistics in training: it is frozen as well. `where` is a
    glob, names or a predicate(name, module); `affine` stops the training of gains and shifts too.

    Kind: exact in eval mode; in train mode the normalizer does what it did in eval mode. Cost: five forward passes.

    Examples:
        >>> done = freeze_norms(nn.Sequential(nn.BatchNorm1d(2)), example=torch.randn(4, 2))
        >>> done.model.train()[0].training
        False
    """

    def edit(patient: Patient) -> str:
        for name, module in _choose(patient, "freeze_norms", where, Frozen).items():
            module.__class__ = class_over(Frozen, type(module))
            module.eval()
            if affine:
                module.requires_grad_(False)
            never = int(getattr(module, "num_batches_tracked", None) or 0) == 0
            patient.did(name, "frozen" + (" at statistics that were never updated" if never else ""))
        return "exact in eval mode; in train mode as in eval mode"

    done = operate("freeze_norms", model, example, edit, **options)
    for module in done.model.modules():  # flags were those of the user's model again
        if isinstance(module, Frozen):
            module.train()
    return done


@instrument
def guard_norms(
    model: nn.Module, *, example: Any, where: Where = None, accumulation: int = 1, **options: Unpack[Options]
) -> Surgery:
    r"""Guard running statistics: no update from a batch that is not finite, none from a checkpoint's second pass.

    With gradients accumulated over k batches (`accumulation`) the statistics would forget k times as fast: the momentum
    m becomes $1 - (1 - m)^{1/k}$, so that k updates by equal batches are one update of before. `where` is a glob, names
    or a predicate(name, module).

    Kind: exact in both modes on finite inputs. Cost: nine forward passes.

    Examples:
        >>> model = guard_norms(nn.Sequential(nn.BatchNorm1d(2)), example=torch.randn(4, 2)).model.train()
        >>> _ = model(torch.full((4, 2), torch.inf))
        >>> model[0].running_mean
        tensor([0., 0.])
    """
    if accumulation < 1:
        rule = "accumulation is the number of batches per optimizer step"
        raise InputError("guard_norms", rule, str(accumulation), "Give 1 without accumulation")

    def edit(patient: Patient) -> str:
        for name, module in _choose(patient, "guard_norms", where, Guarded).items():
            module.__class__ = class_over(Guarded, type(module))
            momentum, corrected = module.momentum, ""
            if accumulation > 1 and momentum is not None:
                module.momentum = 1 - (1 - momentum) ** (1 / accumulation)
                corrected = f", momentum {momentum:g} -> {module.momentum:.4g}"
            patient.did(name, f"guarded{corrected}")
        return "exact in train and eval mode on finite inputs"

    return operate("guard_norms", model, example, edit, modes=("eval", "train"), **options)


class SplitNorm(nn.Module):
    """One normalizer per use in a forward pass: the first call goes to the first, and so on; gains are shared."""

    def __init__(self, norm: nn.Module, uses: int) -> None:
        super().__init__()
        shared = {id(value): value for value in norm.parameters()}
        self.uses = nn.ModuleList([norm, *(copy.deepcopy(norm, dict(shared)) for _ in range(uses - 1))])
        self.turn = 0

    def forward(self, input: Tensor) -> Tensor:
        """Normalize with the statistics of this use."""
        self.turn += 1
        return self.uses[(self.turn - 1) % len(self.uses)](input)


def begin_pass(model: nn.Module, _: Any) -> None:
    """Let the first call of a forward pass be the first use again."""
    for module in model.modules():
        if isinstance(module, SplitNorm):
            module.turn = 0


@instrument
def split_norms(model: nn.Module, *, example: Any, where: Where = None, **options: Unpack[Options]) -> Surgery:
    """Give a normalizer that is called several times in a forward pass statistics per call; gain and shift stay shared.

    A shared BatchNorm mixes distributions that differ (steps of a recurrence, two branches), and evaluates neither
    well. All copies begin with the statistics there were; train on, or recalibrate, to let them part.

    Kind: exact in both modes at first. Cost: nine forward passes.
    """

    def edit(patient: Patient) -> str:
        graph = patient.graph
        places = list(patient.model.named_modules(remove_duplicate=False))
        for name, module in list(patient.model.named_modules()):
            times = sum(step.module is module for step in graph.steps)
            if _operate.has_statistics(module) and _operate.is_selected(where, name, module) and times > 1:
                split = SplitNorm(module, times)
                for place in [place for place, other in places if other is module]:
                    exchange(patient.model, place, split)
                patient.did(name, f"statistics for each of {times} uses")
        if patient.rows:
            patient.model.register_forward_pre_hook(begin_pass)
        return "exact in train and eval mode, until the statistics part"

    return operate("split_norms", model, example, edit, modes=("eval", "train"), **options)


@instrument
def recalibrate_norms(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    forward: Forward | None = None,
    batches: int = 50,
    where: Where = None,
    inplace: bool = False,
) -> Surgery:
    r"""Compute running means and variances anew from data, dropout off, and keep them if they are better.

    Over all values x of a channel in the batches: $m = \bar x$, $v = \sum (x - m)^2 / (n - 1)$, with the statistics of
    their own batch in the normalizers before. Better is a lower mean loss in eval mode or, without `loss`, outputs in
    eval mode nearer to those with the statistics of the batch. Otherwise the old ones stay.

    Kind: changes the function; `change` says by how much. Cost: three passes over the batches, and five forward passes.

    Args:
        model: any model; what fails leaves it as it was.
        loader: gives inputs (tensor or mapping), or pairs (inputs, targets); with `forward` anything.
        loss: `loss(output, target) -> scalar`, for pairs.
        forward: `forward(model, batch)`, the whole batch, for unusual calls.
        batches: how many to use.
        where: glob, names or predicate(name, module); all normalizers with statistics by default.
        inplace: change the model itself.

    Examples:
        >>> net = nn.Sequential(nn.BatchNorm1d(1, affine=False))
        >>> recalibrate_norms(net, [torch.tensor([[1.0], [3.0]])]).model[0].running_mean
        tensor([2.])
    """
    taken = list(islice(loader, batches))
    if not taken:
        step = "Give a loader, or a list of batches"
        raise DataError("recalibrate_norms", "there must be a batch", "an empty loader", step)
    call = forward or (lambda twin, batch: call_model(twin, _inputs(batch)))

    def score(twin: nn.Module, chosen: list[nn.Module]) -> float:
        return math.fsum(_score(twin, double(batch), call, loss, chosen) for batch in taken) / len(taken)

    def edit(patient: Patient) -> str:
        chosen = _choose(patient, "recalibrate_norms", where)
        if not chosen:
            return "no normalizer keeps statistics"
        old = {name: (m.running_mean.clone(), m.running_var.clone()) for name, m in chosen.items()}
        before = score(patient.model, list(chosen.values()))
        new = _collect(patient.model, [double(batch) for batch in taken], call, chosen)
        for name, pair in new.items():
            _operate.store_statistics(chosen[name], *pair)
            if chosen[name].num_batches_tracked is not None:
                chosen[name].num_batches_tracked.fill_(len(taken))
        after = score(patient.model, list(chosen.values()))
        measure = "loss" if loss is not None else "gap of the modes"
        told = f"{measure} {before:.4g} before, {after:.4g} after"
        worse = not after <= before and math.isfinite(before)
        for name, module in chosen.items():
            if worse:
                _operate.store_statistics(module, *old[name])
                patient.refuse(name, f"its statistics were better: {told}")
            elif name not in new:
                patient.refuse(name, "the batches do not reach it, or give it one value only")
            else:
                moved = (new[name][0] - old[name][0]) / old[name][1].sqrt().clamp_min(1e-12)
                patient.did(name, f"recalibrated; a mean moved by {float(moved.abs().max()):.3g} deviations")
        return told

    return operate("recalibrate_norms", model, taken[0], edit, forward=call, inplace=inplace, exact=False)


def _inputs(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch


def _with_batch_statistics(
    model: nn.Module, batch: Any, call: Forward, chosen: Iterable[nn.Module], hooks: dict[nn.Module, Any] | None = None
) -> Any:
    """Call the model in eval mode with the chosen normalizers in train mode, on copies of all buffers."""
    spend("forwards")
    with torch.no_grad(), untouched(model, "eval", 0) as aliases, KeepDouble():
        for module in chosen:
            module.training = True
        with hooked(module.register_forward_pre_hook(hook) for module, hook in (hooks or {}).items()):
            return call_purely(model, {}, lambda twin: call(twin, batch), aliases=aliases)


def _score(model: nn.Module, batch: Any, call: Forward, loss: Any, chosen: list[nn.Module]) -> float:
    stored = _with_batch_statistics(model, batch, call, ())
    if loss is not None:
        return float(loss(stored, batch[1]))
    try:
        other = list(tensors(_with_batch_statistics(model, batch, call, chosen)))
    except ValueError:  # one value per channel has no statistics
        return math.inf
    pairs = zip(tensors(stored), other, strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-300)) for a, b in pairs if a.is_floating_point())


def _collect(
    model: nn.Module, batches: list[Any], call: Forward, chosen: dict[str, nn.Module]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean and unbiased variance of what each normalizer reads, merged batch by batch (Chan)."""
    state: dict[str, tuple[int, Tensor, Tensor]] = {}

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            values = args[0].detach().double()
            values = values.transpose(0, 1).flatten(1) if values.ndim > 1 else values[:, None]
            count, mean = values.shape[1], values.mean(1)
            squares = (values - mean[:, None]).square().sum(1)
            if name in state:
                n, old, total = state[name]
                gap = mean - old
                mean = old + gap * count / (n + count)
                squares = total + squares + gap.square() * n * count / (n + count)
                count += n
            state[name] = (count, mean, squares)

        return hook

    hooks = {module: hook_of(name) for name, module in chosen.items()}
    for batch in batches:
        _with_batch_statistics(model, batch, call, chosen.values(), hooks)
    return {
        name: (mean, squares / (count - 1))
        for name, (count, mean, squares) in state.items()
        if count > 1 and bool(mean.isfinite().all() and squares.isfinite().all())
    }
