"""Hessian and Gauss-Newton matrix of an Objective as operators: exact products on a retained graph."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError, NotDifferentiableError, explain
from normgauge.linalg import Operator

if TYPE_CHECKING:
    from normgauge.objective._objective import Objective


class ObjectiveOperator(Operator):
    """A self-adjoint operator on the variables of an Objective; takes flat vectors and dicts by name.

    With one batch the graph of the loss is built at the first product and kept for the next ones; with several
    it is rebuilt per batch, so that memory stays that of one. `close()` or leaving a `with` block frees it.
    The values of the parameters are those at the time the operator was made.
    """

    self_adjoint = True

    def __init__(self, objective: Objective) -> None:
        self.objective = objective.at({name: value.clone() for name, value in objective.parameters.items()})
        self.shape = (objective.dimension, objective.dimension)
        self.dtype, self.device = objective.dtype, objective.device
        self.matvecs = 0
        self._kept: Any = None

    @abstractmethod
    def _build(self, number: int, batch: Any) -> Any:
        """Build what one batch's products need."""

    @abstractmethod
    def _apply(self, built: Any, vectors: dict[str, Tensor]) -> list[Tensor | None]:
        """Return the product for one batch."""

    def __matmul__(self, other: Any) -> Any:
        """Return the product with a flat vector, a matrix of columns, or a dict of tensors by parameter name."""
        if isinstance(other, Mapping):
            return self.objective.unflatten(self.matvec(self.objective.flatten(other)))
        return super().__matmul__(other)

    def _matvec(self, vector: Tensor) -> Tensor:
        self.matvecs += 1
        pieces = self.objective.unflatten(vector)
        total = torch.zeros_like(vector)
        try:
            if self._kept is None:
                self._kept = self._keep_if_single()
            if self._kept:
                self._accumulate(total, self._kept[0], pieces, 0)
                weights = 1.0
            else:
                weights = 0.0
                for number, batch in self.objective.batches():
                    weight = self.objective.weight(batch)
                    weights += weight
                    self._accumulate(total, self._build(number, batch), pieces, number, weight)
        except BaseException:
            self.close()
            raise
        return total / weights

    def _keep_if_single(self) -> list[Any]:
        """Return the one batch's graph in a list, or an empty list when there are several batches."""
        batches = iter(self.objective.batches())
        number, batch = next(batches)
        if next(batches, None) is not None:
            return []
        return [self._build(number, batch)]

    def _accumulate(
        self, total: Tensor, built: Any, pieces: dict[str, Tensor], number: int, weight: float = 1.0
    ) -> None:
        start = 0
        for piece, product in zip(pieces.values(), self._apply(built, pieces), strict=True):
            if product is not None:
                total[start : start + piece.numel()].add_(product.reshape(-1).to(total.dtype), alpha=weight)
            start += piece.numel()
        if not bool(torch.isfinite(total).all()):
            raise NonFiniteError(
                explain(
                    type(self).__name__,
                    "products must be finite",
                    f"inf or nan from batch {number}",
                    "Use float64, or look for a singular point (sqrt(0), 0/0) in model and loss",
                )
            )

    def close(self) -> None:
        """Free the retained graph; the next product builds it again."""
        self._kept = None

    def __enter__(self) -> Self:
        """Return the operator."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the retained graph."""
        self.close()


class HessianOperator(ObjectiveOperator):
    """The Hessian of the loss: H v = d/dtheta <grad L(theta), v>, by a second backward pass.

    Kind: exact (up to rounding). Cost: the first product about three gradients, each further one about two on
    one batch; about three per product on several batches. Attention runs its math kernel, the only one with a
    second derivative. ReLU kinks have measure zero and are ignored, as everywhere in automatic differentiation.

    Deviations: `torch.func.hessian` is *not* used: it is silently wrong through fused BatchNorm and LayerNorm.

    References: pearlmutter1994.
    """

    def _build(self, number: int, batch: Any) -> tuple[dict[str, Tensor], list[Tensor], list[int]]:
        leaves, _, value = self.objective.graph(number, batch)
        slopes = torch.autograd.grad(
            value, list(leaves.values()), create_graph=True, allow_unused=True, materialize_grads=False
        )
        live = [index for index, slope in enumerate(slopes) if slope is not None and slope.requires_grad]
        return leaves, [slopes[index] for index in live], live

    def _apply(self, built: Any, vectors: dict[str, Tensor]) -> list[Tensor | None]:
        leaves, slopes, live = built
        if not slopes:  # the loss is affine in the variables
            return [None] * len(leaves)
        values = list(vectors.values())
        try:
            return list(
                torch.autograd.grad(
                    slopes,
                    list(leaves.values()),
                    grad_outputs=[values[index] for index in live],
                    retain_graph=True,
                    allow_unused=True,
                )
            )
        except RuntimeError as error:
            raise _no_second_derivative(error) from error


class GaussNewtonOperator(ObjectiveOperator):
    """The generalized Gauss-Newton matrix G = J^T (d^2 loss / d output^2) J, J the Jacobian of the outputs.

    Kind: exact (up to rounding). Cost: about four gradients per product. For cross-entropy on logits it is the
    Fisher matrix. An objective made by `from_step` needs `outputs=`, and `step` must call the model on the same
    tensors as `outputs` does.

    References: pearlmutter1994.
    """

    def _build(self, number: int, batch: Any) -> Any:
        leaves, out, value = self.objective.graph(number, batch, outputs=True)
        from normgauge.objective._objective import output_tensors

        outputs = output_tensors(out)
        slopes = torch.autograd.grad(value, outputs, create_graph=True, allow_unused=True) if outputs else ()
        if all(slope is None for slope in slopes):
            raise NotDifferentiableError(
                explain(
                    "Gauss-Newton",
                    "the loss must be computed from the outputs",
                    f"{len(outputs)} differentiable output tensors, none of which the loss depends on",
                    "Let step and outputs call the model on the same tensors, or use loss(output, target)",
                )
            )
        used = [index for index, slope in enumerate(slopes) if slope is not None]
        outputs, bends = [outputs[index] for index in used], [slopes[index] for index in used]
        dummies = [torch.zeros_like(output, requires_grad=True) for output in outputs]
        pulled = torch.autograd.grad(
            outputs, list(leaves.values()), grad_outputs=dummies, create_graph=True, allow_unused=True
        )
        return leaves, outputs, bends, dummies, pulled

    def _apply(self, built: Any, vectors: dict[str, Tensor]) -> list[Tensor | None]:
        leaves, outputs, slopes, dummies, pulled = built
        pairs = [(p, v) for p, v in zip(pulled, vectors.values(), strict=True) if p is not None and p.requires_grad]
        try:
            # J v is the derivative of J^T u (linear in the dummy u) with respect to u.
            pushed = torch.autograd.grad(
                [p for p, _ in pairs], dummies, grad_outputs=[v for _, v in pairs], retain_graph=True, allow_unused=True
            )
            curved = [s for s in slopes if s.requires_grad]
            if not curved:
                return [None] * len(leaves)
            bent = torch.autograd.grad(
                curved,
                outputs,
                grad_outputs=[
                    torch.zeros_like(s) if d is None else d
                    for s, d in zip(slopes, pushed, strict=True)
                    if s.requires_grad
                ],
                retain_graph=True,
                allow_unused=True,
            )
            kept = [(o, b) for o, b in zip(outputs, bent, strict=True) if b is not None]
            return list(
                torch.autograd.grad(
                    [o for o, _ in kept],
                    list(leaves.values()),
                    grad_outputs=[b for _, b in kept],
                    retain_graph=True,
                    allow_unused=True,
                )
            )
        except RuntimeError as error:
            raise _no_second_derivative(error) from error


def _no_second_derivative(error: RuntimeError) -> RuntimeError:
    if "derivative" not in str(error) and "does not require grad" not in str(error):
        return error
    return NotDifferentiableError(
        explain(
            "HessianOperator",
            "every operation in model and loss must be twice differentiable",
            str(error).splitlines()[0],
            "Replace the operation (a fused kernel often has an eager twin), or ask for the Gauss-Newton matrix",
        )
    )
