"""Rules of dot-product attention: bounded near the data and on a ball, and globally only after a normalizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
    if call.argument(4, "dropout_p", 0.0):
        raise call.refuse("attention must be in evaluation mode", "dropout", "Call model.eval()")
    if isinstance(call.argument(3, "attn_mask"), Reach):
        raise call.refuse("the mask must not depend on the input", "one that does")
    query, key, value = (part if isinstance(part, Reach) else Reach.of_constant(part) for part in (query, key, value))
    key, value = (_for_each_head(call, part, query.value.shape[:-2]) for part in (key, value))
    scale = call.kwargs.get("scale")
    scale = 1 / math.sqrt(query.value.shape[-1]) if scale is None else scale
    mask = _logit_mask(call.argument(3, "attn_mask"), bool(call.argument(5, "is_causal", False)), query, key)
    return _bound_attention(query, key, value, float(scale), mask, call.value)


def _for_each_head(call: Call, part: Reach, heads: torch.Size) -> Reach:
    """Return keys or values that groups of heads share, repeated for each of them."""
    own = part.value.shape[:-2]
    if own == heads:
        return part
    wide = part.value
    if call.kwargs.get("enable_gqa"):
        wide = wide.repeat_interleave(heads[-1] // own[-1], dim=-3)
    wide = wide.expand(*heads, *wide.shape[-2:])
    return part.pass_through(constant_gain(math.sqrt(wide.numel() / part.value.numel()), part.peak, part.rows), wide)


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
    keys, values = _deviation(weights, key.value), _deviation(weights, value.value)
    share = weights.sum(-2)
    return _Sizes(*(torch.nan_to_num(part).amax() for part in (queries, keys, values, share)))


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
    longest = [x.value.norm(dim=-1).amax() + x.spread for x in (query, key, value)]
    delta = scale * (longest[0] * key.spread + longest[1] * query.spread)
    growth = delta.exp()
    keys = torch.minimum(growth * (at.keys + key.spread), longest[1])
    values = torch.minimum(growth * (at.values + value.spread), longest[2])
    limit = float(query.value.shape[-2])
    share = (growth.square() * at.share).clamp_max(limit)
    return _Sizes(longest[0], keys, values, share)
