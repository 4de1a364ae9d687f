"""Operations of torch written in others that have rules, the same under every version of torch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten
Cell = Callable[[Tensor, tuple[Tensor, ...], Sequence[Tensor | None]], tuple[Tensor, ...]]


def _gates(x: Tensor, h: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
    return functional.linear(x, weights[0], weights[2]) + functional.linear(h, weights[1], weights[3])  # type: ignore[arg-type]


def _lstm_cell(x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    i, f, g, o = _gates(x, state[0], weights).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    out = o.sigmoid() * cell.tanh()
    return (out if weights[4] is None else functional.linear(out, weights[4])), cell


def _gru_cell(x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    own = functional.linear(x, weights[0], weights[2]).chunk(3, -1)  # type: ignore[arg-type]
    kept = functional.linear(state[0], weights[1], weights[3]).chunk(3, -1)  # type: ignore[arg-type]
    reset, update = (own[0] + kept[0]).sigmoid(), (own[1] + kept[1]).sigmoid()
    new = (own[2] + reset * kept[2]).tanh()
    return (new + update * (state[0] - new),)


def _recurrent(cell: Cell, count: int) -> Callable[..., tuple[Tensor, ...]]:
    def run(
        x: Tensor,
        start: Any,
        parameters: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        """Return the outputs and the last states of a recurrent network of torch's."""
        states, ways = [start] if isinstance(start, Tensor) else list(start), 2 if both else 1
        size = len(parameters) // (layers * ways)
        projected = size - (4 if has_biases else 2)
        x = x.transpose(0, 1) if batch_first else x
        last: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            outputs = []
            for way in range(ways):
                number = layer * ways + way
                own = list(parameters[number * size : (number + 1) * size])
                weights = [*own[:2], *(own[2:4] if has_biases else (None, None)), own[-1] if projected else None]
                state = tuple(s[number] for s in states)
                seen: list[Tensor] = []
                for step in reversed(x.unbind(0)) if way else x.unbind(0):
                    state = cell(step, state, weights)
                    seen.append(state[0])
                outputs.append(torch.stack(seen[::-1] if way else seen, 0))
                last.append(state)
            x = torch.cat(outputs, -1) if both else outputs[0]
        ends = [torch.stack([state[i] for state in last], 0) for i in range(count)]
        return (x.transpose(0, 1) if batch_first else x, *ends)

    return run


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda x, state, weights: (activation(_gates(x, state[0], weights)),)


def _einsum(equation: str, operands: Sequence[Tensor], *, path: Any = None) -> Tensor:
    """Contract operands from left to right by products of matrices."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    labels = left.split(",")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    spare = max(0, *(x.ndim - len(own.replace(".", "")) for x, own in zip(operands, labels, strict=True)))
    dots = free[:spare]  # what an ellipsis stands for, counted from the right
    wide = [
        own.replace("...", "".join(dots[spare - (x.ndim - len(own) + 3) :]))
        for x, own in zip(operands, labels, strict=True)
    ]
    if not arrow:
        right = "..." + "".join(sorted(c for c in set(left) - set(".,") if left.count(c) == 1))
    target = right.replace("...", "".join(dots)) if "..." in left else right.replace("...", "")
    if any(len(set(own)) < len(own) for own in wide):
        raise NotImplementedError("einsum with an index twice in one operand")
    x, own = operands[0], wide[0]
    for number in range(1, len(operands)):
        later = set(target).union(*wide[number + 1 :])
        x, own = _contract(x, own, operands[number], wide[number], later)
    x, own = _sum_out(x, own, set(target))
    return x.permute([own.index(c) for c in target])


def _sum_out(x: Tensor, own: str, kept: set[str]) -> tuple[Tensor, str]:
    gone = [i for i, c in enumerate(own) if c not in kept]
    return (x.sum(gone) if gone else x), "".join(c for c in own if c in kept)


def _contract(x: Tensor, of_x: str, y: Tensor, of_y: str, later: set[str]) -> tuple[Tensor, str]:
    x, of_x = _sum_out(x, of_x, later | set(of_y))
    y, of_y = _sum_out(y, of_y, later | set(of_x))
    both = [c for c in of_x if c in of_y]
    batch, inner = [c for c in both if c in later], [c for c in both if c not in later]
    only_x, only_y = [c for c in of_x if c not in of_y], [c for c in of_y if c not in of_x]
    sizes = {**dict(zip(of_x, x.shape, strict=True)), **dict(zip(of_y, y.shape, strict=True))}
    total = [math.prod(sizes[c] for c in group) for group in (batch, only_x, inner, only_y)]
    left = x.permute([of_x.index(c) for c in (*batch, *only_x, *inner)]).reshape(total[0], total[1], total[2])
    right = y.permute([of_y.index(c) for c in (*batch, *inner, *only_y)]).reshape(total[0], total[2], total[3])
    order = (*batch, *only_x, *only_y)
    return torch.bmm(left, right).reshape([sizes[c] for c in order]), "".join(order)


def _variance(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    axes = list(range(x.ndim)) if dim is None else list(dim)
    centred = x - x.mean(axes, keepdim=True)
    square = centred.pow(2).mean(axes, keepdim=keepdim)
    count = x.numel() // max(1, square.numel())
    less = 1.0 if correction is None else float(correction)
    return square if less == 0 else square * (count / (count - less))


def _deviation(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _variance(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _variance_and_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    axes = list(range(x.ndim)) if dim is None else list(dim)
    return _variance(x, dim, correction=correction, keepdim=keepdim), x.mean(axes, keepdim=keepdim)


def _of_dim(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim=None, unbiased=True, keepdim=False: function(
        x, dim, correction=1.0 if unbiased else 0.0, keepdim=keepdim
    )


def _length(x: Tensor, p: Any, dim: Any, keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(x, 2 if p is None else p, dim, keepdim)


def _instances(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, use: bool, *rest: Any) -> Tensor:
    if not use:
        return functional.batch_norm(x, mean, var, weight=weight, bias=bias, eps=rest[1])
    return functional.group_norm(x, x.shape[1], weight, bias, rest[1])


def _add_products(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    return beta * x + alpha * torch.bmm(a, b)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.lstm.input: _recurrent(_lstm_cell, 2),
    aten.gru.input: _recurrent(_gru_cell, 1),
    aten.rnn_tanh.input: _recurrent(_plain_cell(torch.tanh), 1),
    aten.rnn_relu.input: _recurrent(_plain_cell(torch.relu), 1),
    aten.einsum.default: _einsum,
    aten.baddbmm.default: _add_products,
    aten.var.correction: _variance,
    aten.std.correction: _deviation,
    aten.var_mean.correction: _variance_and_mean,
    aten.var.dim: _of_dim(_variance),
    aten.std.dim: _of_dim(_deviation),
    aten.var_mean.dim: _of_dim(_variance_and_mean),
    aten.norm.ScalarOpt_dim: _length,
    aten.instance_norm.default: _instances,
}
