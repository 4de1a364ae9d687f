"""`Monitor`: reads a training run at a beat, warns early, changes nothing."""

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.monitor._blocks import Blocks, critical_multiple
from normgauge.monitor._look import Look, unchanged
from normgauge.monitor._sinks import Sink, sink_of
from normgauge.monitor._warnings import RULES, EarlyWarning, Health, Seen, explain_spike
from normgauge.network import owner_of
from normgauge.objective import call_model, tensors

LOG = logging.getLogger("normgauge.monitor")
KEPT_LOSSES = 400
SLOW = 10  # beats between two readings that cost forward passes


class Monitor:
    """Watch a run: how far weights turn, stored statistics, signal and stability, with early warnings.

    Every `every` optimizer steps one beat is sent to the sinks as `{"normgauge/<question>/<name>": value}`, worst
    layer, median or quantile over layers. Between beats each tensor is compared once with a copy of itself before a
    step; signals are read in the training forward itself, so no extra pass is made. Training is bit-identical with
    and without. A reading that fails is switched off and said once.

    Cost: a copy and a few sums over one tensor per step, about one more forward at a beat; with `batch`, two forwards
    every ten beats for the gap of the modes; with `loss`, a gradient and about seven forwards for the edge of
    stability. Memory: a copy of one tensor at a time; at the edge of stability a gradient. Kind: norms, angles and
    relative updates are exact at their step; which scale is free is concluded from `<w, g> = 0` over rows, a tensor,
    or a tensor with its bias (an estimate, chance below 1e-6); logits of fused attention are upper bounds.

    Args:
        model: being trained; DDP and compiled models are looked through.
        optimizer: one or several.
        batch: inputs (or `(inputs, targets)`) for readings outside of training: the gap of train and eval mode, and
            signals of compiled models, whose forward is left alone.
        loss: `loss(model, batch)`, for the rate at which the optimizer's own next step would raise the loss of `batch`.
        every: optimizer steps between two beats.
        sinks: callables `(step, values)`, a name ending in .csv, or a folder for `normgauge watch`.

    Examples:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> beats = []
        >>> with Monitor(net, optimizer, every=2, sinks=[lambda step, values: beats.append(step)]) as monitor:
        ...     for _ in range(4):
        ...         optimizer.zero_grad()
        ...         loss = net(torch.randn(8, 3)).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         monitor.step(loss)
        >>> beats
        [2, 4]

    References: kosson2024, santurkar2018
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        batch: Any = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        every: int = 50,
        sinks: Iterable[Sink | str | Path] = (),
    ) -> None:
        optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
        if not isinstance(model, nn.Module) or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
            got = f"{type(model).__name__}, {type(optimizer).__name__}"
            raise InputError("Monitor", "it takes a model and its torch optimizer", got, "Monitor(model, optimizer)")
        if every < 1:
            raise InputError("Monitor", "every is a number of steps, at least 1", str(every), "Leave it at 50")
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        parts = [getattr(module, "_compiled_call_impl", None) for module in inner.modules()]
        self.compiled = hasattr(inner, "_orig_mod") or any(part is not None for part in parts)
        self.model: nn.Module = getattr(inner, "_orig_mod", inner)
        self.batch = batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch
        self._loss_of, self._whole_batch = loss, batch
        self._multiple = 1.0  # of the step, at the edge of stability: where the next search starts
        self.optimizers, self.every, self.steps = optimizers, every, 0
        self.blocks = Blocks(self.model, optimizers, every)
        if not self.blocks.places:
            rule, step = "the optimizer must hold parameters of the model", "Make it from the same model"
            raise InputError("Monitor", rule, type(optimizer).__name__, step)
        self.seen = Seen(self.blocks)
        held, modules = {owner_of(name) for name, *_ in self.blocks.places}, self.model.named_modules()
        tracking = {name: m for name, m in modules if isinstance(getattr(m, "running_mean", None), Tensor)}
        self._trackers = {name: (module, name in held) for name, module in tracking.items()}  # and who is trained
        self.warnings: list[EarlyWarning] = []
        self.rows: list[dict[str, Any]] = []
        self._sinks, self._pending, self._off = [sink_of(sink) for sink in sinks], [], set()  # type: ignore[var-annotated]
        self._open, self._stepped, self._beaten = ExitStack(), 0, -1
        self._began = False
        self._looking: tuple[ExitStack, bool] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Attach; `with` does it."""
        if self._began:
            return self
        self._began = True
        for number, optimizer in enumerate(self.optimizers):
            copy_some = lambda o, *_: self._guard("weights", self.blocks.before, o, self.steps)  # noqa: E731
            self._open.callback(optimizer.register_step_pre_hook(copy_some).remove)
            after = optimizer.register_step_post_hook(lambda o, *_, n=number: self._after_step(o, n == 0))
            self._open.callback(after.remove)
        if not self.compiled:
            entering = self.model.register_forward_pre_hook(lambda *_: self.open_look(inside=True))
            leaving = self.model.register_forward_hook(lambda *_: self.close_look(inside=True), always_call=True)
            for undo in (entering.remove, leaving.remove, self.close_look):
                self._open.callback(undo)
        return self

    def close(self) -> None:
        """Detach and close the sinks; also after an exception in training."""
        self._open.close()
        self._began = False
        for sink in self._sinks:
            if hasattr(sink, "close"):
                self._guard("sinks", sink.close)

    def step(self, loss: Tensor | float | None = None) -> None:
        """Say that a training step is over; on a beat, read, warn and send.

        Call it once per batch; beats are counted in steps the optimizer really took, so accumulated batches and steps
        a GradScaler skipped are seen as such.
        """
        if not self._began:
            next_step = "with ng.Monitor(model, optimizer) as monitor: ..."
            raise InputError("Monitor", "step is called between start and close", "a call outside", next_step)
        if loss is not None:
            self._pending.append((self.steps, loss.detach() if isinstance(loss, Tensor) else loss))
        if self.steps and self.steps % self.every == 0 and self._beaten != self.steps:
            self._beaten = self.steps
            self._beat()

    def _after_step(self, optimizer: torch.optim.Optimizer, first: bool) -> None:
        self._guard("weights", self.blocks.after, optimizer)
        self.steps += first

    def open_look(self, *, inside: bool = False) -> None:
        """Look at what runs from here to `close_look`, if a beat is near; calls of the whole model always are.

        For loops that call parts of the model one by one. Compiled models are left alone.
        """
        wanted = (self.steps + 1) % self.every == 0 or self.seen.first_look is None
        if self._looking is None and wanted and not self.compiled and self.model.training and torch.is_grad_enabled():
            look, stack = Look(), ExitStack()
            self._looking = (stack, inside)
            self._guard("signal", lambda: stack.enter_context(look.looking(self.model, inside=inside)))
            self._take_look(look)

    def close_look(self, *, inside: bool = False) -> None:
        """End what `open_look` began."""
        if self._looking is not None and self._looking[1] >= inside:
            self._looking[0].close()
            self._looking = None

    def _take_look(self, look: Look) -> None:
        self.seen.look, self.seen.first_look = look, self.seen.first_look or look

    def _guard(self, question: str, reading: Callable[..., Any], *args: Any) -> Any:
        """Return a reading; one that fails is switched off, and said once, so that training goes on."""
        if question in self._off:
            return None
        try:
            return reading(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end a training run
            self._off.add(question)
            LOG.warning("normgauge: readings of %r are off from step %d: %r", question, self.steps, error)
            return None

    def _beat(self) -> None:
        values: dict[str, float] = {}
        where: dict[str, str] = {}
        slow = (self.steps // self.every - 1) % SLOW == 0

        def note(question: str, name: str, value: float, layer: str = "") -> None:
            values[f"normgauge/{question}/{name}"] = float(value)
            if layer:
                where[f"normgauge/{question}/{name}"] = layer

        self._guard("loss", self._read_loss, note)
        self._guard("weights", self._read_weights, note)
        self._guard("statistics", self._read_statistics, note)
        if self.compiled and self.batch is not None and slow:
            self._guard("signal", self._look_outside)
        self._guard("signal", self._read_signal, note)
        if self.batch is not None and slow and self._trackers:
            self._guard("mode_gap", self._read_gap, note)
        if self._loss_of is not None and self.batch is not None and slow:
            self._guard("stability", self._read_edge, note)
        self.seen.latest = {name: value for name, value in values.items() if math.isfinite(value)}
        for name, value in self.seen.latest.items():
            self.rows.append({"step": self.steps, "name": name, "value": value, "layer": where.get(name, "")})
        for sink in self._sinks:
            self._guard(f"sink {type(sink).__name__}", sink, self.steps, self.seen.latest)
        self._guard("warnings", self._warn)

    def _read_loss(self, note: Callable[..., None]) -> None:
        fresh = [(step, float(value)) for step, value in self._pending]
        self._pending.clear()
        self.seen.losses = [*self.seen.losses, *fresh][-KEPT_LOSSES:]
        if fresh:
            note("loss", "mean", statistics.fmean(value for _, value in fresh))

    def _read_weights(self, note: Callable[..., None]) -> None:
        tracks = [track for track in self.blocks.tracks.values() if math.isfinite(track.angle)]
        free, rest = [t for t in tracks if t.free], [t for t in tracks if not t.free]
        note("weights", "free_tensors", len(free))
        for name in ("norm", "angle", "effective_rate"):
            _note_spread(note, "weights", name, {t.name: getattr(t, name) for t in free})
        for name in ("angle", "norm", "effective_rate"):
            pairs = {t.name: (getattr(t, name), getattr(t, f"predicted_{name}")) for t in free}
            against = {layer: seen / law for layer, (seen, law) in pairs.items() if 0 < law < math.inf}
            _note_spread(note, "weights", f"{name}_over_predicted", against)
        _note_spread(note, "weights", "relative_update", {t.name: t.relative for t in rest})
        _note_spread(note, "weights", "gains_stuck", {t.name: t.stuck for _, t in self.blocks.narrow_gains()})

    def _read_statistics(self, note: Callable[..., None]) -> None:
        for name, (module, trained) in self._trackers.items():
            mean, own = module.running_mean, list(module.parameters(recurse=False))
            health = self.seen.health.setdefault(name, Health())
            sums = torch.stack([mean.double().sum(), mean.double().abs().sum(), module.running_var.double().sum()])
            mark, first = float(sums @ sums.new_tensor([1.0, math.pi, math.e])), math.isnan(health.mark)
            health.finite = math.isfinite(mark)
            moved = health.finite and not first and mark != health.mark
            called = self.seen.look is None or name in self.seen.look.called_names
            health.still = not first and not moved and health.finite and module.training and called
            health.moved, health.mark = moved, mark if health.finite else 0.0
            health.frozen = not trained and bool(own) and not any(value.requires_grad for value in own)
            counted = getattr(module, "num_batches_tracked", None)
            if isinstance(counted, Tensor):
                health.updates = float(counted)
        if not self.seen.health:
            return
        note("statistics", "not_finite", sum(not h.finite for h in self.seen.health.values()))
        note("statistics", "still", sum(h.still for h in self.seen.health.values()))
        note("statistics", "frozen_moving", sum(h.frozen and h.moved for h in self.seen.health.values()))
        counts = [h.updates for h in self.seen.health.values()]
        since = statistics.median(counts) - getattr(self, "_updates", statistics.median(counts))
        self._updates = statistics.median(counts)
        if self.steps > self.every:
            note("statistics", "updates_per_step", since / self.every)

    def _read_signal(self, note: Callable[..., None]) -> None:
        look = self.seen.look
        if look is None:
            return
        if look.fault is not None:
            raise look.fault
        spreads = {
            "variance": {name: value for name, (_, value) in look.inputs.items()},
            "dead_share": look.dead_shares,
            "saturated_share": {n: c.saturated / max(c.count, 1) for n, c in look.calls.items() if c.saturates},
            "eps_share": look.eps_shares,
            "gain": look.gains,
            "logits": look.logits,
        }
        for name, values in spreads.items():
            _note_spread(note, "signal", name, values)
        _note_spread(note, "statistics", "distance", look.distances)
        note("signal", "gradient_growth", look.gradient_growth)
        note("signal", "stream_growth", look.stream_growth)

    def _look_outside(self) -> None:
        look = Look()
        with unchanged(self.model, training=True), look.looking(self.model):
            call_model(self.model, self.batch)
        self._take_look(look)

    def _read_gap(self, note: Callable[..., None]) -> None:
        outputs = []
        for training in (True, False):
            with unchanged(self.model, training):
                made = tensors(call_model(self.model, self.batch))
                outputs.append(next(t for t in made if t.is_floating_point()).double())
        note("statistics", "mode_gap", float((outputs[0] - outputs[1]).norm() / outputs[1].norm().clamp_min(1e-30)))

    def _read_edge(self, note: Callable[..., None]) -> None:
        assert self._loss_of is not None  # asked by the caller
        loss_of, places = self._loss_of, {id(place.value): place for place in self.blocks.places}
        start = self._multiple if 0 < self._multiple < math.inf else 1.0
        multiple = critical_multiple(self.model, lambda: loss_of(self.model, self._whole_batch), places, start)
        self._multiple = multiple
        note("stability", "edge_ratio", 1 / multiple if multiple else math.inf)

    def _warn(self) -> None:
        seen = {(warning.id, warning.where) for warning in self.warnings}
        spike = explain_spike(self.seen, self.every)
        for rule in RULES:
            fresh = [EarlyWarning(i, self.steps, at, said) for i, at, said in rule(self.seen) if (i, at) not in seen]
            self._tell(fresh)
        lately = self.steps - 2 * self.every
        if spike is not None and not any(w.id == "spike" and w.step > lately for w in self.warnings):
            self._tell([EarlyWarning(spike[0], self.steps, *spike[1:])])

    def _tell(self, fresh: list[EarlyWarning]) -> None:
        for warning in fresh:
            self.warnings.append(warning)
            for sink in self._sinks:
                if hasattr(sink, "note"):
                    sink.note({"warning": vars(warning)})
        if fresh:
            more = f" (and {len(fresh) - 1} more like it)" if len(fresh) > 1 else ""
            LOG.warning("normgauge: %s%s", fresh[0], more)

    def frame(self) -> Any:
        """Return all readings as a table: step, name, value, layer of the worst."""
        import pandas

        return pandas.DataFrame(self.rows, columns=["step", "name", "value", "layer"])

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs so that a resumed run goes on as one: plain numbers, no tensors."""
        tracks = {name: dict(vars(track), angles=track.angles[-20:]) for name, track in self.blocks.tracks.items()}
        health = {name: dict(vars(entry)) for name, entry in self.seen.health.items()}
        warnings, losses = [vars(warning) for warning in self.warnings], self.seen.losses
        return {"steps": self.steps, "tracks": tracks, "health": health, "warnings": warnings, "losses": losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.steps, self._beaten = int(state["steps"]), int(state["steps"])
        for name, entry in state["tracks"].items():
            if name in self.blocks.tracks:
                self.blocks.tracks[name].__dict__.update(entry)
        self.seen.health = {name: Health(**entry) for name, entry in state["health"].items()}
        self.warnings = [EarlyWarning(**entry) for entry in state["warnings"]]
        self.seen.losses = [(int(step), float(value)) for step, value in state["losses"]]


def _note_spread(note: Callable[..., None], question: str, name: str, values: Mapping[str, float]) -> None:
    """Note median, smallest and largest over layers, the ends with their layer."""
    known = {layer: value for layer, value in values.items() if math.isfinite(value)}
    if not known:
        return
    low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    note(question, f"{name}_median", statistics.median(known.values()))
    note(question, f"{name}_lowest", known[low], low)
    note(question, f"{name}_highest", known[high], high)
