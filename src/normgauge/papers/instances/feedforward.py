"""Small feedforward networks without biases, as S2 has them: the nets whose Jacobians the judges measure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from normgauge.papers.instances.derivatives import jacobian
from normgauge.papers.instances.draws import normal

Map = Callable[[Tensor], Tensor]


def nothing(y: Tensor) -> Tensor:
    """Return the input: a layer without normalization."""
    return y


def layer_norm(eps: float) -> Map:
    """Return LN without scale and shift."""
    return lambda y: functional.layer_norm(y, y.shape[-1:], eps=eps)


def fixed_batch_norm(mean: Tensor, variance: Tensor, eps: float) -> Map:
    """Return BN with population statistics, without scale and shift."""
    return lambda y: (y - mean) / (variance + eps).sqrt()


@dataclass(frozen=True)
class Feedforward:
    """`h_k = g(NO_k(W_k h_{k-1}))`: weights `W_1, ..., W_K`, one map per layer, g 1-Lipschitz."""

    weights: tuple[Tensor, ...]
    norms: tuple[Map, ...]
    activation: Map = torch.relu

    def __call__(self, x: Tensor) -> Tensor:
        """Return `h_K(x)`."""
        return self.output_by_hidden(0, x)

    def hidden(self, x: Tensor, layer: int) -> Tensor:
        """Return `h_layer(x)`; layer 0 is x."""
        return replace(self, weights=self.weights[:layer], norms=self.norms[:layer])(x)

    def output_by_hidden(self, layer: int, h: Tensor) -> Tensor:
        """Return `h_K` as a function of `h_layer`."""
        for W, norm in zip(self.weights[layer:], self.norms[layer:], strict=True):
            h = self.activation(norm(h @ W.T))
        return h

    def output_by_total_input(self, y: Tensor, layer: int) -> Tensor:
        """Return `h_K` as a function of `y_layer = W_layer h_{layer-1}` (layers count from 1)."""
        return self.output_by_hidden(layer, self.activation(self.norms[layer - 1](y)))

    def output_by_weight(self, flat: Tensor, layer: int, h: Tensor) -> Tensor:
        """Return `h_K` as a function of `W_layer`, flattened, for one `h_{layer-1}`."""
        return self.output_by_total_input(flat.reshape(self.weights[layer - 1].shape) @ h, layer)

    def input_slope(self, x: Tensor) -> Tensor:
        """Return the spectral norm of `d h_K / d x` at x."""
        return torch.linalg.matrix_norm(jacobian(self, x), 2)

    def weight_slope(self, layer: int, h: Tensor) -> Tensor:
        """Return the spectral norm of `d h_K / d W_layer` (Frobenius norm of the weights) for one `h_{layer-1}`."""
        flat = self.weights[layer - 1].flatten()
        return torch.linalg.matrix_norm(jacobian(self.output_by_weight, flat, layer, h), 2)

    def total_input_slope(self, layer: int, y: Tensor) -> Tensor:
        """Return the spectral norm of `d h_K / d y_layer` at y."""
        return torch.linalg.matrix_norm(jacobian(self.output_by_total_input, y, layer), 2)

    def weight_product(self, start: int = 0) -> float:
        """Return the product of the spectral norms of the weights after the first `start` layers."""
        return prod(float(torch.linalg.matrix_norm(W, 2)) for W in self.weights[start:])


def random_network(
    generator: torch.Generator, widths: Sequence[int], norm: Map = nothing, activation: Map = torch.relu
) -> Feedforward:
    """Draw Gaussian weights of the given widths (the first is the input's), with the same map in every layer."""
    weights = tuple(normal(generator, b, a) / a**0.5 for a, b in pairwise(widths))
    return Feedforward(weights, (norm,) * len(weights), activation)


def with_population_statistics(net: Feedforward, data: Tensor, eps: float) -> tuple[Feedforward, list[Tensor]]:
    """Return the net with BN whose statistics are those of `data`, layer after layer, and the variances."""
    norms, variances, h = list[Map](), [], data
    for W in net.weights:
        y = h @ W.T
        variances.append(y.var(0, correction=0))
        norms.append(fixed_batch_norm(y.mean(0), variances[-1], eps))
        h = net.activation(norms[-1](y))
    return replace(net, norms=tuple(norms)), variances


def padded_identity(rows: int, columns: int) -> Tensor:
    """Return the matrix that truncates a vector or pads it with zeros (S2 eq (35))."""
    return torch.eye(rows, columns)
