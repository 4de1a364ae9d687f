"""`recalibrate_norms`: running statistics computed anew from data, kept only where that is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import DataError
from normgauge.network import KeepDouble
from normgauge.objective import call_model, call_purely, tensors, untouched
from normgauge.results import instrument, spend
from normgauge.surgery._operate import Forward, Patient, Where, is_selected, operate, require_selection, widened
from normgauge.surgery._statistics import has_statistics
from normgauge.surgery._surgery import Surgery


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
    taken = list(islice(iter(loader), batches))
    if not taken:
        step = "Give a loader, or a list of batches"
        raise DataError("recalibrate_norms", "there must be a batch", "an empty loader", step)
    call = forward or (lambda twin, batch: call_model(twin, _inputs(batch)))

    def score(twin: nn.Module, chosen: list[nn.Module]) -> float:
        return math.fsum(_score(twin, widened(batch), call, loss, chosen) for batch in taken) / len(taken)

    def edit(patient: Patient) -> str:
        chosen = {
            name: module
            for name, module in patient.model.named_modules()
            if has_statistics(module) and is_selected(where, name, module)
        }
        require_selection("recalibrate_norms", where, model, chosen)
        if not chosen:
            return "no normalizer keeps statistics"
        old = {name: (m.running_mean.clone(), m.running_var.clone()) for name, m in chosen.items()}
        before = score(patient.model, list(chosen.values()))
        sums = _collect(patient.model, [widened(batch) for batch in taken], call, chosen)
        for name, (mean, variance) in sums.items():
            module: Any = chosen[name]
            module.running_mean.copy_(mean)
            module.running_var.copy_(variance)
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.fill_(len(taken))
        after = score(patient.model, list(chosen.values()))
        measure = "loss" if loss is not None else "gap of the modes"
        told = f"{measure} {before:.4g} before, {after:.4g} after"
        if not after <= before and math.isfinite(before):
            for name, (mean, variance) in old.items():
                module = chosen[name]
                module.running_mean.copy_(mean)
                module.running_var.copy_(variance)
                patient.refuse(name, f"its statistics were better: {told}")
            return told
        for name in chosen:
            if name not in sums:
                patient.refuse(name, "the batches do not reach it, or give it one value only")
                continue
            (mean, variance), deviation = sums[name], old[name][1].sqrt().clamp_min(1e-12)
            moved = float(((mean - old[name][0]) / deviation).abs().max())
            patient.did(name, f"recalibrated; a mean moved by {moved:.3g} deviations")
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
        handles = [module.register_forward_pre_hook(hook) for module, hook in (hooks or {}).items()]
        try:
            return call_purely(model, {}, lambda twin: call(twin, batch), aliases=aliases)
        finally:
            for handle in handles:
                handle.remove()


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
