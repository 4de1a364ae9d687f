"""Operators through the outputs of a model: Gauss-Newton, empirical Fisher, and the Jacobian itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import DataError, NotDifferentiableError
from normgauge.linalg import Operator
from normgauge.objective._data import sample_count, tensors
from normgauge.objective._diagnose import check_differentiable
from normgauge.objective._operators import ObjectiveOperator, Products, explain_product_failures
from normgauge.results import spend


def output_tensors(outputs: Any) -> list[Tensor]:
    """Return the differentiable tensors of an output structure, in order."""
    return [tensor for tensor in tensors(outputs) if tensor.requires_grad]


def _slope(values: Sequence[Tensor | None], by: list[Tensor], along: Sequence[Tensor | None]) -> Products:
    """Return the derivatives of sum <values, along> by some tensors on a kept graph; `None` stands for zeros."""
    pairs = [(v, a) for v, a in zip(values, along, strict=True) if v is not None and v.requires_grad and a is not None]
    if not pairs:
        return [None] * len(by)
    kept, directions = zip(*pairs, strict=True)
    return list(torch.autograd.grad(kept, by, directions, retain_graph=True, allow_unused=True))


class _Linearized:
    """The outputs of one batch with J v and J^T u on one graph."""

    def __init__(self, leaves: list[Tensor], outputs: list[Tensor]) -> None:
        self.leaves, self.outputs = leaves, outputs
        # J v is the derivative of J^T u, linear in the dummy u, with respect to u.
        self.dummies = [torch.zeros_like(output, requires_grad=True) for output in outputs]
        self.pulled = torch.autograd.grad(outputs, leaves, self.dummies, create_graph=True, allow_unused=True)

    def push(self, vectors: list[Tensor]) -> list[Tensor]:
        """Return J v, one tensor per output."""
        pushed = _slope(self.pulled, self.dummies, vectors)
        return [torch.zeros_like(o) if p is None else p for o, p in zip(self.outputs, pushed, strict=True)]

    def pull(self, cotangents: Sequence[Tensor | None]) -> Products:
        """Return J^T u, one tensor per variable."""
        return _slope(self.outputs, self.leaves, cotangents)


class GaussNewtonOperator(ObjectiveOperator):
    """The generalized Gauss-Newton matrix G = J^T (d^2 loss / d output^2) J, J the Jacobian of the outputs.

    Kind: exact (up to rounding). Cost: about four gradients per product. For cross-entropy on logits, and for
    mean squares up to their factor, it is the Fisher matrix of the model. An objective made by `from_step` needs
    `outputs=`, and `step` must call the model on the same tensors as `outputs` does.

    References: pearlmutter1994, martens2020.
    """

    def _build(self, number: int, batch: Any) -> Any:
        leaves, out, value = self.objective.graph(number, batch, outputs=True)
        outputs = output_tensors(out)
        slopes = torch.autograd.grad(value, outputs, create_graph=True, allow_unused=True) if outputs else ()
        if all(slope is None for slope in slopes):
            got = f"{len(outputs)} differentiable output tensors, none of which the loss depends on"
            step = "Let step and outputs call the model on the same tensors, or use loss(output, target)"
            raise NotDifferentiableError("Gauss-Newton", "the loss must be computed from the outputs", got, step)
        used = [index for index, slope in enumerate(slopes) if slope is not None]
        line = _Linearized(list(leaves.values()), [outputs[index] for index in used])
        check_differentiable(type(self).__name__, (line.pulled, slopes))
        return line, [slopes[index] for index in used], self._samples(batch, line.outputs)

    def _graph_tensors(self, built: Any) -> Any:
        line, slopes, _ = built
        return line.pulled, line.outputs, slopes

    def _samples(self, batch: Any, outputs: list[Tensor]) -> int:
        return 0

    def _apply(self, built: Any, vectors: list[Tensor]) -> Products:
        line, slopes, samples = built
        return line.pull(self._bend(line, slopes, line.push(vectors), samples))

    def _bend(self, line: _Linearized, slopes: list[Tensor], pushed: list[Tensor], samples: int) -> Products:
        """Return (d^2 loss / d output^2) J v."""
        return _slope(slopes, line.outputs, pushed)


class EmpiricalFisherOperator(GaussNewtonOperator):
    """The second moment of the samples' gradients: F = mean_i g_i g_i^T, g_i the gradient of sample i's loss.

    With s = d loss / d output of a mean over n samples, g_i = J^T (n s_i), so F v = J^T (n s_i <s_i, (J v)_i>).
    The first axis of every output must count the samples. Under batch statistics g_i is the gradient through
    sample i's output alone, whose dependence on the other samples is included in J.

    Kind: exact (up to rounding). Cost: about four gradients per product. It is not the Fisher matrix, which takes
    the labels from the model; see `GaussNewtonOperator`.

    References: martens2020.
    """

    def _samples(self, batch: Any, outputs: list[Tensor]) -> int:
        samples = sample_count(batch)
        if any(output.ndim == 0 or output.shape[0] != samples for output in outputs):
            rule = f"the first axis of every output must count the {samples} samples of the batch"
            got = f"outputs of shape {', '.join(str(tuple(output.shape)) for output in outputs)}"
            step = "Use the Gauss-Newton matrix, or return outputs with samples first"
            raise DataError("EmpiricalFisherOperator", rule, got, step)
        return samples

    def _bend(self, line: _Linearized, slopes: list[Tensor], pushed: list[Tensor], samples: int) -> Products:
        flat = [(s.detach().reshape(samples, -1), p.reshape(samples, -1)) for s, p in zip(slopes, pushed, strict=True)]
        along = sum(((s * p).sum(1, keepdim=True) for s, p in flat), torch.zeros((), device=self.device))
        return [(samples * s * along).reshape(p.shape) for (s, _), p in zip(flat, pushed, strict=True)]


class JacobianOperator(Operator):
    """The Jacobian of all outputs, of shape [output entries over all batches, variables]; `.rmatvec` is its transpose.

    Kind: exact (up to rounding). Cost: about two gradients for J v, one for J^T u. The graphs of all batches are
    kept until `close()`.
    """

    def __init__(self, objective: Any) -> None:
        self._inner = _JacobianGraphs(objective)
        self.dtype, self.device = objective.dtype, objective.device
        self._lines = [line for _, line, _ in self._inner._graphs()]
        self.sizes = [output.numel() for line in self._lines for output in line.outputs]
        self.shape = (sum(self.sizes), objective.dimension)

    def _matvec(self, vector: Tensor) -> Tensor:
        spend("products")
        pieces = list(self._inner.objective.unflatten(vector).values())
        with explain_product_failures("JacobianOperator", 0):
            pushed = [push for line in self._lines for push in line.push(pieces)]
        return torch.cat([push.detach().reshape(-1).to(self.dtype) for push in pushed])

    def _rmatvec(self, vector: Tensor) -> Tensor:
        spend("products")
        parts = iter(vector.split(self.sizes))
        total = torch.zeros(self.shape[1], dtype=self.dtype, device=self.device)
        for line in self._lines:
            cotangents = [next(parts).view(output.shape).to(output.dtype) for output in line.outputs]
            total += self._inner._flatten(line.pull(cotangents))
        return total

    def close(self) -> None:
        """Free the graphs; the operator cannot be used afterwards."""
        self._lines = []
        self._inner.close()


class _JacobianGraphs(ObjectiveOperator):
    """The linearized outputs of every batch, without a loss."""

    def _build(self, number: int, batch: Any) -> _Linearized:
        leaves, out, _ = self.objective.graph(number, batch, outputs=True)
        line = _Linearized(list(leaves.values()), output_tensors(out))
        check_differentiable("JacobianOperator", line.pulled)
        return line

    def _graph_tensors(self, built: _Linearized) -> Any:
        return ()  # the Jacobian keeps all of them

    def _apply(self, built: Any, vectors: list[Tensor]) -> Products:
        raise NotImplementedError("the Jacobian is not square")
