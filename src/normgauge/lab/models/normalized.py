"""A layer under a normalizer, the lab networks' building block: direction weights, joint scale, exact rescaling."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normgauge.nn import registry


class Normalized(nn.Module):
    """A linear or convolutional layer under a normalizer: the layer, then the normalizer if it acts on activations."""

    def __init__(self, layer: nn.Module, norm: str, spatial: int) -> None:
        super().__init__()
        self.declaration = registry.get(norm)
        channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
        self.layer = layer
        acts = self.declaration.placement == "activation"
        self.norm = self.declaration.layer(int(channels), spatial) if acts else nn.Identity()  # type: ignore[arg-type]

    def wrap_weights(self) -> None:
        """Put a weight normalizer on the layer; done after its weights are drawn, so that all arms draw the same."""
        if self.declaration.placement == "weights":
            self.layer = self.declaration.wrap(self.layer)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the normalized pre-activation."""
        return self.norm(self.layer(inputs))


def normalized_layers(network: nn.Module) -> list[Normalized]:
    """Return the layers that stand under a normalizer, in the order of the network."""
    return [part for part in network.modules() if isinstance(part, Normalized)]


def direction_weight(part: Normalized) -> nn.Parameter:
    """Return the weight whose scale the normalizer ignores; under weight normalization that is v of `g v / |v|`."""
    if part.declaration.placement == "weights":
        return part.layer.get_parameter("parametrizations.weight.original1")
    return part.layer.get_parameter("weight")


def joint_parameters(part: Normalized) -> list[nn.Parameter]:
    """Return the parameters that may be scaled by one factor without changing the function (up to eps).

    Weight and bias before a normalizer of activations (batch statistics ignore the bias besides); v alone otherwise.
    """
    if part.declaration.placement == "weights":
        return [direction_weight(part)]
    bias = part.layer.bias
    return [direction_weight(part), *([bias] if isinstance(bias, nn.Parameter) else [])]


def joint_norm(parameters: Sequence[Tensor]) -> float:
    """Return the norm of several tensors as one vector."""
    return float(torch.stack([p.detach().double().square().sum() for p in parameters]).sum().sqrt())


def rescale(network: nn.Module, factor: float) -> None:
    """Multiply every normalized layer's weights by `factor`, stored statistics with them: the same function."""
    with torch.no_grad():
        for part in normalized_layers(network):
            for parameter in joint_parameters(part):
                parameter.mul_(factor)
            stored = dict(part.norm.named_buffers())
            if "running_mean" in stored:
                stored["running_mean"].mul_(factor)
                stored["running_var"].mul_(factor**2)
