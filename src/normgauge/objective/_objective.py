"""`Objective`: model, loss, data and mode as one pure function of the parameters."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, unknown_name
from normgauge.objective._composites import iterates_norm
from normgauge.objective._data import checked_weight, copy_batch, to_device
from normgauge.objective._diagnose import (
    check_callable,
    check_depends,
    check_finite,
    check_recomputes_nothing,
    check_same_values,
    check_scalar,
    check_twice_differentiable,
    explain_failures,
)
from normgauge.objective._operators import HessianOperator
from normgauge.objective._outputs import EmpiricalFisherOperator, GaussNewtonOperator, JacobianOperator
from normgauge.objective._purity import Mode, call_purely, differentiating, twice_differentiable, untouched
from normgauge.objective._recipe import LossRecipe, Recipe, StepRecipe, Terms, call_model
from normgauge.objective._recompute import BlockFinder, forget_inside
from normgauge.objective._select import Selection, select_parameters
from normgauge.results import spend
from normgauge.threads import MEASURING

T = TypeVar("T")
Parameters = Mapping[str, Tensor] | Tensor


class Objective:
    """A model, a loss, data and a mode, frozen into one pure function of the parameters.

    For parameters theta, L(theta) = sum_b n_b loss(model(x_b; theta), y_b) / sum_b n_b over batches b of n_b
    samples. Every method leaves the model as it was: state dict, `.grad`, training flags, hooks and random
    states are bit-identical afterwards, also when a method raises; so are attributes, unless reached through
    classes, closures or globals. The values are those the model has at the time of the call, unless `at` has fixed
    others. Threads may share a model and an objective: they take turns.

    Args:
        model: any module.
        loss: `loss(output, target)`, a 0-d tensor, the mean over the samples of a batch.
        data: one batch `(inputs, targets)` as a tuple, or a list, DataLoader or other re-iterable of batches.
            Inputs may be a tensor, a tuple (positional arguments) or a mapping (keyword arguments). A loader that
            shuffles or augments by torch's, NumPy's or Python's generators draws the same at every pass.
        mode: "train" (BatchNorm uses the batch, dropout draws one fixed mask; nothing is written back) or
            "eval". There is no default because the answer depends on it. In "train" torch's `spectral_norm` takes a
            power iteration that its derivative leaves out, here as in training; results say so.
        forward: `forward(model, inputs) -> output` for unusual calls.
        parameters: which trainable parameters are the variables: a glob, names, or `(name, tensor) -> bool`.

    Examples:
        The Hessian of a mean of squares (w x - y)^2 is 2 mean(x^2):

        >>> x, y = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
        >>> objective = Objective(nn.Linear(1, 1, bias=False), nn.functional.mse_loss, (x, y), mode="eval")
        >>> objective.hessian() @ torch.ones(1)
        tensor([10.])
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        data: Any,
        *,
        mode: Mode,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        parameters: Selection = None,
    ) -> None:
        check_callable("Objective", "loss is a function loss(output, target)", loss)
        check_callable("Objective", "forward is a function forward(model, inputs)", forward or call_model)
        self._set_up(model, LossRecipe(loss, forward or call_model), data, mode, parameters)

    @classmethod
    def from_step(
        cls,
        model: nn.Module,
        step: Callable[[nn.Module, Any], Tensor | Mapping[str, Tensor]],
        data: Any,
        *,
        mode: Mode,
        outputs: Callable[[nn.Module, Any], Any] | None = None,
        weight: Callable[[Any], float] | None = None,
        parameters: Selection = None,
    ) -> Self:
        """Make an Objective from a training step, for losses a model computes itself or several losses at once.

        Args:
            model: the module; for one player of a GAN, a module holding both, with `parameters="generator.*"`.
            step: `step(model, batch)` returning a scalar or a mapping of named scalars, which are summed
                (`replace(terms=...)` selects some).
            data: one batch (a tensor, tuple or mapping) or a re-iterable of batches of any kind.
            mode: "train" or "eval".
            outputs: `outputs(model, batch)`; needed for Gauss-Newton and symmetries of the outputs only.
            weight: `weight(batch)`, the batch's share; default the number of samples. For language models the
                number of tokens that count.
            parameters: which trainable parameters are the variables.

        Examples:
            >>> model = nn.Linear(2, 1)
            >>> batch = {"x": torch.ones(4, 2)}
            >>> step = lambda m, b: {"fit": m(b["x"]).square().mean(), "decay": m.weight.square().sum()}
            >>> objective = Objective.from_step(model, step, batch, mode="train")
            >>> list(objective.terms())
            ['fit', 'decay']
        """
        check_callable("Objective.from_step", "step is a function step(model, batch)", step)
        self = cls.__new__(cls)
        self._set_up(model, StepRecipe(step, outputs, weight), data, mode, parameters)
        return self

    def _set_up(self, model: nn.Module, recipe: Recipe, data: Any, mode: Mode, selection: Selection) -> None:
        if not isinstance(model, nn.Module):
            step = "Write Objective(model, loss, data, mode='train'); wrap functions in a module"
            raise InputError("Objective", "model is a torch.nn.Module", type(model).__name__, step)
        if mode not in ("train", "eval"):
            remedy = "Pass mode='train' to measure with batch statistics, mode='eval' with stored ones"
            raise InputError("Objective", "mode must be 'train' or 'eval'", repr(mode), remedy)
        self.model = model
        self.mode: Mode = mode
        with MEASURING:
            self.names = select_parameters(model, selection)
        self._recipe = recipe
        self._batches = recipe.batches(data)
        self._fixed: dict[str, Tensor] = {}
        self._terms: tuple[str, ...] | None = None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The variables by name, detached; they share memory with the model unless `at` fixed other values."""
        with MEASURING:  # another thread's evaluation has other tensors in their place
            every = dict(self.model.named_parameters())
        return {name: self._fixed.get(name, every[name]).detach() for name in self.names}

    @property
    def dimension(self) -> int:
        """The number of variables."""
        return sum(value.numel() for value in self.parameters.values())

    @property
    def device(self) -> torch.device:
        """The device all parameters are on."""
        return next(iter(self.parameters.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The widest floating type among the variables, which flat vectors have."""
        return functools.reduce(torch.promote_types, (value.dtype for value in self.parameters.values()))

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Join a dict of tensors, one per variable, into one flat vector in the order of `names`."""
        self._check_names(values, complete=True)
        return torch.cat([values[name].detach().reshape(-1).to(self.dtype) for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a flat vector into a dict shaped and typed like the variables."""
        if vector.shape != (self.dimension,):
            rule = f"a flat vector of the variables has shape ({self.dimension},)"
            raise InputError("Objective.unflatten", rule, str(tuple(vector.shape)), "Use objective.flatten to make one")
        here = self.parameters
        pieces = zip(here.items(), vector.split([value.numel() for value in here.values()]), strict=True)
        return {name: piece.reshape(value.shape).to(value.dtype) for (name, value), piece in pieces}

    def at(self, parameters: Parameters) -> Self:
        """Return the same objective at other values (a dict, possibly of some variables only, or a flat vector)."""
        values = self.unflatten(parameters) if isinstance(parameters, Tensor) else dict(parameters)
        self._check_names(values, complete=False)
        current = dict(self.model.named_parameters())
        for name, value in values.items():
            if value.shape != current[name].shape:
                rule = f"the value must have the parameter's shape {tuple(current[name].shape)}"
                raise InputError(f"Objective.at({name!r})", rule, str(tuple(value.shape)), "Reshape it")
        other = copy.copy(self)
        other._fixed = {**self._fixed, **{name: value.detach().to(current[name]) for name, value in values.items()}}
        return other

    def replace(
        self,
        *,
        mode: Mode | None = None,
        data: Any = None,
        parameters: Selection = None,
        terms: str | tuple[str, ...] | None = None,
    ) -> Self:
        """Return the objective with another mode, other data, another selection of variables, or some loss terms only.

        Values fixed by `at` stay. `terms` names the entries of the mapping a `from_step` step returns.
        """
        other = copy.copy(self)
        other._set_up(self.model, self._recipe, (), mode or self.mode, parameters)
        other._batches = self._batches if data is None else self._recipe.batches(data)
        other.names = self.names if parameters is None else other.names
        other._fixed = self._fixed
        other._terms = self._terms if terms is None else ((terms,) if isinstance(terms, str) else tuple(terms))
        return other

    def _check_names(self, values: Mapping[str, Tensor], *, complete: bool) -> None:
        parameters = dict(self.model.named_parameters())
        for name in values:
            if name not in parameters:
                raise unknown_name("parameter", name, parameters)
        missing = [name for name in self.names if name not in values] if complete else []
        if missing:
            rule = f"a value is needed for each of the {len(self.names)} variables"
            step = "Start from dict(objective.parameters)"
            raise InputError("Objective.flatten", rule, f"none for {', '.join(missing[:3])}", step)

    def loss(self) -> Tensor:
        """Return the weighted mean loss over the data, a detached 0-d tensor (one forward pass)."""
        return torch.stack(list(self.terms().values())).sum()

    def function(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the loss as a plain differentiable function of a dict of values, made for `torch.func`.

        `torch.func.grad(objective.function)`, `jvp`, `vmap` and their compositions work on train-mode BatchNorm too,
        because buffers are cloned inside. Values that are not given are the model's. Finiteness is not checked.

        Deviations: do not build Hessians from it with `torch.func.hessian` or `jacrev(jacrev)`: torch is
            silently wrong there through fused BatchNorm and LayerNorm; `hessian()` is right.
        """

        def batch_loss(number: int, batch: Any) -> dict[str, Tensor]:
            values = {name: value.clone() for name, value in parameters.items()}
            terms = self.evaluate(number, lambda model: self.terms_of(model, number, batch), values)
            return {"": torch.stack(list(terms.values())).sum()}

        return self._sum_over_batches(batch_loss)[""]

    def terms(self) -> Terms:
        """Return the named losses that `loss` sums (one forward pass)."""

        def batch_terms(number: int, batch: Any) -> Terms:
            with torch.no_grad():
                terms = self.evaluate(number, lambda model: self.terms_of(model, number, batch))
            _finite_sum(terms, number)
            return {name: value.detach() for name, value in terms.items()}

        return self._sum_over_batches(batch_terms)

    def gradient(self) -> dict[str, Tensor]:
        """Return the gradient of `loss` by name; zeros where the loss does not depend on a variable (one pass)."""
        return self.loss_and_gradient()[1]

    def loss_and_gradient(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and gradient of one forward and backward pass."""

        def batch_loss_and_gradient(number: int, batch: Any) -> dict[str, Tensor]:
            variables, before = self._leaves(), self.parameters

            @differentiating()
            def body(model: nn.Module) -> dict[str, Tensor]:
                value = self.loss_of(model, number, batch)
                check_depends(value)
                check_same_values(variables, before)
                check_recomputes_nothing(value)
                slopes = torch.autograd.grad(value, list(variables.values()), materialize_grads=True)
                self.count_backward(batch)
                return {"": value.detach(), **dict(zip(variables, slopes, strict=True))}

            return self.evaluate(number, body, variables)

        total = self._sum_over_batches(batch_loss_and_gradient)
        value = total.pop("")
        return value, total

    def outputs(self) -> Any:
        """Return the model's outputs without graph (one forward pass).

        One batch gives its output as it is. Tensor outputs of several batches are joined along the first axis
        where their other axes agree; anything else comes as a list with one entry per batch.
        """
        with torch.no_grad():
            found = list(self.each_batch(lambda model, _, batch: self.outputs_of(model, batch)))
        alike = all(isinstance(out, Tensor) and out.shape[1:] == found[0].shape[1:] and out.ndim for out in found)
        return found[0] if len(found) == 1 else torch.cat(found) if alike else found

    def hessian(self) -> HessianOperator:
        """Return the Hessian of the loss as an operator on the variables (see `HessianOperator` for its cost)."""
        return HessianOperator(self)

    def gauss_newton(self) -> GaussNewtonOperator:
        """Return the generalized Gauss-Newton matrix J^T (d^2 loss / d output^2) J as an operator."""
        return GaussNewtonOperator(self)

    def empirical_fisher(self) -> EmpiricalFisherOperator:
        """Return the second moment of the samples' gradients as an operator."""
        return EmpiricalFisherOperator(self)

    def jacobian(self) -> JacobianOperator:
        """Return the Jacobian of the outputs with respect to the variables as an operator with `rmatvec`."""
        return JacobianOperator(self)

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Yield `(number, batch)` on the parameters' device."""
        device = self.device
        for number, batch in self._batches:
            yield number, to_device(batch, device)

    def weight(self, batch: Any) -> float:
        """Return the share of a batch in the mean: its samples, or what `weight=` of `from_step` says."""
        return self._recipe.weight(batch)

    def graph(
        self, number: int, batch: Any, *, outputs: bool = False, lean: bool = False
    ) -> tuple[dict[str, Tensor], Any, Tensor]:
        """Return leaves, outputs (if asked) and loss of one batch with a graph that can be differentiated twice.

        It counts as a gradient: nobody asks for the graph who does not go back through it. A `lean` graph keeps what
        passes between blocks of the model, and computes their inside again under `ready`.
        """
        leaves, blocks = self._leaves(shared=lean), self._blocks(number, batch) if lean else []

        @differentiating()
        def body(model: nn.Module) -> tuple[Any, Tensor]:
            forget_inside(blocks)
            if outputs:
                return self.outputs_and_loss_of(model, number, batch)
            return None, self.loss_of(model, number, batch)

        with twice_differentiable():
            out, value = self.evaluate(number, body, leaves)
        self.count_backward(batch)
        check_depends(value)
        check_same_values(leaves, self.parameters)
        check_twice_differentiable(value)
        return leaves, out, value

    def _blocks(self, number: int, batch: Any) -> list[nn.Module]:
        def body(model: nn.Module) -> list[nn.Module]:
            finder = BlockFinder(model)
            self.terms_of(model, number, batch)
            return finder.blocks()

        with torch.no_grad():
            return self.evaluate(number, body)

    @contextmanager
    def ready(self, number: int) -> Iterator[None]:
        """Hold the model in its mode, with kernels that have second derivatives, while blocks are computed again."""
        with twice_differentiable(), untouched(self.model, self.mode, number):
            yield

    def evaluate(
        self,
        number: int,
        body: Callable[[nn.Module], T],
        variables: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> T:
        """Return `body(model)`, run in the objective's mode at its values, leaving no trace on the model.

        Parameters are functional and buffers cloned, so `body` may train, hook or overwrite what it likes. The number
        of the batch it looks at fixes the random stream and is named in errors; gradients flow to `variables`, other
        values by name; floating parameters and buffers are converted to `dtype`.

        Examples:
            >>> objective = Objective(nn.Linear(1, 1), nn.functional.mse_loss, (torch.ones(1, 1),) * 2, mode="eval")
            >>> objective.evaluate(0, lambda model: model(torch.ones(1, 1)).shape, {"weight": torch.zeros(1, 1)})
            torch.Size([1, 1])
        """
        values = {**self._fixed, **(variables or {})}
        with explain_failures(self.model, self.mode, number), untouched(self.model, self.mode, number) as aliases:
            return call_purely(self.model, values, body, dtype, aliases=aliases)

    def each_batch(self, body: Callable[[nn.Module, int, Any], T]) -> Iterator[T]:
        """Yield `body(model, number, batch)` for every batch, each run by `evaluate`."""
        for number, batch in self.batches():
            yield self.evaluate(number, lambda model, n=number, given=batch: body(model, n, given))  # type: ignore[misc]

    def _count(self, batch: Any, **calls: float) -> None:
        for name, times in calls.items():
            spend(name, times * self._batches.size(batch), self._batches.total)

    def count_backward(self, batch: Any, rows: int = 1) -> None:
        """Count, for `Result.cost`, backward passes through the forward just made, which becomes part of the first."""
        self._count(batch, forwards=-1, gradients=rows)

    def outputs_of(self, model: nn.Module, batch: Any) -> Any:
        """Return the outputs for one batch, for use inside `evaluate`."""
        self._count(batch, forwards=1)
        return self._recipe.outputs(model, copy_batch(batch))

    def terms_of(self, model: nn.Module, number: int, batch: Any, *, copied: bool = True) -> Terms:
        """Return the named losses of one batch that count, for use inside `evaluate`; they may be infinite.

        The batch is copied, since forwards may write into their inputs, unless its tensors are to be met in them.
        """
        self._count(batch, forwards=1)
        return self._select_terms(self._recipe.terms(model, copy_batch(batch) if copied else batch), number)

    def loss_of(self, model: nn.Module, number: int, batch: Any) -> Tensor:
        """Return the loss of one batch, which must be finite, for use inside `evaluate`."""
        return _finite_sum(self.terms_of(model, number, batch), number)

    def outputs_and_loss_of(self, model: nn.Module, number: int, batch: Any) -> tuple[Any, Tensor]:
        """Return outputs and loss of one batch on one graph, for use inside `evaluate`."""
        self._count(batch, forwards=1)
        out, terms = self._recipe.outputs_and_terms(model, copy_batch(batch))
        return out, _finite_sum(self._select_terms(terms, number), number)

    @property
    def loss_function(self) -> Callable[[Any, Any], Tensor] | None:
        """The `loss(output, target)` it was made with; `None` for an objective from a step."""
        return self._recipe.loss if isinstance(self._recipe, LossRecipe) else None

    @property
    def calls_plainly(self) -> bool:
        """Whether it has a loss of `model(inputs)`: no step, no `forward`."""
        return isinstance(self._recipe, LossRecipe) and self._recipe.forward is call_model

    @property
    def remark(self) -> str:
        """What a reader of derivatives must know: torch's `spectral_norm` does not differentiate all of its loss."""
        moves = self.mode == "train" and any(map(iterates_norm, self.model.modules()))
        return "spectral_norm in train mode: derivatives hold its singular vectors fixed, the loss moves them" * moves

    def _leaves(self, *, shared: bool = False) -> dict[str, Tensor]:
        with differentiating():
            values = {name: value.detach() if shared else value.clone() for name, value in self.parameters.items()}
            return {name: value.requires_grad_() for name, value in values.items()}

    def _select_terms(self, terms: Terms, number: int) -> Terms:
        names = self._terms or tuple(terms)
        for name in names:
            if name not in terms:
                raise unknown_name("loss term", name, terms)
            check_scalar(terms[name], name, number)
        return {name: terms[name] for name in names}

    def _sum_over_batches(self, batch_values: Callable[[int, Any], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the weighted mean over batches of the dicts `batch_values` gives."""
        total: dict[str, Tensor] = {}
        weights = 0.0
        for number, batch in self.batches():
            weight = self.weight(batch)
            weights += weight
            for name, value in batch_values(number, batch).items():
                total[name] = total[name] + value * weight if name in total else value * weight
        return {name: value / checked_weight(weights) for name, value in total.items()}

    def __repr__(self) -> str:
        return f"Objective({type(self.model).__name__}, mode={self.mode!r}, dimension={self.dimension})"


def _finite_sum(terms: Terms, number: int) -> Tensor:
    for name, value in terms.items():
        check_finite(value, name, number)
    return torch.stack(list(terms.values())).sum() if len(terms) > 1 else next(iter(terms.values()))
