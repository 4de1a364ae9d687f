"""The one training loop: any optimizer, schedule or step of one's own, a watcher on schedule, divergence as a value."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, NonFiniteError
from normgauge.lab.data import Dataset
from normgauge.lab.runs.layout import Layout
from normgauge.rng import generator

# A loss this many times its first value is taken as divergence: training does not come back from there.
DIVERGENCE_FACTOR = 10.0
Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor], float]
Watch = Callable[[int, nn.Module], None]


@dataclass
class Training:
    """What training did: the loss of every step, and the step at which it diverged, if it did."""

    losses: list[float] = field(default_factory=list)
    diverged_at: int | None = None

    @property
    def diverged(self) -> bool:
        """Whether the loss left every reasonable range."""
        return self.diverged_at is not None

    def add(self, loss: float, ceiling: float | None = None) -> None:
        """Add the loss of a step; it diverged if that is not finite or above the ceiling (see `train`)."""
        self.losses.append(loss)
        highest = DIVERGENCE_FACTOR * max(self.losses[0], 1.0) if ceiling is None else ceiling
        if not math.isfinite(loss) or loss > highest:
            self.diverged_at = len(self.losses)

    def whole(self) -> Training:
        """Return this where training went to its end; a network that broke on the way is no measurement."""
        if self.diverged:
            raise NonFiniteError(f"training diverged at step {self.diverged_at}: its loss was {self.losses[-1]:.3g}")
        return self

    def steps_to(self, target: float, *, window: int = 10) -> int | None:
        """Return after how many steps the mean loss of the last `window` steps fell to `target`, `None` if never."""
        for step in range(1, len(self.losses) + 1):
            recent = self.losses[max(0, step - window) : step]
            if sum(recent) / len(recent) <= target:
                return step
        return None


def train(
    network: nn.Module,
    data: Dataset | tuple[Tensor, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: int,
    batch: int | None,
    seed: int,
    at: Collection[int] = (),
    watch: Watch | None = None,
    augment: bool = False,
    schedule: Callable[[int], float] | None = None,
    clip: float | None = None,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    loss: Loss | None = None,
    on_gradient: Callable[[int, float], None] | None = None,
    step: Step | None = None,
    until: Callable[[int, Sequence[float]], bool] | None = None,
    share: float | None = None,
    ceiling: float | None = None,
) -> Training:
    """Train the network in place and return the losses; divergence ends training and is a value, not an exception.

    Steps use channels-last memory where that is faster (`Layout`); `watch` and the caller find the usual layout.

    Args:
        network: what to train.
        data: a dataset, of which the training split is used, or inputs and targets.
        optimizer: any torch optimizer over its parameters; may be left out with a `step` of one's own.
        steps: how many.
        batch: samples per step, the whole training split if larger; `None` is the whole split in its own order. The
            order of batches depends on the seed only, so that arms can be paired.
        seed: of the order of batches and the augmentation.
        at: steps at which `watch(step, network)` is called, before that step; `steps` itself is the end.
        watch: the measuring function; it is called in whatever mode the network is.
        augment: random shifts by up to an eighth of the image and horizontal flips, drawn per batch row.
        schedule: step -> factor on every group's first learning rate.
        clip: the largest norm of the gradient of all parameters together; a longer one is made as long.
        penalty: network -> a term added to the loss (an l1 norm of scales, for instance); not part of `losses`.
        loss: `loss(outputs, targets)`; the dataset's own if left out.
        on_gradient: `on_gradient(step, loss)` after the backward pass, before clipping and before the optimizer moves.
        step: `step(rows) -> loss`, a step of one's own on these rows of the training split instead of all of the above.
        until: `until(steps taken, losses)` after every step that did not diverge; true ends training.
        share: at most this share of the time goes to measurements; see `MeasuringShare`.
        ceiling: the loss above which training has diverged; 10 times the first one (or 10) if left out. A loss that is
            not finite always ends it.

    Raises:
        InputError: without optimizer and step, without a loss, or with what a step of one's own would ignore.

    Examples:
        >>> line = nn.Linear(1, 1, bias=False)
        >>> points = torch.ones(4, 1), torch.zeros(4, 1)
        >>> sgd = torch.optim.SGD(line.parameters(), lr=0.1)
        >>> done = train(line, points, sgd, steps=20, batch=None, seed=0, loss=nn.functional.mse_loss)
        >>> len(done.losses), done.diverged, done.losses[-1] < 0.01 * done.losses[0]
        (20, False, True)
    """
    inputs, targets = data.train if isinstance(data, Dataset) else data
    loss = data.loss if loss is None and step is None and isinstance(data, Dataset) else loss
    ignored = step is not None and any((augment, clip, penalty, loss, on_gradient))
    if ignored or (step is None and (optimizer is None or loss is None)):
        rule = "an optimizer and a loss, or a step of one's own, which takes the place of everything about a step"
        raise InputError("train", rule, "both" if ignored else "neither", "Leave one out, or add it")
    training, measuring, layout = Training(), MeasuringShare(share), Layout(network, inputs)
    layout.channels_last &= step is None  # the caller's own step may need the usual layout
    groups = [] if optimizer is None else optimizer.param_groups
    rates = [group["lr"] for group in groups]
    batches, source = Batches(len(targets), batch, seed), generator(2000 + seed)

    def usual_step(rows: Tensor) -> float:
        some = inputs[rows]
        some = layout.inputs(augment_images(some, source) if augment else some)
        look = None if on_gradient is None else partial(on_gradient, len(training.losses))
        assert optimizer is not None and loss is not None
        pair = (some, targets[rows])
        return float(descend(network, optimizer, pair, loss, clip=clip, penalty=penalty, on_gradient=look))

    with layout.training():
        for count in range(steps + 1):
            if watch is not None and count in at and measuring.allows(essential=count in (0, steps)):
                with measuring.timer(), layout.measuring():
                    watch(count, network)
            if count == steps:
                break
            if schedule is not None:
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate * schedule(count)
            training.add((step or usual_step)(next(batches)), ceiling)
            if training.diverged or (until is not None and until(count + 1, training.losses)):
                break
    return training


def descend(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    loss: Loss,
    *,
    clip: float | None = None,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    on_gradient: Callable[[float], None] | None = None,
) -> Tensor:
    """Take one step of the optimizer on a batch in training mode, and return the loss before it; see `train`."""
    network.train()
    optimizer.zero_grad()
    value = loss(network(batch[0]), batch[1])
    (value if penalty is None else value + penalty(network)).backward()
    if on_gradient is not None:
        on_gradient(float(value.detach()))
    if clip is not None:
        nn.utils.clip_grad_norm_(network.parameters(), clip)
    optimizer.step()
    return value.detach()


def augment_images(images: Tensor, source: torch.Generator) -> Tensor:
    """Return the images shifted by up to an eighth of their size (zeros move in) and flipped half of the time."""
    reach = max(1, images.shape[-1] // 8)
    padded = nn.functional.pad(images, (reach,) * 4)
    count, channels, height, width = images.shape
    down, right = (torch.randint(0, 2 * reach + 1, (count, 1), generator=source) for _ in range(2))
    ys = (torch.arange(height) + down).view(count, 1, height, 1)
    xs = (torch.arange(width) + right).view(count, 1, 1, width)
    flip = torch.rand(count, 1, 1, 1, generator=source) < 0.5
    xs = torch.where(flip, xs.flip(-1), xs)
    return padded[torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1), ys, xs]


class MeasuringShare:
    """Keeps measurements within a stated share of a run's time: those that come when it is spent are left out.

    The first and the last measurement are always made. Without a share all are, and a run depends on its spec alone.

    Args:
        share: between 0 and 1, or `None`.

    Raises:
        InputError: for a share out of range.

    Examples:
        >>> MeasuringShare(None).allows(essential=False)
        True
        >>> spent = MeasuringShare(0.5)
        >>> spent.seconds = 1e9
        >>> spent.allows(essential=False), spent.allows(essential=True), spent.skipped
        (False, True, 1)
    """

    def __init__(self, share: float | None) -> None:
        if share is not None and not 0 <= share <= 1:
            raise InputError("measuring share", "a number from 0 to 1", str(share), "Give 0.2 for a fifth")
        self.share, self.seconds, self.skipped = share, 0.0, 0
        self._begin = time.perf_counter()

    def allows(self, *, essential: bool) -> bool:
        """Say whether there is time for a measurement now."""
        fits = self.share is None or self.seconds <= self.share * (time.perf_counter() - self._begin)
        self.skipped += not (fits or essential)
        return fits or essential

    @contextmanager
    def timer(self) -> Iterator[None]:
        """Count what happens inside as measuring."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin


class Batches:
    """An endless stream of shuffled batches; the order depends on the seed only, so arms can be paired.

    Args:
        samples: how many there are.
        batch: rows at a time, all of them if larger; `None` gives all in their own order.
        seed: of the order.
    """

    def __init__(self, samples: int, batch: int | None, seed: int) -> None:
        self._samples, self._batch = samples, None if batch is None else min(batch, samples)
        self._source = generator(1000 + seed)
        self._order = torch.empty(0, dtype=torch.int64)

    def __next__(self) -> Tensor:
        if self._batch is None:
            return torch.arange(self._samples)
        if len(self._order) < self._batch:  # a short rest is dropped: batch statistics want full batches
            self._order = torch.randperm(self._samples, generator=self._source)
        rows, self._order = self._order[: self._batch], self._order[self._batch :]
        return rows
