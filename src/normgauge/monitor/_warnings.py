"""Early warnings: what the readings of a beat foretell, with the ids of the doctor's checks."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from normgauge.monitor._blocks import Blocks
from normgauge.monitor._look import Look

COLLAPSED = 0.1  # of the effective rate at first
STUCK = 0.9  # share of a gain's entries that have a gradient and do not move
EXPLODED = 1e3  # squared gradient, first against last layer
DEAD = 0.9
EPS = 0.5  # share of eps in what a normalizer divides by
LOGITS = 50.0  # exp(-50) is no number any more in half precision
STREAM = 100.0
GAP = 0.5  # of the outputs' own size
EDGE = 2.0  # times the rate at which a step raises the loss; training lives near 1
WARM = 50  # updates: a moving average of momentum 0.1 has forgotten 99.5 % of its start
SPIKE = 8.0  # median absolute deviations above the median, and twice the largest of before

TURNED = 2.0  # times its usual angle: the tensor to name


@dataclass(frozen=True)
class EarlyWarning:
    """Something that will hurt later.

    Attributes:
        id: of the doctor's check that proves it; "edge" and "spike" are of the run, with no check behind them.
        step: at which it was first seen.
        where: layer or parameter.
        sentence: what was measured, what it leads to, what to do.
    """

    id: str
    step: int
    where: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.id} at step {self.step}, {self.where}: {self.sentence}"


class Sign(NamedTuple):
    """Of trouble: the id of a check, where, and what it says."""

    id: str
    where: str
    sentence: str


@dataclass
class Health:
    """Of one normalizer's stored statistics: finite, moved since the last beat, still since then, parameters frozen."""

    finite: bool = True
    moved: bool = False
    still: bool = False
    frozen: bool = False
    mark: float = math.nan
    updates: float = 0.0


@dataclass
class Seen:
    """What a beat knows: motion of tensors, health of statistics, looks at a forward, readings and losses."""

    blocks: Blocks
    health: dict[str, Health] = field(default_factory=dict)
    look: Look | None = None
    first_look: Look | None = None
    latest: Mapping[str, float] = field(default_factory=dict)
    losses: Sequence[tuple[int, float]] = ()


def rate_collapse(seen: Seen) -> Iterator[Sign]:
    """The norm of free weights grows without decay, and the rate of their direction falls."""
    for track in seen.blocks.tracks.values():
        if track.free and not track.decay and track.effective_rate < COLLAPSED * track.first_rate:
            said = f"its effective rate fell from {track.first_rate:.3g} to {track.effective_rate:.3g}: its scale "
            said += "is free and nothing decays it: this layer will learn ever more slowly. "
            yield Sign("NG42", track.name, said + "Give it weight decay, or train it on a sphere (ng.optim.SphereSGD).")


def stuck_gains(seen: Seen) -> Iterator[Sign]:
    """Entries that have a gradient and do not move: the step is below the spacing of the dtype."""
    for value, track in seen.blocks.narrow_gains():
        if track.stuck > STUCK:
            said = f"{track.stuck:.0%} of its entries have a gradient and did not move: a step is below half the "
            said += f"spacing of {value.dtype}, so they never will. Keep norms in float32."
            yield Sign("NG44", track.name, said)


def unhealthy_statistics(seen: Seen) -> Iterator[Sign]:
    """Statistics that are poisoned, frozen in name only, or standing still."""
    for name, health in seen.health.items():
        if not health.finite:
            said = "its stored statistics are not finite and stay so: eval mode is broken from here on. "
            yield Sign("NG10", name, said + "Restore them, and keep such batches out (ng.guard_norms).")
        elif health.frozen and health.moved:
            said = "its parameters are frozen, its stored statistics move: in eval mode it is not what you froze. "
            yield Sign("NG03", name, said + "Keep it in eval mode through train() (ng.freeze_norms).")
        elif health.still and not health.frozen:
            said = "it runs in train mode and its stored statistics do not move: eval mode will use what it began "
            yield Sign("NG05", name, said + "with. Check its momentum, and that its buffers are updated.")


def unhealthy_signal(seen: Seen) -> Iterator[Sign]:
    """What a forward and backward pass shows."""
    look, first = seen.look, seen.first_look
    if look is None or first is None:
        return
    layers = sum(call.role == "affine" and call.reached for call in look.calls.values())
    growth = look.gradient_growth
    if layers >= 10 and layers * math.log(growth) > math.log(EXPLODED):
        said = f"squared gradients grow {growth:.3g} times per layer towards the input, over {layers} layers: the "
        yield Sign("NG24", "(model)", said + "first take far larger steps than the last. Add skips, or drop norms.")
    for name, dead in look.dead_shares.items():
        if dead > DEAD:
            said = f"{dead:.0%} of its units are zero on the whole batch and get no gradient. "
            yield Sign("NG29", name, said + "Lower the rate, or the shifts before it.")
    for name, share in look.eps_shares.items():
        if share > EPS:
            said = f"eps is {share:.0%} of what it divides by: its input has collapsed and it no longer normalizes. "
            yield Sign("NG11", name, said + "Scale its input up, or lower eps.")
    for name, value in look.logits.items():
        if value > LOGITS and value > 2 * first.logits.get(name, math.nan):
            said = f"attention logits reach {value:.3g} (at first {first.logits[name]:.3g}): attention becomes one-hot "
            yield Sign("NG34", name, said + "and loss spikes follow. Normalize queries and keys, or lower their rate.")
    if look.stream_growth > STREAM and look.stream_growth > 2 * first.stream_growth:
        said = f"what normalizers read differs {look.stream_growth:.3g}-fold in size over depth: late blocks hardly "
        advice = "change the stream. Normalize what blocks write, or scale it down with depth."
        yield Sign("NG50", "(model)", said + advice)


def mode_gap(seen: Seen) -> Iterator[Sign]:
    """Outputs in train mode against those in eval mode."""
    gap = seen.latest.get("normgauge/statistics/mode_gap", math.nan)
    warm = min((health.updates for health in seen.health.values()), default=0.0) >= WARM
    if warm and gap > GAP:
        said = f"outputs with stored statistics are {gap:.2g} of their size away from those with the batch's: "
        advice = "evaluation will be worse than training. ng.drift names the cause; ng.recalibrate_norms."
        yield Sign("NG06", "(model)", said + advice)


def beyond_the_edge(seen: Seen) -> Iterator[Sign]:
    """The optimizer's own next step raises the loss."""
    ratio = seen.latest.get("normgauge/stability/edge_ratio", math.nan)
    if ratio > EDGE:
        said = f"the rate is {ratio:.3g} times the one at which the optimizer's own next step raises the batch's loss: "
        yield Sign("edge", "(model)", said + "expect oscillation or a spike. Lower the rate, or warm up longer.")


Rule = Callable[[Seen], Iterator[Sign]]
RULES: list[Rule] = [rate_collapse, stuck_gains, unhealthy_statistics, unhealthy_signal, mode_gap, beyond_the_edge]


def explain_spike(seen: Seen, every: int) -> Sign | None:
    """Tell which tensor moved unlike itself where the loss jumped."""
    earlier = [value for _, value in seen.losses[:-every]][-2 * every :]  # what was usual before these steps
    if len(earlier) < 10:
        return None
    middle = statistics.median(earlier)
    spread = statistics.median(abs(value - middle) for value in earlier)
    worst, step = max((value, at) for at, value in seen.losses[-every:])
    if not worst > max(middle + SPIKE * spread, 2 * max(earlier)):
        return None
    said = f"the loss rose to {worst:.3g} at step {step} (usually {middle:.3g})"
    usual = {t.name: statistics.median(t.angles[:-1]) for t in seen.blocks.tracks.values() if t.angles[1:]}
    turned = {name: seen.blocks.tracks[name].angle / angle for name, angle in usual.items() if angle > 0}
    name = max(turned, key=turned.__getitem__, default="")
    if not name or turned[name] < TURNED:
        return Sign("spike", "(model)", f"{said}; no tensor turned far more than usual before. Look at the batch.")
    law = "; its scale is free, so the angle is its whole step" if seen.blocks.tracks[name].free else ""
    advice = "Look at the batch, lower the rate or clip."
    return Sign("spike", name, f"{said}; it turned {turned[name]:.2g} times its usual angle{law}. {advice}")
