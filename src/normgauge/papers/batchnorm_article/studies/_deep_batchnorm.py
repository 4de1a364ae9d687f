"""Deep fully connected batch-normalized networks, with and without skips, and their gradients at the start."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from normgauge.rng import generator

PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda t: t,
    "relu": torch.relu,
    "leaky_relu": nn.functional.leaky_relu,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "gelu": nn.functional.gelu,
}


class DeepBatchNorm(nn.Module):
    """`h <- W phi(BN(h))`, or `h + W phi(BN(h))` if `skip`; phi has this `slope` below 0; a linear map at either end.

    Weights have variance 2 / fan-in, a scale that BN forgets without skips.
    """

    def __init__(self, inputs: int, width: int, depth: int, classes: int, *, seed: int) -> None:
        super().__init__()
        self.skip, self.slope = False, 0.0
        self.first = nn.Linear(inputs, width, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))
        self.end = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, classes)
        source = generator(seed)
        with torch.no_grad():
            for layer in (self.first, *self.layers):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=source))
                layer.weight.mul_(math.sqrt(2 / layer.weight.shape[1]))
            self.last.weight.copy_(torch.randn(self.last.weight.shape, generator=source) / math.sqrt(width))
            self.last.bias.zero_()

    def make_orthogonal(self, seed: int) -> None:
        """Draw the repeated layers anew, as orthogonal matrices."""
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, generator=generator(seed))  # type: ignore[arg-type]
            seed += 1000

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the class scores."""
        h = self.first(inputs.flatten(1))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            moved = layer(nn.functional.leaky_relu(norm(h), self.slope))
            h = h + moved if self.skip else moved
        return self.last(torch.relu(self.end(h)))


def squared_gradients(
    activation: str, batch: int, width: int, depth: int, *, skip: bool, seed: int
) -> tuple[list[float], list[float]]:
    """Return squared gradient norms by weights and by pre-activations, first layer to last, of a random linear loss.

    Weights have variance 1 / width, the batch is Gaussian, BN has gain 1, no bias and no eps: S3's network.
    """
    source = generator(seed)
    h = torch.randn(batch, width, generator=source, dtype=torch.float64).requires_grad_()
    phi = PHI[activation]
    weights, states = [], []
    for _ in range(depth):
        weight = torch.randn(width, width, generator=source, dtype=torch.float64) / math.sqrt(width)
        weight.requires_grad_()
        centred = h - h.mean(0)
        moved = phi(centred / centred.square().mean(0).sqrt()) @ weight.T
        h = h + moved if skip else moved
        weights.append(weight)
        states.append(h)
    pull = torch.randn(h.shape, generator=source, dtype=torch.float64) / math.sqrt(h.numel())
    slopes = torch.autograd.grad((pull * h).sum(), [*weights, *states])
    squares = [float(slope.square().sum()) for slope in slopes]
    return squares[:depth], squares[depth:]
