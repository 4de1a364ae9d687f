"""How the ingredients of `ng.generalization` are gathered: data, cells, slopes, norms, and the rescaling test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.measure._bound_records import Bound, Cell, Ingredients, cell
from normgauge.measure._bounded_loss import BoundedLoss, bounded_loss
from normgauge.measure._bounds import bounds, held_out
from normgauge.measure._classes import decisions, raw_margins
from normgauge.measure._complexity import Complexity, measures, network_of
from normgauge.measure._flatness import _spherical
from normgauge.measure._generalization import Generalization, _call
from normgauge.measure._generalization_data import Settings, check, cross_entropy, joined, partition_of, points_of
from normgauge.measure._layer_chain import Chain, NotAChain, chain_of
from normgauge.measure._local_slopes import ball_slopes, climbed, values_and_slopes
from normgauge.measure._network_copy import Seen, difference, evaluation_copy, folded, look, rescaled, stirred
from normgauge.measure._partition import Partition, Piece
from normgauge.objective import Objective
from normgauge.rng import preserved_rng

_CLOSE = 1e-2  # relative change of the outputs that eps may cause when weights are rescaled
_SAME = 1e-4  # the same for folding, where there is only rounding
_SOME = 64  # samples on which that is checked
_FEW = 256  # samples for PAC-Bayes
_FEWER = 128  # samples for the Hessian


Act = Callable[[nn.Module, Seen], tuple[nn.Module, tuple[str, ...]]]


def assemble(model: nn.Module, data: Any, test: Any, settings: Settings) -> Generalization:
    """Gather everything and return the result; the user's model is only copied."""
    check(settings)
    with preserved_rng():
        return _assembled(model, data, test, settings)


def _assembled(model: nn.Module, data: Any, test: Any, settings: Settings) -> Generalization:
    inputs, targets = joined(model, data)
    twin = evaluation_copy(model)
    with torch.no_grad():
        first = settings.forward(twin, inputs[:2])
    loss = bounded_loss(settings.loss, settings.margin, settings.loss_bound, settings.loss_slope, first, targets[:2])
    partition, rows, assignment = partition_of(inputs, targets, loss, settings)
    used, wanted = inputs[rows], targets[rows]
    values, slopes = values_and_slopes(twin, settings.forward, loss, used, wanted)
    seen = look(twin, settings.forward, inputs[:2])
    foldable = _harmless(stirred(twin), seen, folded, inputs[:_SOME], settings, _SAME)
    free = _harmless(stirred(twin), seen, rescaled, inputs[:_SOME], settings, _CLOSE)
    plain, flat_names = folded(twin, foldable)
    other, moved_names = rescaled(twin, free)
    flat_other = folded(other, foldable)[0]
    error = _change(twin, other, inputs[:_SOME], settings)
    chain = _chain(plain, settings, inputs[:2])
    stored_chain = _chain(twin, settings, inputs[:2])
    pieces = list(
        partition.pieces(points_of(used, wanted), None if not loss.classes else wanted.long().cpu(), assignment)
    )
    on_balls, top = _on_balls(pieces, partition, plain, chain, used, settings)
    if not partition.given:
        slopes = _climbed(pieces, partition, twin, loss, used, wanted, settings)
    cells = tuple(_cells(pieces, on_balls, loss, slopes, len(rows)))
    test_bound, test_loss = _tested(twin, test, loss, settings)
    of = Ingredients(
        float(values.mean()),
        loss.largest,
        len(rows),
        settings.delta,
        cells,
        partition.cells,
        partition.given,
        loss.slope,
        loss.classes,
        loss.outputs,
        float(used.double().norm()),
        chain,
        top,
        stored_chain.printed_slope if isinstance(stored_chain, Chain) else math.nan,
        _sharpness(model, inputs, targets, loss, moved_names, settings),
        _unit_norms(seen.affine),
    )
    found = [*([test_bound] if test_bound else []), *bounds(of)]
    tested = bool(moved_names)
    return Generalization(
        tuple(found),
        _measures(twin, other if tested else None, plain, flat_other if tested else None, flat_names, loss, settings,
                  inputs[:_FEW], targets[:_FEW]),
        cells, loss.name, loss.largest, of.empirical, test_loss, of.samples, of.partition_cells, of.slack(of.samples),
        settings.delta, float(slopes.max()), top, flat_names, moved_names, error if moved_names else math.nan,
        settings.seed,
    )  # fmt: skip


def _harmless(twin: nn.Module, seen: Seen, act: Act, inputs: Tensor, settings: Settings, most: float) -> Seen:
    """Keep the pairs of layer and normalizer whose folding or rescaling leaves the outputs as they are."""
    if not seen.pairs or _change(twin, act(twin, seen)[0], inputs, settings) <= most:
        return seen
    alone = [replace(seen, pairs=(pair,)) for pair in seen.pairs]
    good = [one.pairs[0] for one in alone if _change(twin, act(twin, one)[0], inputs, settings) <= most]
    return replace(seen, pairs=tuple(good))


def _change(model: nn.Module, other: nn.Module, inputs: Tensor, settings: Settings) -> float:
    with torch.no_grad():
        return difference(*(_tensor(settings.forward(m, inputs)) for m in (model, other)))


def _on_balls(
    pieces: Sequence[Piece],
    partition: Partition,
    model: nn.Module,
    chain: Chain | str,
    used: Tensor,
    settings: Settings,
) -> tuple[dict[int, float], float]:
    """Return bounds of the network's slope on the ball of each occupied centre, and on all inputs."""
    top = chain.slope if isinstance(chain, Chain) else math.inf
    wanted = sorted({piece.center for piece in pieces if piece.center >= 0})
    if not wanted or settings.forward is not _call:
        return dict.fromkeys(wanted, top), top
    middles = partition.centers[wanted, : used[0].numel()].reshape(-1, *used.shape[1:]).to(used)
    found, everywhere = ball_slopes(model, middles, partition.radii[wanted])
    top = min(top, everywhere)
    return {center: min(slope, top) for center, slope in zip(wanted, found, strict=True)}, top


def _climbed(
    pieces: Sequence[Piece],
    partition: Partition,
    model: nn.Module,
    loss: BoundedLoss,
    used: Tensor,
    wanted: Tensor,
    settings: Settings,
) -> Tensor:
    """Return the steepest slope met from each sample on, inside its cell."""
    cells = torch.full((len(used),), -1)
    for piece in pieces:
        cells[piece.members] = piece.center

    def stay(points: Tensor, before: Tensor) -> Tensor:
        moved = partition.stay(points_of(points, wanted), cells, points_of(before, wanted))
        return moved[:, : points[0].numel()].reshape(points.shape).to(points)

    return climbed(model, settings.forward, loss, used, wanted, stay)


def _cells(
    pieces: Sequence[Piece], on_balls: dict[int, float], loss: BoundedLoss, slopes: Tensor, samples: int
) -> list[Cell]:
    """Return the cells with bracketed slopes of the loss."""
    found = []
    for piece in pieces:
        slope = on_balls.get(piece.center, math.inf)
        upper = loss.slope * (slope if loss.classes else math.hypot(slope, 1.0))
        upper = math.inf if math.isnan(upper) else upper
        numbers = (piece.center, piece.label, len(piece.members), piece.radius, piece.distance, piece.distance_seen)
        found.append(cell(numbers, samples, float(slopes[piece.members].max()), upper, loss.largest))
    return found


def _measures(
    twin: nn.Module,
    other: nn.Module | None,
    plain: nn.Module,
    flat_other: nn.Module | None,
    flat_names: tuple[str, ...],
    loss: BoundedLoss,
    settings: Settings,
    inputs: Tensor,
    targets: Tensor,
) -> tuple[Complexity, ...]:
    def score(called: Callable[[Tensor], Any]) -> float:
        output = called(inputs)
        if loss.classes:
            logits, labels = decisions(output, targets)
            return float((logits.argmax(1) == labels).double().mean())
        return -float(loss(output, targets).mean()) / loss.largest

    with torch.no_grad():
        output = settings.forward(twin, inputs)
    margin = float(raw_margins(*decisions(output, targets)).double().quantile(0.1)) if loss.classes else math.nan
    looked = [
        None if model is None else network_of(model, settings.forward, inputs, score, margin, settings.seed)
        for model in (twin, other, plain if flat_names else None, flat_other if flat_names else None)
    ]
    assert looked[0] is not None
    return measures(looked[0], looked[1], looked[2], looked[3])


def _sharpness(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss: BoundedLoss, layers: Sequence[str], settings: Settings
) -> tuple[float, str]:
    """Return the spherical sharpness of the cross-entropy in the weights before normalizers, and why there is none."""
    if not loss.classes or not layers:
        return math.nan, "for classifiers with weights before a normalizer, whose scale does not matter"
    twin = evaluation_copy(model)
    names = [f"{layer}.weight" for layer in layers]
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(name in names)
    batch = (inputs[:_FEWER], targets[:_FEWER])
    objective = Objective(twin, cross_entropy, batch, mode="train", forward=settings.forward, parameters=names)
    reading = _spherical(objective, float(objective.loss()), settings.seed)
    return reading.value, reading.sentence


def _tested(twin: nn.Module, test: Any, loss: BoundedLoss, settings: Settings) -> tuple[Bound | None, float]:
    if test is None:
        return None, math.nan
    values = values_and_slopes(twin, settings.forward, loss, *joined(twin, test))[0]
    return held_out(values.tolist(), loss.largest, settings.delta), float(values.mean())


def _chain(model: nn.Module, settings: Settings, inputs: Tensor) -> Chain | str:
    if settings.forward is not _call:
        return "the model is called in its own way (forward=)"
    try:
        return chain_of(model, inputs)
    except NotAChain as reason:
        return f"for chains of layers only: {reason}"


def _unit_norms(affine: Sequence[Any]) -> float:
    norms = [float(call.module.weight.detach().double().norm()) for call in affine]
    return norms[-1] if len(norms) > 1 and all(abs(norm - 1) < 1e-3 for norm in norms[:-1]) else math.nan


def _tensor(output: Any) -> Tensor:
    value = getattr(output, "logits", output)
    assert isinstance(value, Tensor)  # bounded_loss has seen to it
    return value
