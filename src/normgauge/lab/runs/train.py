"""The one training loop: any optimizer, schedule or step of one's own, a watcher on schedule, divergence as a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from normgauge.errors import InputError, NonFiniteError
from normgauge.lab.data import Dataset
from normgauge.nn import BatchNorm, BatchRenorm, ChannelLayerNorm, LpBatchNorm
from normgauge.rng import generator

# A loss this many times its first value is taken as divergence: training does not come back from there.
DIVERGENCE_FACTOR = 10.0
# On 8x8 images some normalizers gain a little and others lose, and a step takes no time.
SMALLEST_IMAGE = 16
# Normalizers whose kernels take channels-last memory as it is; every other one copies, or walks it with strides.
FAST_NORMALIZERS = (nn.BatchNorm2d, BatchNorm, BatchRenorm, ChannelLayerNorm, LpBatchNorm)
_PLAIN = ("torch.nn.modules.", "torch.nn.utils.parametr", "normgauge.lab.")
_SLOW = ("torch.nn.modules.normalization", "torch.nn.modules.instancenorm")
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
    ceiling: float | None = None,
) -> Training:
    """Train the network in place and return the losses; divergence ends training and is a value, not an exception.

    Steps use channels-last memory where that is faster (`Layout`); `watch` and the caller find the usual layout. The
    order of batches depends on the seed only, so that arms can be paired; `batch=None` is the whole training split in
    its own order. `watch(step, network)` is called at the steps `at`, before that step; `steps` itself is the end.

    A step may have `augment` (shifts by up to an eighth of the image, flips), a `schedule` (step -> factor on every
    group's first rate), `clip` (the largest norm of the gradient of all parameters), a `penalty(network)` beside the
    loss that `losses` do not hold, a `loss(outputs, targets)` other than the dataset's, and `on_gradient(step, loss)`
    after the backward pass, before clipping. `step(rows) -> loss` is a step of one's own in the place of all of these.

    `until(steps taken, losses)` ends training where it is true; a loss above `ceiling` (10 times the first one, or 10,
    if left out) or not finite has diverged.

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
    training, layout = Training(), Layout(network, inputs)
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

    with layout.hold():
        for count in range(steps + 1):
            if watch is not None and count in at:
                with layout.hold(measuring=True):
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


class Batches:
    """An endless stream of shuffled batches; the order depends on the seed only, so arms can be paired.

    A batch larger than the samples is all of them, `None` all in their own order.
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


# -- channels-last memory, where it was measured to make a step faster ----------------------------------------------


def gains_from_channels_last(network: nn.Module, images: Tensor) -> bool:
    """Say whether a step on these images is faster in channels-last memory.

    So it is for convolutions on images of at least 16 pixels, alone or with batch norm in its plain, l^p and renorm
    form, with layer norm, and with our reparametrizations of the weights; with group, instance, rms, ghost, noisy or
    whitening normalization it is slower (`benchmarks/results/layout.json` has the ratios). Networks with modules or
    parametrizations of other packages are left alone: their code may need the usual layout (`view`).
    """
    if images.ndim != 4 or min(images.shape[2:]) < SMALLEST_IMAGE:
        return False
    modules = list(network.modules())
    weights = {id(part) for module in modules if isinstance(module, ParametrizationList) for part in module.modules()}
    return any(isinstance(module, nn.Conv2d) for module in modules) and all(
        _is_ours(module) if id(module) in weights else type(module) in FAST_NORMALIZERS or _is_plain(module)
        for module in modules
    )


class Layout:
    """The memory layout of one training: channels-last where that is faster; weights are moved in place."""

    def __init__(self, network: nn.Module, images: Tensor) -> None:
        self._network = network
        self.channels_last = gains_from_channels_last(network, images)

    def inputs(self, images: Tensor) -> Tensor:
        """Return a batch in the layout of the training."""
        return images.contiguous(memory_format=torch.channels_last) if self.channels_last else images

    @contextmanager
    def hold(self, *, measuring: bool = False) -> Iterator[None]:
        """Hold the weights in the layout of the training; `measuring` in the usual one, since measurements flatten."""
        inside, after = torch.channels_last, torch.contiguous_format
        self._move(after if measuring else inside)
        try:
            yield
        finally:
            self._move(inside if measuring else after)

    def _move(self, layout: torch.memory_format) -> None:
        if self.channels_last:
            self._network.to(memory_format=layout)  # type: ignore[call-overload]


def _is_plain(module: nn.Module) -> bool:
    """Say whether a module's code is torch's or the lab's, and no normalizer; a parametrized one counts as its own."""
    kind = type(module)
    origin = (kind.__bases__[0] if is_parametrized(module) else kind).__module__
    return origin.startswith(_PLAIN) and not origin.startswith(_SLOW)


def _is_ours(parametrization: nn.Module) -> bool:
    return type(parametrization).__module__.startswith(("torch.nn.", "normgauge."))
