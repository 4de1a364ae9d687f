"""Curvature of an Objective as operators: exact products on retained graphs, within a memory budget."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from normgauge.errors import NonFiniteError, NormgaugeError, NotDifferentiableError, OutOfMemoryError
from normgauge.linalg import Operator
from normgauge.objective._graph import check_differentiable, graph_bytes
from normgauge.results import spend

DEFAULT_MEMORY = 2 << 30
AGREEMENT = 1e-3  # of a gradient computed again: rounding is below, a missing term is of order one
Products = list[Tensor | None]


class Differentiable(Protocol):
    """What an operator asks of an objective, which is built upon operators and cannot be named here."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The variables by name."""

    @property
    def dimension(self) -> int:
        """The number of variables."""

    @property
    def device(self) -> torch.device:
        """The device of the variables."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of flat vectors."""

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Join a dict of tensors into a flat vector."""

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a flat vector into a dict of tensors."""

    def at(self, parameters: Mapping[str, Tensor] | Tensor) -> Self:
        """Return the same objective at other values."""

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Yield `(number, batch)`."""

    def weight(self, batch: Any) -> float:
        """Return the share of a batch in the mean."""

    def graph(
        self, number: int, batch: Any, *, outputs: bool = False, lean: bool = False
    ) -> tuple[dict[str, Tensor], Any, Tensor]:
        """Return leaves, outputs (if asked) and loss of one batch with a graph."""

    def ready(self, number: int) -> AbstractContextManager[None]:
        """Hold the model in the state in which the blocks of a lean graph are computed again."""


class ObjectiveOperator(Operator):
    """A self-adjoint operator on the variables of an Objective; takes flat vectors and dicts by name.

    The graphs of the batches are built at the first product and kept for the next ones as long as they fit into
    `memory`; those that do not are built again for every product. A batch is never split: batch statistics would
    change. `close()`, leaving a `with` block and any error free the graphs. The values of the parameters are those
    at the time the operator was made.

    Args:
        objective: model, loss, data and mode.
        memory: bytes the kept graphs may take; the graph of a single batch is kept in any case. A Hessian keeps only
            what passes between blocks of the model where a batch's whole graph would take more.
    """

    self_adjoint = True

    def __init__(self, objective: Differentiable, *, memory: int = DEFAULT_MEMORY) -> None:
        self.objective = objective.at({name: value.clone() for name, value in objective.parameters.items()})
        self.shape = (objective.dimension, objective.dimension)
        self.dtype, self.device = objective.dtype, objective.device
        self.memory = memory
        self.matvecs = self.builds = 0
        self._kept: dict[int, tuple[Any, float]] | None = None
        self._complete = False  # whether every batch's graph is kept, so that the data are not read again
        self._pieces = [(value.shape, value.numel(), value.dtype) for value in objective.parameters.values()]

    @abstractmethod
    def _build(self, number: int, batch: Any) -> Any:
        """Build what one batch's products need."""

    def _graph_tensors(self, built: Any) -> Any:
        """Return the tensors of what was built, whose graphs are kept alive."""
        return built

    @abstractmethod
    def _apply(self, built: Any, vectors: list[Tensor]) -> Products:
        """Return the product for one batch."""

    def __matmul__(self, other: Any) -> Any:
        """Return the product with a flat vector, a matrix of columns, or a dict of tensors by parameter name."""
        if isinstance(other, Mapping):
            return self.objective.unflatten(self.matvec(self.objective.flatten(other)))
        return super().__matmul__(other)

    @property
    def weight(self) -> float:
        """The sum of the batches' weights."""
        return sum(self.objective.weight(batch) for _, batch in self.objective.batches())

    def _matvec(self, vector: Tensor) -> Tensor:
        self.matvecs += 1
        spend("products")
        pieces, start = [], 0
        for shape, count, dtype in self._pieces:
            pieces.append(vector[start : start + count].view(shape).to(dtype))
            start += count
        total: Tensor | None = None
        weights = 0.0
        try:
            for number, built, weight in self._graphs():
                with explain_product_failures(type(self).__name__, number):
                    product = self._flatten(self._apply(built, pieces))
                _check_finite(type(self).__name__, product, number)
                # The running weighted mean: with one batch nothing has to be scaled.
                weights += weight
                total = product if total is None else total.lerp_(product, weight / weights)
        except BaseException:
            self.close()
            raise
        if total is None:
            raise AssertionError("an Objective has at least one batch")
        return total

    def _graphs(self) -> Iterator[tuple[int, Any, float]]:
        """Yield batch number, graph and weight; keep graphs while they fit, rebuild the others."""
        if self._kept is not None and self._complete:
            for number, (built, weight) in self._kept.items():
                yield number, built, weight
            return
        first = self._kept is None
        kept = self._kept = {} if self._kept is None else self._kept
        used, count = 0, 0
        for number, batch in self.objective.batches():
            count += 1
            if number in kept:
                yield number, *kept[number]
                continue
            with explain_product_failures(type(self).__name__, number):
                built = self._build(number, batch)
            self.builds += 1
            weight = self.objective.weight(batch)
            if first:
                used += graph_bytes(self._graph_tensors(built))
                if used <= self.memory or count == 1:
                    kept[number] = (built, weight)
            yield number, built, weight
            del built
        if (
            count > 1
            and used > self.memory
            and 0 in kept
            and graph_bytes(self._graph_tensors(kept[0][0])) > self.memory
        ):
            del kept[0]  # it was kept in case it would be the only one
        self._complete = len(kept) == count

    def _flatten(self, products: Products) -> Tensor:
        """Join products into a new flat vector; `None` stands for zeros."""
        return torch.cat(
            [
                torch.zeros(count, dtype=self.dtype, device=self.device)
                if product is None
                else product.detach().reshape(-1).to(self.dtype)
                for product, (_, count, _) in zip(products, self._pieces, strict=True)
            ]
        )

    def close(self) -> None:
        """Free the retained graphs; the next product builds them again."""
        self._kept, self._complete = None, False

    def __enter__(self) -> Self:
        """Return the operator."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the retained graphs."""
        self.close()


class HessianOperator(ObjectiveOperator):
    """The Hessian of the loss: H v = d/dtheta <grad L(theta), v>, by a second backward pass.

    Kind: exact (up to rounding). Cost: the first product about three gradients, each further one about two where
    the graph is kept, about three where it is rebuilt, whole or block by block. Attention runs its math kernel, the
    only one with a second derivative. ReLU kinks have measure zero and are ignored, as in all of autograd.

    Deviations: `torch.func.hessian` is *not* used: it is silently wrong through fused BatchNorm and LayerNorm.

    References: pearlmutter1994.
    """

    def _build(self, number: int, batch: Any) -> tuple[list[Tensor], list[GradientEdge], list[int], int | None]:
        leaves, _, value = self.objective.graph(number, batch)
        if 2 * graph_bytes(value) > self.memory:  # the backward pass keeps as much again
            lean = self._build_lean(number, batch, torch.autograd.grad(value, list(leaves.values()), allow_unused=True))
            if lean is not None:
                return lean
            leaves, _, value = self.objective.graph(number, batch)
        slopes = torch.autograd.grad(
            value, list(leaves.values()), create_graph=True, allow_unused=True, materialize_grads=False
        )
        check_differentiable(type(self).__name__, slopes)
        live = [index for index, slope in enumerate(slopes) if slope is not None and slope.requires_grad]
        flat = {name: slope for name, slope in zip(leaves, slopes, strict=True) if slope is not None}
        flat = {name: slope for name, slope in flat.items() if not slope.requires_grad}
        if flat:
            self._check_constant(number, batch, flat)
        return list(leaves.values()), [get_gradient_edge(slopes[index]) for index in live], live, None

    def _build_lean(self, number: int, batch: Any, plain: Sequence[Tensor | None]) -> Any:
        """Return what `_build` does, on a graph without the inside of blocks; `None` if its gradient is another.

        So it is where a block reads weights it does not own, or remembers earlier calls.
        """
        try:
            with self.objective.ready(number):
                leaves, _, value = self.objective.graph(number, batch, lean=True)
                slopes = torch.autograd.grad(value, list(leaves.values()), create_graph=True, allow_unused=True)
        except RuntimeError:  # an input was written into after the block had read it
            return None
        for one, two in zip(plain, slopes, strict=True):
            if one is None or two is None or not two.requires_grad:
                if one is not two:
                    return None
            elif float((one - two.detach()).norm()) > AGREEMENT * float(one.norm()):
                return None
        live = [index for index, slope in enumerate(slopes) if slope is not None]
        return list(leaves.values()), [get_gradient_edge(slopes[index]) for index in live], live, number

    def _graph_tensors(self, built: Any) -> Any:
        return built[1]  # edges, so that the slopes themselves are not kept

    def _apply(self, built: Any, vectors: list[Tensor]) -> Products:
        leaves, slopes, live, lean = built
        if not slopes:  # the loss is affine in the variables
            return [None] * len(leaves)
        if lean is not None:
            spend("gradients")  # blocks are computed again
        with nullcontext() if lean is None else self.objective.ready(lean):
            directions = [vectors[index] for index in live]
            return list(torch.autograd.grad(slopes, leaves, directions, retain_graph=True, allow_unused=True))

    def _check_constant(self, number: int, batch: Any, slopes: Mapping[str, Tensor]) -> None:
        """Raise where a slope has no graph but changes with the parameters: a derivative was lost in silence.

        A slope without graph is right for a loss that is affine in a variable. A custom backward that leaves the
        graph looks the same. Two steps tell them apart: a smooth slope moves twice as far on the second, a slope
        that jumps at a kink does not.
        """
        size = torch.finfo(self.dtype).eps ** 0.4
        draw = torch.Generator().manual_seed(number)
        moves = {
            name: (torch.randn(value.shape, generator=draw) * (value.abs().mean().cpu() + 1e-3)).to(value)
            for name, value in self.objective.parameters.items()
        }
        shifts = []
        for factor in (size, 2.0 * size):
            moved = self.objective.at(
                {name: value + factor * moves[name] for name, value in self.objective.parameters.items()}
            )
            leaves, _, value = moved.graph(number, batch)
            gradients = torch.autograd.grad(value, [leaves[name] for name in slopes], materialize_grads=True)
            shifts.append([float((new - old).norm()) for new, old in zip(gradients, slopes.values(), strict=True)])
        for name, once, twice in zip(slopes, *shifts, strict=True):
            if once > 0.01 * size * float(slopes[name].norm()) and 1.6 < twice / once < 2.4:
                raise NotDifferentiableError(
                    type(self).__name__,
                    "every operation in model and loss must be twice differentiable",
                    f"a gradient of {name!r} that comes without a graph, though it changes with the parameters",
                    "Write the custom backward with differentiable operations on saved tensors",
                )


@contextmanager
def explain_product_failures(subject: str, number: int) -> Iterator[None]:
    """Turn what autograd throws into the rule, what came, and the next step."""
    try:
        yield
    except NormgaugeError:
        raise
    except (RuntimeError, MemoryError) as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "t allocate memory" in text:
            raise OutOfMemoryError(
                subject,
                f"the graph of batch {number} must fit into memory",
                text,
                "Pass smaller batches (mode='eval' gives the same mean; batch statistics change in mode='train'), "
                "or select fewer parameters",
            ) from error
        if "derivative" in text or "differentiat" in text or "does not require grad" in text:
            raise NotDifferentiableError(
                subject,
                "every operation in model and loss must be twice differentiable",
                text,
                "Replace the operation (a fused kernel often has an eager twin), or ask for the Gauss-Newton "
                "matrix, which bends the loss but not the model",
            ) from error
        raise


def _check_finite(subject: str, product: Tensor, number: int) -> None:
    # A finite sum proves finite terms in one cheap pass; a sum can overflow where its terms do not.
    if math.isfinite(float(product.sum())) or bool(torch.isfinite(product).all()):
        return
    raise NonFiniteError(
        subject,
        "products must be finite",
        f"inf or nan from batch {number}",
        "Use float64, or look for a singular point (sqrt(0), 0/0) in model and loss",
    )
