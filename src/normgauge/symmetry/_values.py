"""The function whose symmetries are asked for: outputs or losses at any parameters, in float64, without eps."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normgauge.errors import (
    DataError,
    InputError,
    ModelError,
    NonFiniteError,
    NormgaugeError,
    NotDifferentiableError,
)
from normgauge.network import KeepDouble, owner_of, replaced, without_eps
from normgauge.objective import Mode, Objective, join_batches, sample_count, tensors, twice_differentiable
from normgauge.rng import generator
from normgauge.symmetry._effective import Coordinates, find_coordinates

Of = Literal["outputs", "loss"]
Point = dict[str, Tensor]
Visit = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Setting:
    """How the function is evaluated.

    Attributes:
        mode: train or eval; the objective's own where `None`.
        eps: whether normalizers keep their eps; a symmetry is looked for without it.
        fresh: number of a draw of other inputs, or 0 for the user's.
        times: how many draws, from that number on, stand side by side in one batch.
    """

    mode: Mode | None = None
    eps: bool = False
    fresh: int = 0
    times: int = 1


BARE = Setting()
WIDER = 100  # number of a draw from which on some inputs are larger than the user's


class Function:
    """Outputs (or losses of parts of the batch) as one flat tensor of the parameters.

    Points are in effective coordinates.

    Attributes:
        coordinates: effective coordinates of the parameters.
        dtype: the type of the arithmetic: float64 where the model allows it.
        double: whether nothing is rounded to a narrower type on the way.
        drawn_points: (seed, spread, that of biases) of a redrawn point -> which draw was the first with finite outputs,
            and these.
        given: the outputs at the user's values.
        writes: whether a forward was seen to write into parameters: each then gets its own copy of them.
    """

    def __init__(self, objective: Objective, of: Of, seed: int) -> None:
        if of not in ("outputs", "loss"):
            raise InputError(
                "symmetries", "of is 'outputs' or 'loss'", repr(of), "Pass of='outputs', the usual question"
            )
        self.objective = objective
        self.of = of
        self.batches = [batch for _, batch in objective.batches()][:4]
        self.samples = [_count(batch) for batch in self.batches]
        self.names = objective.names
        self.dtype, self.double = torch.float64, True
        self.coordinates, self.draws_inputs, self.writes = Coordinates(), True, False
        self._choose_dtype()
        self._drawn: dict[int, Any] = {}
        self.drawn_points: dict[tuple[int, float, float | None], tuple[int, Tensor]] = {}
        self._seed = seed
        self.draws_inputs = self._can_draw_inputs()
        self.coordinates = self.run(
            lambda model, batch: find_coordinates(model, lambda: objective.outputs_of(model, batch), self.names)
        )

    def homes(self) -> dict[str, set[str]]:
        """Return the modules that hold each parameter: several where it is tied."""
        holders: dict[int, set[str]] = {}
        for name, parameter in self.objective.model.named_parameters(remove_duplicate=False):
            holders.setdefault(id(parameter), set()).add(owner_of(name))
        return {name: holders[id(self.objective.model.get_parameter(name))] for name in self.names}

    @property
    def user(self) -> Point:
        """The user's point, made when asked for: a large model is held once less."""
        values = self.objective.parameters.items()
        return self.coordinates.effective({name: value.detach().to(self.dtype, copy=True) for name, value in values})

    def _choose_dtype(self) -> None:
        """Compute in float64 all the way, in float64 where the model narrows, or in the model's own type."""
        own = self.objective.dtype
        for self.double, self.dtype in ((True, torch.float64), (False, torch.float64), (False, own)):
            try:
                self.given = first = self.outputs(self.user, Setting(eps=True))
                break
            except (NonFiniteError, NotDifferentiableError):
                raise
            except (RuntimeError, TypeError, NotImplementedError):
                if not self.double and self.dtype == own:
                    raise
        again = self.outputs(self.user, Setting(eps=True))
        scale = float(first.abs().max()) + 1e-300
        if first.shape != again.shape or float((first - again).abs().max()) > 1e-6 * scale:
            raise ModelError(
                f"symmetries({type(self.objective.model).__name__})",
                "the forward must give the same outputs twice; its randomness must come from the global generators",
                f"outputs that differ by {float((first - again).abs().max()):.3g}"
                if first.shape == again.shape
                else "outputs of another shape",
                "Draw from torch's global generator, or turn the randomness off",
            )

    def _draw_inputs(self, number: int) -> Any:
        """Return the first batch with other inputs of the same kind.

        Numbers are halved and moved by half their spread (three times as far for odd ones from `WIDER` on, which wakes
        silent units); tokens are dealt out anew among those that occur; masks stay.
        """
        source, wide = generator(self._seed + 19 + number), 3.0 if number > WIDER and number % 2 else 1.0

        def draw(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=source, dtype=torch.float64).to(tensor)
                return wide * (tensor + noise * tensor.std(correction=0)) / 2 if tensor.numel() > 1 else tensor
            if tensor.dtype == torch.bool or tensor.numel() < 2 or len(tensor.unique()) < 3:
                return tensor
            return tensor.reshape(-1)[torch.randperm(tensor.numel(), generator=source)].reshape(tensor.shape)

        return replaced(self.batches[0], Tensor, draw)

    def _can_draw_inputs(self) -> bool:
        """Tell whether the model understands inputs drawn anew, and they are other ones; else the user's are taken."""
        try:
            self.outputs(self.user, Setting(eps=True, fresh=1))
        except (NormgaugeError, RuntimeError, ValueError, IndexError, TypeError):
            return False
        pairs = zip(tensors(self.batches[0]), tensors(self._drawn[1]), strict=True)
        return any(not torch.equal(a, b) for a, b in pairs)

    def outputs(self, point: Mapping[str, Tensor], setting: Setting = BARE, part: Tensor | None = None) -> Tensor:
        """Return the flat outputs without graph, of the first batch or of the samples `part` of it."""
        with torch.no_grad():
            flat = self._flat_outputs(dict(point), 0, part, setting)
        if not bool(torch.isfinite(flat).all()):
            raise NonFiniteError(
                f"symmetries({type(self.objective.model).__name__})",
                "the outputs must be finite",
                f"{int((~torch.isfinite(flat)).sum())} of {flat.numel()} that are not",
                "Look at the inputs and parameters, or lower the learning rate that led here",
            )
        return flat

    def probe(
        self,
        point: Point,
        number: int,
        source: torch.Generator,
        part: Tensor | None = None,
        setting: Setting = BARE,
        visit: Visit | None = None,
    ) -> Point:
        """Draw a random output cotangent c and return the gradient J^T c by name, or hand its pieces to `visit`."""
        index = number % len(self.batches)
        leaves = {name: value.detach().to(self.dtype).requires_grad_() for name, value in point.items()}
        with twice_differentiable():  # attention's plain kernel: the least noise
            flat = self._flat_outputs(leaves, index, part, setting)
        if not flat.requires_grad:
            raise NotDifferentiableError(
                f"symmetries({type(self.objective.model).__name__})",
                "the outputs must depend on the parameters by differentiable operations",
                "outputs without graph",
                "Remove .detach(), argmax or no_grad from the forward, or pass forward= that returns the logits",
            )
        self.objective.count_backward(self._batch(index, part, setting))
        cotangent = torch.randn(flat.shape, generator=source, dtype=torch.float64).to(flat)
        if visit is None:
            slopes = torch.autograd.grad(flat, list(leaves.values()), cotangent, materialize_grads=True)
            return dict(zip(leaves, slopes, strict=True))
        seen: set[str] = set()
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(_hand_over, name=name, seen=seen, visit=visit))
        torch.autograd.backward(flat, cotangent, inputs=list(leaves.values()))
        for name in leaves.keys() - seen:
            visit(name, torch.zeros_like(leaves[name]))
        return {}

    def mixed_gradients(self, point: Point, mixes: Tensor, setting: Setting, part: Tensor | None) -> Tensor:
        """Return the gradients of combinations [rows, outputs] of the outputs by all parameters, written out."""
        leaves = {name: value.detach().requires_grad_() for name, value in point.items()}
        with twice_differentiable():
            flat = self._flat_outputs(leaves, 0, part, setting)
        self.objective.count_backward(self._batch(0, part, setting), len(mixes))
        values = list(leaves.values())
        ask = partial(torch.autograd.grad, flat, values, retain_graph=True, materialize_grads=True)
        try:
            slopes = list(ask(mixes, is_grads_batched=True))
        except RuntimeError:  # something that cannot be done for all rows at once
            slopes = [torch.stack(rows) for rows in zip(*(ask(row) for row in mixes), strict=True)]
        return torch.cat([slope.reshape(len(mixes), -1) for slope in slopes], 1)

    def run(self, body: Callable[[nn.Module, Any], Any]) -> Any:
        """Run `body(model, batch)` at the user's point without graph (for the trace of shapes)."""
        with torch.no_grad():
            setting = Setting(eps=True)
            return self._evaluate(dict(self.user), 0, setting, lambda model: body(model, self._batch(0, None, setting)))

    def part(self, count: int, source: torch.Generator) -> Tensor | None:
        """Draw `count` samples of the first batch, or nothing when the batch cannot be cut."""
        samples = self.samples[0]
        if count >= samples or not _can_be_cut(self.batches[0], samples):
            return None
        return torch.randperm(samples, generator=source)[:count].sort().values

    def parts(self, source: torch.Generator) -> list[Tensor | None]:
        """Cut the first batch at random into halves (from 16 samples) or quarters (from 64).

        One of several batches stays whole.
        """
        samples = self.samples[0]
        count = 4 if samples >= 64 else 2
        if len(self.batches) > 1 or samples < 16 or not _can_be_cut(self.batches[0], samples):
            return [None]
        return [rows.sort().values for rows in torch.randperm(samples, generator=source).tensor_split(count)]

    def keeps_samples_apart(self, point: Point) -> bool:
        """Tell whether the outputs of two batches side by side are those of each alone."""
        if not _can_be_cut(self.batches[0], self.samples[0]):
            return False
        both = self.outputs(point, Setting(fresh=1, times=2))
        alone = torch.cat([self.outputs(point, Setting(fresh=k)) for k in (1, 2)])
        return both.shape == alone.shape and bool((both - alone).abs().max() <= 1e-12 * alone.abs().max())

    def _batch(self, index: int, part: Tensor | None, setting: Setting) -> Any:
        batches = [self.batches[index]]
        if setting.fresh and self.draws_inputs:
            numbers = range(setting.fresh, setting.fresh + setting.times)
            self._drawn.update({number: self._draw_inputs(number) for number in numbers if number not in self._drawn})
            batches = [self._drawn[number] for number in numbers]
        if part is not None:
            batches = [_cut(batch, self.samples[index], part) for batch in batches]
        return _cast(join_batches(batches), self.dtype)

    def _flat_outputs(self, point: Point, index: int, part: Tensor | None, setting: Setting) -> Tensor:
        if self.of == "outputs":
            batch = self._batch(index, part, setting)
            tree = self._evaluate(point, index, setting, lambda model: self.objective.outputs_of(model, batch))
            pieces = [t.reshape(-1) for t in _floats(tree)]
        else:
            pieces = []
            for piece in self._pieces(index, part, setting):
                loss = partial(self.objective.loss_of, number=index, batch=piece)
                pieces.append(self._evaluate(point, index, setting, loss).reshape(1))
        if not pieces:
            raise NotDifferentiableError(
                f"symmetries({type(self.objective.model).__name__})",
                "the outputs must hold a floating tensor",
                "none",
                "Pass forward= that returns the logits, not their argmax",
            )
        return torch.cat([piece.to(self.dtype) for piece in pieces])

    def _pieces(self, index: int, part: Tensor | None, setting: Setting) -> list[Any]:
        """Cut the batch into up to eight parts, so that one loss becomes several equations."""
        batch, samples = self._batch(index, part, setting), self.samples[index] if part is None else len(part)
        count = min(8, samples // 4)
        if count < 2 or not _can_be_cut(batch, samples):
            return [batch]
        return [_cut(batch, samples, rows) for rows in torch.arange(samples).tensor_split(count)]

    def _evaluate(self, point: Point, index: int, setting: Setting, body: Callable[[nn.Module], Any]) -> Any:
        mode = setting.mode
        objective = self.objective if mode in (None, self.objective.mode) else self.objective.replace(mode=mode)
        values = self.coordinates.stored({name: value.to(self.dtype) for name, value in point.items()})
        if not self.writes and not torch.is_grad_enabled():  # what asks for gradients is not copied
            values = {name: value.detach().requires_grad_() for name, value in values.items()}

        def run(model: nn.Module) -> Any:
            versions = [parameter._version for parameter in model.parameters()]
            with ExitStack() as stack:
                if self.double:
                    stack.enter_context(KeepDouble())
                if not setting.eps:
                    stack.enter_context(without_eps(model))
                result = body(model)
            self.writes |= versions != [parameter._version for parameter in model.parameters()]
            return result

        return objective.evaluate(index, run, values, self.dtype)


def _hand_over(leaf: Tensor, name: str, seen: set[str], visit: Visit) -> None:
    assert leaf.grad is not None
    slope, leaf.grad = leaf.grad, None
    seen.add(name)
    visit(name, slope)


def _count(batch: Any) -> int:
    try:
        return sample_count(batch)
    except DataError:
        return 1


def _floats(tree: Any) -> list[Tensor]:
    if hasattr(tree, "to_tuple"):  # Hugging Face output classes
        tree = tree.to_tuple()
    return [tensor for tensor in tensors(tree) if tensor.is_floating_point()]


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return replaced(tree, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _can_be_cut(tree: Any, samples: int) -> bool:
    leaves = list(tensors(tree))
    return bool(leaves) and all(tensor.ndim > 0 and tensor.shape[0] == samples for tensor in leaves)


def _cut(tree: Any, samples: int, rows: Tensor) -> Any:
    return replaced(
        tree, Tensor, lambda tensor: tensor[rows.to(tensor.device)] if tensor.shape[:1] == (samples,) else tensor
    )
