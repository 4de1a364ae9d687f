"""A small GPT under any normalizer: pre, post or sandwich placement, queries and keys normalized or not."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, unknown_name
from normgauge.lab.models.normalized import Normalized
from normgauge.nn import registry

Place = Literal["pre", "post", "sandwich"]


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

    def __init__(self, width: int, heads: int, norm: str, qk: str | None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = _linear(width, 3 * width, norm), _linear(width, width, norm)
        self.query_norm, self.key_norm = (TokenNorm(qk or "none", width // heads) for _ in range(2))

    def forward(self, stream: Tensor) -> Tensor:
        """Return what the heads read, mixed."""
        query, key, value = self.qkv(stream).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        query, key = self.query_norm(query), self.key_norm(key)
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Branch(nn.Module):
    """One residual branch f and its normalizers N.

    pre: x + f(N(x)); post: N(x + f(x)); sandwich: x + N(f(N(x))).
    """

    def __init__(self, branch: nn.Module, norm: str, width: int, place: Place) -> None:
        super().__init__()
        self.branch, self.place = branch, place
        self.before = nn.Identity() if place == "post" else TokenNorm(norm, width)
        self.behind = nn.Identity() if place == "pre" else TokenNorm(norm, width)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the stream behind the branch."""
        if self.place == "post":
            return self.behind(stream + self.branch(stream))
        return stream + self.behind(self.branch(self.before(stream)))


class GPT(nn.Module):
    """Tokens (batch, positions) to logits (batch, positions, tokens); see `gpt`."""

    def __init__(
        self, norm: str, context: int, tokens: int, *, width: int, depth: int, heads: int, place: Place, qk: str | None
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(context, width)
        branches: list[nn.Module] = []
        for _ in range(depth):
            mixer = nn.Sequential(_linear(width, 4 * width, norm), nn.GELU(), _linear(4 * width, width, norm))
            for branch in (CausalAttention(width, heads, norm, qk), mixer):
                branches.append(Branch(branch, norm, width, place))
        self.branches = nn.Sequential(*branches)
        self.last_norm = nn.Identity() if place == "post" else TokenNorm(norm, width)
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
    place: Place = "pre",
    qk: str | None = None,
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
        place: of the normalizer around a branch f: pre, x + f(N(x)); post, N(x + f(x)); sandwich, x + N(f(N(x))).
        qk: the normalizer of queries and keys, per head; None leaves them.

    Raises:
        InputError: for inputs that are no rows of tokens, and heads that do not divide the width.
        UnknownNameError: for another place or normalizer.
    """
    if len(shape) != 1:
        raise InputError("model 'gpt'", "inputs are rows of tokens, (positions,)", str(shape), "Choose data 'text'")
    if place not in get_args(Place):
        raise unknown_name("place", place, get_args(Place))
    if width % heads:
        raise InputError(
            "model 'gpt'", "heads divide the width", f"{heads} and {width}", f"Use {math.gcd(heads, width)}"
        )
    return GPT(norm, shape[0], classes, width=width, depth=depth, heads=heads, place=place, qk=qk)


def _linear(fan_in: int, fan_out: int, norm: str) -> nn.Module:
    """Return a matrix that carries the normalizer if that acts on weights."""
    layer = nn.Linear(fan_in, fan_out)
    return Normalized(layer, norm, 0) if registry.get(norm).placement == "weights" else layer
