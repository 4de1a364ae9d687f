"""Rules of dot-product attention: bounded near the data and on a ball, and globally only after a normalizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.measure.lipschitz.reach import Reach, add_reaches, constant_gain, three_gains
from normgauge.measure.lipschitz.rules import Call, rule_for
from normgauge.theory.lipschitz_constants import attention_slopes


@dataclass(frozen=True)
class _Sizes:
    """Largest query, keys and values as they spread around each row's mean, and the largest column sum of P."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    share: Tensor

    def slopes(self, scale: float) -> tuple[Tensor, ...]:
        return attention_slopes(scale, self.keys, self.values, self.queries, self.share)


@rule_for("scaled_dot_product_attention", several=True)
def _attention(call: Call) -> Reach:
    query, key, value = call.argument(0, "query"), call.argument(1, "key"), call.argument(2, "value")
    if call.argument(4, "dropout_p", 0.0) or call.kwargs.get("enable_gqa"):
        raise call.refuse("attention has a rule without dropout and grouped queries", "one of them")
    if not all(isinstance(x, Reach) for x in (query, key, value)) or isinstance(call.argument(3, "attn_mask"), Reach):
        raise call.refuse("queries, keys and values must depend on the input, the mask must not", "another case")
    if not query.value.shape[:-2] == key.value.shape[:-2] == value.value.shape[:-2]:
        raise call.refuse("every head needs its own queries, keys and values", "heads that share them")
    if query.value.ndim < 3:
        raise call.refuse("samples must not see each other", f"queries of shape {tuple(query.value.shape)}")
    scale = call.kwargs.get("scale")
    scale = 1 / math.sqrt(query.value.shape[-1]) if scale is None else scale
    mask = _logit_mask(call.argument(3, "attn_mask"), bool(call.argument(5, "is_causal", False)), query, key)
    return _bound_attention(query, key, value, float(scale), mask, call.value)


def _logit_mask(mask: Tensor | None, causal: bool, query: Reach, key: Reach) -> Tensor:
    """Return what is added to the logits: 0 where a key is seen, minus infinity where it is hidden."""
    shape = (query.value.shape[-2], key.value.shape[-2])
    if causal:
        return torch.full(shape, -math.inf, dtype=torch.float64).triu(1)
    if mask is None:
        return torch.zeros(shape, dtype=torch.float64)
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    return mask.double()


def _bound_attention(query: Reach, key: Reach, value: Reach, scale: float, mask: Tensor, output: Tensor) -> Reach:
    at, scale = _sizes_at_data(query, key, value, scale, mask), abs(scale)
    ball = _sizes_on_ball(at, query, key, value, scale)
    count = torch.tensor(float(query.value.shape[-2]), dtype=torch.float64)
    rows = [torch.tensor(x.rows, dtype=torch.float64) for x in (query, key, value)]
    everywhere = _Sizes(rows[0], rows[1], rows[2], count)
    gains = [
        three_gains(a, b, c)
        for a, b, c in zip(at.slopes(scale), ball.slopes(scale), everywhere.slopes(scale), strict=True)
    ]
    parts = [(query, gains[0]), (key, gains[1]), (value, gains[2])]
    return add_reaches(parts, output, value.peak, value.rows)  # an output is a mean of values


def _sizes_at_data(query: Reach, key: Reach, value: Reach, scale: float, mask: Tensor) -> _Sizes:
    """Return the sizes at each datum; the largest over heads, since each head has its own block of the Jacobian."""
    logits = scale * query.value @ key.value.transpose(-1, -2) + mask
    weights = logits.softmax(-1)
    queries = query.value.norm(dim=-1)
    samples = len(logits)
    keys, values = _deviation(weights, key.value), _deviation(weights, value.value)
    share = weights.sum(-2)
    return _Sizes(*(part.reshape(samples, -1).amax(1) for part in (queries, keys, values, share)))


def _deviation(weights: Tensor, points: Tensor) -> Tensor:
    """Return the root of the top eigenvalue of the covariance of `points` under each row of weights."""
    norms = []
    for row in range(weights.shape[-2]):  # one row at a time: all at once would be queries x keys x features
        w = weights[..., row, :, None]
        centred = w.sqrt() * (points - (w * points).sum(-2, keepdim=True))
        norms.append(torch.linalg.matrix_norm(centred, 2))
    return torch.stack(norms, -1) * (1 + 1e-11)


def _sizes_on_ball(at: _Sizes, query: Reach, key: Reach, value: Reach, scale: float) -> _Sizes:
    """Move the sizes by what the ball allows.

    Logits move by at most `delta`, so weights change by a factor of at most exp(2 delta). A covariance is at most the
    second moment around any centre: around the mean at the datum it is exp(2 delta) (deviation + spread)^2 at most,
    and around zero the squared length of the longest point.
    """
    samples = len(at.queries)
    longest = [x.value.norm(dim=-1).reshape(samples, -1).amax(1) + x.spread for x in (query, key, value)]
    delta = scale * (longest[0] * key.spread + longest[1] * query.spread)
    growth = delta.exp()
    keys = torch.minimum(growth * (at.keys + key.spread), longest[1])
    values = torch.minimum(growth * (at.values + value.spread), longest[2])
    limit = float(query.value.shape[-2])
    share = (growth.square() * at.share).clamp_max(limit)
    return _Sizes(longest[0], keys, values, share)


@rule_for(nn.MultiheadAttention, several=True)
def _multihead(call: Call) -> Any:
    layer: nn.MultiheadAttention = call.module
    inputs = [call.argument(i, name) for i, name in enumerate(("query", "key", "value"))]
    extra = layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn
    if not layer.batch_first or extra or (layer.training and layer.dropout) or call.kwargs.get("is_causal"):
        raise call.refuse(
            "attention has a rule for batch_first=True, evaluation mode, no added keys and an explicit mask",
            "another setting",
            "Build it with batch_first=True and call model.eval()",
        )
    if not all(isinstance(x, Reach) for x in inputs) or call.argument(3, "key_padding_mask") is not None:
        raise call.refuse("queries, keys and values must depend on the input, without padding mask", "another case")
    if any(x.value.ndim != 3 for x in inputs):
        raise call.refuse(
            "queries are [samples, tokens, features]", f"{inputs[0].value.ndim} axes", "Add the batch axis"
        )
    mask = call.argument(5, "attn_mask")
    if mask is not None and mask.ndim != 2:
        raise call.refuse("a mask must be [queries, keys]", f"{mask.ndim} axes")
    heads = [_project(layer, place, x) for place, x in enumerate(inputs)]
    if mask is not None and mask.dtype == torch.bool:
        mask = ~mask  # torch's layer hides where its mask is True, its function where it is False
    scale = 1 / math.sqrt(layer.head_dim)
    q, k, v = heads
    middle = _bound_attention(q, k, v, scale, _logit_mask(mask, False, q, k), q.value)
    weight, bias = layer.out_proj.weight.double(), layer.out_proj.bias
    norm = _norm(weight)
    rows = norm * middle.rows * math.sqrt(layer.num_heads)  # a row of all heads side by side
    rows += 0.0 if bias is None else float(bias.double().norm())
    return middle.pass_through(constant_gain(norm, rows, rows), call.value[0]), None


def _project(layer: nn.MultiheadAttention, place: int, x: Reach) -> Reach:
    """Return queries, keys or values of all heads, `[N, heads, tokens, size]`."""
    width = layer.embed_dim
    if layer.in_proj_weight is not None:
        weight = layer.in_proj_weight[place * width : (place + 1) * width].double()
    else:
        weight = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)[place].double()
    bias = None if layer.in_proj_bias is None else layer.in_proj_bias[place * width : (place + 1) * width].double()
    flat = nn.functional.linear(x.value, weight, bias)
    value = flat.unflatten(-1, (layer.num_heads, layer.head_dim)).transpose(1, 2)
    norm = _norm(weight)
    rows = norm * x.rows + (0.0 if bias is None else float(bias.norm()))
    return x.pass_through(constant_gain(norm, rows, rows), value)


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2)) * (1 + 1e-11)
