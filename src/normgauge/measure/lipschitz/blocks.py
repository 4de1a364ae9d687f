"""torch's composite layers written out as their parts, since their own forward cannot be traced."""

from __future__ import annotations

from torch import Tensor, nn


class EncoderLayer(nn.Module):
    """`nn.TransformerEncoderLayer` in evaluation mode, without masks."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.self_attn, self.norm1, self.norm2 = layer.self_attn, layer.norm1, layer.norm2
        self.linear1, self.linear2, self.norm_first = layer.linear1, layer.linear2, layer.norm_first
        self.dropout, self.dropout1, self.dropout2 = layer.dropout, layer.dropout1, layer.dropout2
        self.activation = layer.activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        if self.norm_first:
            x = x + self._attend(self.norm1(x))
            return x + self._feed(self.norm2(x))
        x = self.norm1(x + self._attend(x))
        return self.norm2(x + self._feed(x))

    def _attend(self, x: Tensor) -> Tensor:
        return self.dropout1(self.self_attn(x, x, x, need_weights=False)[0])

    def _feed(self, x: Tensor) -> Tensor:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` without masks."""

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        super().__init__()
        self.layers, self.norm = encoder.layers, encoder.norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the encoder's output."""
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None else self.norm(x)


def unrolled(model: nn.Module) -> nn.Module:
    """Return a copy's modules with torch's transformer layers exchanged; it shares all parameters."""
    if type(model) is nn.TransformerEncoderLayer:
        return EncoderLayer(model).train(model.training)
    if type(model) is nn.TransformerEncoder:
        return unrolled(Encoder(model).train(model.training))
    for name, child in list(model.named_children()):
        changed = unrolled(child)
        if changed is not child:
            setattr(model, name, changed)
    return model
