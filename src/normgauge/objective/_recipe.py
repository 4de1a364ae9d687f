"""How a batch becomes named losses and outputs: from `loss(output, target)` or from a user's `step`."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import DataError, InputError
from normgauge.objective._data import Batches, check_pair, is_pair, sample_count, tensors
from normgauge.rng import generator

Terms = dict[str, Tensor]


def pairs(data: Any) -> Batches:
    """Wrap one batch `(inputs, targets)` or a re-iterable of such batches; iterating gives `(number, batch)`."""
    return Batches(data, single=_one_pair, check=check_pair)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model on a tensor, on a tuple or list (positional) or on a mapping (keywords)."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


@dataclass(frozen=True)
class LossRecipe:
    """`loss(forward(model, inputs), targets)` over pairs `(inputs, targets)`."""

    loss: Callable[[Any, Any], Tensor]
    forward: Callable[[nn.Module, Any], Any]

    def batches(self, data: Any) -> Batches:
        """Wrap one pair (a tuple) or a re-iterable of pairs."""
        return pairs(data)

    def weight(self, batch: Any) -> float:
        return float(sample_count(batch))

    def terms(self, model: nn.Module, batch: Any) -> Terms:
        return self.outputs_and_terms(model, batch)[1]

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        return self.forward(model, batch[0])

    def outputs_and_terms(self, model: nn.Module, batch: Any) -> tuple[Any, Terms]:
        """Return output and loss of one forward."""
        output = self.forward(model, batch[0])
        return output, {"loss": self.loss(output, batch[1])}


@dataclass(frozen=True)
class StepRecipe:
    """A user's `step(model, batch)` giving a scalar or a mapping of named scalars."""

    step: Callable[[nn.Module, Any], Tensor | Mapping[str, Tensor]]
    outputs_of: Callable[[nn.Module, Any], Any] | None
    weight_of: Callable[[Any], float] | None

    def batches(self, data: Any) -> Batches:
        """Wrap one batch (a tensor, tuple or mapping) or a re-iterable of batches."""
        return Batches(data, single=_one_batch, weight=self.weight)

    def weight(self, batch: Any) -> float:
        """Return the user's weight, else the number of samples."""
        return float(sample_count(batch) if self.weight_of is None else self.weight_of(batch))

    def terms(self, model: nn.Module, batch: Any) -> Terms:
        """Return the step's losses by name."""
        result = self.step(model, batch)
        return dict(result) if isinstance(result, Mapping) else {"loss": result}

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        if self.outputs_of is None:
            rule = "outputs, Gauss-Newton products and symmetries of the outputs need to know the outputs"
            step = "Pass outputs=lambda model, batch: ... to Objective.from_step"
            raise InputError("Objective.from_step", rule, "outputs=None", step)
        return self.outputs_of(model, batch)

    def outputs_and_terms(self, model: nn.Module, batch: Any) -> tuple[Any, Terms]:
        """Return outputs and losses of one graph: equal calls of the model inside are answered once."""
        with _remember_answers(model):
            return self.outputs(model, batch), self.terms(model, batch)


Recipe = LossRecipe | StepRecipe


@contextmanager
def _remember_answers(model: nn.Module) -> Iterator[None]:
    """Remember the model's answers: a second call on the very same tensors returns the first answer.

    `outputs` and `step` are two user functions that usually call the model on the same batch. Joining their
    graphs is what makes the loss differentiable with respect to the outputs.
    """
    answers: dict[Any, Any] = {}
    depth = 0

    def remember(module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth:  # inside another module's call: dropout on one tensor twice must stay two draws
                return original(*args, **kwargs)
            key = (id(module), *map(id, args), *((name, id(value)) for name, value in sorted(kwargs.items())))
            if key not in answers:
                depth += 1
                try:
                    answers[key] = (original(*args, **kwargs), args, kwargs)  # arguments are kept: ids stay theirs
                finally:
                    depth -= 1
            return answers[key][0]

        return forward

    modules = [module for module in model.modules() if "forward" not in module.__dict__]
    for module in modules:
        module.__dict__["forward"] = remember(module)
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["forward"]


def _one_pair(data: Any) -> bool:
    if isinstance(data, Mapping):
        rule = "data is one batch (inputs, targets) or a re-iterable of batches"
        step = "Pass (mapping, targets), or use Objective.from_step for batches that carry their own targets"
        raise DataError("Objective", rule, f"a mapping with keys {', '.join(map(str, list(data)[:5]))}", step)
    if isinstance(data, list) and is_pair(data) and all(isinstance(part, Tensor) for part in data):
        got, remedy = "a list of two tensors", "Pass (inputs, targets) as a tuple"
        raise DataError("Objective", "one batch is a tuple (inputs, targets), a list is a list of batches", got, remedy)
    if not isinstance(data, tuple) or not is_pair(data):
        return False
    # where both halves of a pair are themselves pairs it is a tuple of two batches
    return not all(is_pair(part) and any(True for _ in tensors(part)) for part in data)


def _one_batch(data: Any) -> bool:
    return isinstance(data, (Tensor, tuple, Mapping))


def guess_loss(outputs: Any, targets: Any) -> Tensor:
    """Return the model's own loss, cross entropy for labels, squares, or else a fixed random sum of the outputs."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, Tensor) and own.ndim == 0:
        return own
    parts = [part for part in tensors(outputs) if part.is_floating_point()]
    out = parts[0].float() if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0]
    if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.dtype is not torch.bool:
        if out.ndim > 1 and targets.shape == out.shape[:1] + out.shape[2:]:
            return nn.functional.cross_entropy(out, targets.long())
        if out.ndim > 2 and targets.shape == out.shape[:-1]:
            return nn.functional.cross_entropy(out.flatten(0, -2), targets.flatten().long())
    if isinstance(targets, Tensor) and targets.shape == out.shape:
        return nn.functional.mse_loss(out, targets.to(out.dtype))
    noise = torch.randn(out.shape, generator=generator(0)).to(out)
    return (noise * out).sum() / math.sqrt(out.numel())
