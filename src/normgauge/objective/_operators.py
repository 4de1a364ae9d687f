"""Curvature of an Objective as operators: exact products on retained graphs, within a memory budget."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from normgauge.errors import NonFiniteError, NormgaugeError, OutOfMemoryError
from normgauge.linalg import Operator
from normgauge.objective._diagnose import check_differentiable, graph_bytes, not_twice_differentiable
from normgauge.results import spend

DEFAULT_MEMORY = 2 << 30
AGREEMENT = 1e-3  # of a gradient computed again: rounding is below, a missing term is of order one
Products = list[Tensor | None]


class ObjectiveOperator(Operator):
    """A self-adjoint operator on the variables of an Objective; takes flat vectors and dicts by name.

    The graphs of the batches are built at the first product and kept for the next ones as long as they fit into
    `memory`; those that do not are built again for every product. A batch is never split: batch statistics would
    change. `close()`, leaving a `with` block and any error free the graphs. The values of the parameters are those
    at the time the operator was made. `memory` is in bytes; the graph of a single batch is kept in any case, and a
    Hessian keeps only what passes between blocks of the model where a batch's whole graph would take more.
    """

    self_adjoint = True

    def __init__(self, objective: Any, *, memory: int = DEFAULT_MEMORY) -> None:
        self.objective = objective.at({name: value.clone() for name, value in objective.parameters.items()})
        self.shape = (objective.dimension, objective.dimension)
        self.dtype, self.device = objective.dtype, objective.device
        self.memory = memory
        self.matvecs = self.builds = 0
        self._kept: dict[int, tuple[Any, float]] | None = None
        self._complete = False  # whether every batch's graph is kept, so that the data are not read again
        self._pieces = [(value.shape, value.dtype) for value in objective.parameters.values()]
        self._sizes = [value.numel() for value in objective.parameters.values()]

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
        parts = zip(vector.split(self._sizes), self._pieces, strict=True)
        pieces = [part.view(shape).to(dtype) for part, (shape, dtype) in parts]
        name, weights, total = type(self).__name__, 0.0, vector
        try:
            for number, built, weight in self._graphs():
                with explain_product_failures(name, number):
                    product = self._flatten(self._apply(built, pieces))
                del built  # before the next is built
                # A finite square proves finite terms in one cheap pass; it can overflow where its terms do not.
                if not math.isfinite(float(product.dot(product))) and not bool(torch.isfinite(product).all()):
                    step = "Use float64, or look for a singular point (sqrt(0), 0/0) in model and loss"
                    raise NonFiniteError(name, "products must be finite", f"inf or nan from batch {number}", step)
                # The running weighted mean: with one batch nothing has to be scaled.
                weights += weight
                total = product if total is vector else total.lerp_(product, weight / weights)
        except BaseException:
            self.close()
            raise
        return total

    def _graphs(self) -> Iterator[tuple[int, Any, float]]:
        """Yield batch number, graph and weight; keep graphs while they fit, rebuild the others."""
        if self._kept is not None and self._complete:
            yield from ((number, *entry) for number, entry in self._kept.items())
            return
        first = self._kept is None
        kept = self._kept = self._kept or {}
        used = count = number = 0
        entry: tuple[Any, float] | None = None
        for number, batch in self.objective.batches():
            count += 1
            entry = kept.get(number)  # the last graph goes before the next is built
            if entry is None:
                with explain_product_failures(type(self).__name__, number):
                    entry = self._build(number, batch), self.objective.weight(batch)
                self.builds += 1
                used += graph_bytes(self._graph_tensors(entry[0])) if first else 0
                if first and used <= self.memory:
                    kept[number] = entry
            yield number, *entry
        if count == 1 and entry is not None:
            kept[number] = entry
        self._complete = len(kept) == count

    def _flatten(self, products: Products) -> Tensor:
        """Join products into a new flat vector; `None` stands for zeros."""
        parts = zip(products, self._sizes, strict=True)
        most = max(self._sizes) if any(p is None for p in products) else 0
        zeros = torch.zeros(most, dtype=self.dtype, device=self.device)
        return torch.cat([zeros[:size] if p is None else p.detach().reshape(-1).to(self.dtype) for p, size in parts])

    def close(self) -> None:
        """Free the retained graphs; the next product builds them again."""
        self._kept, self._complete = None, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        slopes = torch.autograd.grad(value, list(leaves.values()), create_graph=True, allow_unused=True)
        check_differentiable(type(self).__name__, slopes)
        live = [index for index, slope in enumerate(slopes) if slope is not None and slope.requires_grad]
        named = zip(leaves, slopes, strict=True)
        flat = {name: slope for name, slope in named if slope is not None and not slope.requires_grad}
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
        here = self.objective.parameters
        sizes = {name: value.abs().mean().cpu() + 1e-3 for name, value in here.items()}
        moves = {n: (torch.randn(v.shape, generator=draw) * sizes[n]).to(v) for n, v in here.items()}
        shifts = []
        for factor in (size, 2.0 * size):
            moved = {name: value + factor * moves[name] for name, value in here.items()}
            leaves, _, value = self.objective.at(moved).graph(number, batch)
            gradients = torch.autograd.grad(value, [leaves[name] for name in slopes], materialize_grads=True)
            shifts.append([float((new - old).norm()) for new, old in zip(gradients, slopes.values(), strict=True)])
        for name, once, twice in zip(slopes, *shifts, strict=True):
            if once > 0.01 * size * float(slopes[name].norm()) and 1.6 < twice / once < 2.4:
                what = f"a gradient of {name!r} that comes without a graph, though it changes with the parameters"
                raise not_twice_differentiable(type(self).__name__, what)


class ShardedOperator(Operator):
    """The mean of the ranks' operators, weighted by their samples: A v = sum_r n_r A_r v / sum_r n_r.

    Every rank makes its objective on its own share of the data, with equal parameters, and calls the same products
    in the same order; each gets the same result. Batch statistics in train mode are those of each rank's batches,
    as when the shards were batches of one process; nothing is synchronized but products.
    """

    self_adjoint = True

    def __init__(self, local: ObjectiveOperator, group: Any) -> None:
        self.local, self.group = local, group
        self.shape, self.dtype, self.device = local.shape, local.dtype, local.device
        self.weight = local.weight
        total = torch.tensor([self.weight], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total, group=group)
        self.total = float(total)

    def _matvec(self, vector: Tensor) -> Tensor:
        failure: BaseException | None = None
        try:
            product = self.local.matvec(vector).mul_(self.weight / self.total)
        except Exception as error:  # noqa: BLE001 (raised again below, after the others have been told)
            failure, product = error, torch.full_like(vector, float("nan"))
        torch.distributed.all_reduce(product, group=self.group)
        if failure is not None:
            raise failure
        if not bool(torch.isfinite(product.sum())) and not bool(torch.isfinite(product).all()):
            rule, got = "products of all ranks must be finite", "inf or nan from another rank"
            raise NonFiniteError("ShardedOperator", rule, got, "Look at the error of the other ranks")
        return product


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
            step = "Pass smaller batches (mode='eval' gives the same mean; batch statistics change in mode='train'), "
            step += "or select fewer parameters"
            raise OutOfMemoryError(subject, f"the graph of batch {number} must fit into memory", text, step) from error
        if "derivative" in text or "differentiat" in text or "does not require grad" in text:
            step = (
                "Replace the operation (a fused kernel often has an eager twin), or ask for the Gauss-Newton matrix, "
            )
            raise not_twice_differentiable(subject, text, f"{step}which bends the loss but not the model") from error
        raise
