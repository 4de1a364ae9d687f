"""A small GPT under any normalizer: placed as the register declares, queries and keys normalized or not."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, unknown_name
from normgauge.lab.models.normalized import Normalized
from normgauge.nn import registry


class TokenNorm(nn.Module):
    """A normalizer of the register over the last axis, every token a sample; nothing where it acts on weights."""

    def __init__(self, norm: str, width: int) -> None:
        super().__init__()
        declaration = registry.get(norm)
        self.norm = nn.Identity() if declaration.placement == "weights" else declaration.layer(width, 0)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the normalized tokens."""
        return self.norm(stream.flatten(0, -2)).view_as(stream)


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v over the past, with q and k normalized per head where `qk` names a normalizer."""

    def __init__(self, width: int, heads: int, norm: str, qk: str | None, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = _linear(width, 3 * width, norm, bias), _linear(width, width, norm, bias)
        self.query_norm, self.key_norm = (TokenNorm(qk or "none", width // heads) for _ in range(2))

    def forward(self, stream: Tensor) -> Tensor:
        """Return what the heads read, mixed."""
        query, key, value = self.qkv(stream).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        query, key = self.query_norm(query), self.key_norm(key)
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Branch(nn.Module):
    """One residual branch f and its normalizers N, as `registry.PLACEMENTS` declares them."""

    def __init__(self, branch: nn.Module, norm: str, width: int, place: str) -> None:
        super().__init__()
        self.branch, self.place = branch, registry.PLACEMENTS[place]
        places = (self.place.before, self.place.behind, self.place.around)
        parts = (TokenNorm(norm, width) if stands else nn.Identity() for stands in places)
        self.before, self.behind, self.around = parts
        if self.place.interpolates:
            self.share = nn.Parameter(torch.full((width,), 0.05))

    def forward(self, stream: Tensor) -> Tensor:
        """Return the stream behind the branch."""
        moved = self.behind(self.branch(self.before(stream)))
        return self.around(stream + (self.share * (moved - stream) if self.place.interpolates else moved))


class GPT(nn.Module):
    """Tokens (batch, positions) to logits (batch, positions, tokens); see `gpt`."""

    def __init__(self, norm: str, context: int, tokens: int, *, width: int, depth: int, **options: Any) -> None:
        super().__init__()
        heads, place, qk, bias = (options[name] for name in ("heads", "place", "qk", "bias"))
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(context, width)
        branches: list[nn.Module] = []
        for _ in range(depth):
            up, down = _linear(width, 4 * width, norm, bias), _linear(4 * width, width, norm, bias)
            for branch in (CausalAttention(width, heads, norm, qk, bias), nn.Sequential(up, nn.GELU(), down)):
                branches.append(Branch(branch, norm, width, place))
        self.branches = nn.Sequential(*branches)
        self.last_norm = nn.Identity() if registry.PLACEMENTS[place].around else TokenNorm(norm, width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        stream = self.tokens(inputs.long()) + self.positions(positions)
        return self.head(self.last_norm(self.branches(stream)))


def gpt(
    norm: str,
    shape: tuple[int, ...],
    classes: int,
    *,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    place: str = "pre",
    qk: str | None = None,
    bias: bool = True,
) -> nn.Module:
    """Build a GPT: learned positions, causal attention, GELU, branches 4 times as wide, a head of its own.

    Args:
        norm: a normalizer of the register; one of activations stands where `place` says and sees each token as a
            sample, one of weights is on every matrix of the branches.
        shape: of one input, (positions,).
        classes: how many tokens there are.
        width: of the stream.
        depth: pairs of an attention and a feed-forward branch.
        heads: of attention; they divide the width.
        place: of the normalizer around a branch f: pre, x + f(N(x)); post, N(x + f(x)); sandwich, x + N(f(N(x)));
            output, x + N(f(x)); sphere, N(x + a (N(f(x)) - x)); `registry.PLACEMENTS` declares them.
        qk: the normalizer of queries and keys, per head; None leaves them.
        bias: whether the matrices of the branches have biases.

    Raises:
        InputError: for inputs that are no rows of tokens, and heads that do not divide the width.
        UnknownNameError: for another place or normalizer.
    """
    if len(shape) != 1:
        raise InputError("model 'gpt'", "inputs are rows of tokens, (positions,)", str(shape), "Choose data 'text'")
    if place not in registry.PLACEMENTS:
        raise unknown_name("place", place, registry.PLACEMENTS)
    if width % heads:
        step = f"Use {math.gcd(heads, width)}"
        raise InputError("model 'gpt'", "heads divide the width", f"{heads} and {width}", step)
    return GPT(norm, shape[0], classes, width=width, depth=depth, heads=heads, place=place, qk=qk, bias=bias)


def _linear(fan_in: int, fan_out: int, norm: str, bias: bool) -> nn.Module:
    """Return a matrix that carries the normalizer if that acts on weights."""
    layer = nn.Linear(fan_in, fan_out, bias=bias)
    return Normalized(layer, norm, 0) if registry.get(norm).placement == "weights" else layer
