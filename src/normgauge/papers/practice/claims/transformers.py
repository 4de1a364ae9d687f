"""P, today's practice: norms in transformers, and what optimizers make of weights under them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import gradient, normal, uniform

STEPS = 250  # enough for every norm to settle


@theorem("P-1")
def _latent_attention(generator: torch.Generator) -> Iterator[Check]:
    for tokens, width in ((5, 6), (9, 12)):
        model = _LatentAttention.draw(generator, width)
        x = torch.logspace(-1, 1, tokens)[:, None] * normal(generator, tokens, width)
        rms = x.square().mean(1, keepdim=True).sqrt()
        truth = model(x / rms, torch.ones(tokens, 1))
        yield printed("without the norm", gap(model(x, torch.ones(tokens, 1)), truth))
        yield corrected("the rotary key divided by rms(x)", gap(model(x, rms), truth))
        for W in (model.query_down, model.latent_down):
            yield corrected("a branch that is normalized again", gap(_rms_norm(x @ W.T), _rms_norm((x / rms) @ W.T)))


@dataclass(frozen=True)
class _LatentAttention:
    """Multi-head latent attention: queries and keys from normalized latents, one rotary key from the stream itself."""

    query_down: Tensor
    query_up: Tensor
    latent_down: Tensor
    rotary_key: Tensor
    key_up: Tensor
    value_up: Tensor

    @classmethod
    def draw(
        cls, generator: torch.Generator, width: int, rank: int = 4, head: int = 4, heads: int = 2
    ) -> _LatentAttention:
        """Draw weights; each head has `head` plain and `head` rotary dimensions."""
        down, up = (rank, width), (heads * head, rank)
        shapes = (down, (heads * 2 * head, rank), down, (head, width), up, up)
        return cls(*(normal(generator, *shape) / shape[1] ** 0.5 for shape in shapes))

    def __call__(self, stream: Tensor, divisor: Tensor) -> Tensor:
        """Return the heads' outputs for what reaches the projections; `divisor` still divides the rotary key."""
        tokens, head = len(stream), len(self.rotary_key)
        query = (_rms_norm(stream @ self.query_down.T) @ self.query_up.T).reshape(tokens, -1, 2 * head)
        latent = _rms_norm(stream @ self.latent_down.T)
        plain, value = ((latent @ W.T).reshape(tokens, -1, head) for W in (self.key_up, self.value_up))
        turned = _rotate(stream @ self.rotary_key.T / divisor)[:, None].expand(-1, plain.shape[1], -1)
        key = torch.cat([plain, turned], -1)
        query = torch.cat([query[..., :head], torch.stack([_rotate(q) for q in query[..., head:].unbind(1)], 1)], -1)
        logits = torch.einsum("thd,shd->hts", query, key) / (2 * head) ** 0.5
        return torch.einsum("hts,shd->thd", torch.softmax(logits, -1), value)


@theorem("P-2")
def _rotary_order(generator: torch.Generator) -> Iterator[Check]:
    for tokens, width in ((4, 4), (7, 8)):
        x, gain = normal(generator, tokens, width), 1 + 0.5 * normal(generator, width)
        paired = gain[: width // 2].repeat(2)
        for eps in (0.0, 0.1):
            yield printed("any gains", gap(_rotate(gain * _rms_norm(x, eps)), gain * _rms_norm(_rotate(x), eps)))
            turned = _rotate(paired * _rms_norm(x, eps))
            yield corrected("equal in pairs", gap(turned, paired * _rms_norm(_rotate(x), eps)))
            yield conclusion("no gains", gap(_rotate(_rms_norm(x, eps)), _rms_norm(_rotate(x), eps)))


@theorem("P-3")
def _equilibrium(generator: torch.Generator) -> Iterator[Check]:
    rate, decay = 0.2, uniform(generator, 0.3, 0.6)
    fixed = [_norms(generator, rate, decay, start)[-1] for start in (0.1, 10.0)]
    law = (rate / (2 * decay - rate * decay**2)) ** 0.5
    for norm in fixed:
        yield corrected("updates of a fixed size: the law", gap(norm, law), 1e-6)
    yield conclusion("updates of a fixed size: the start does not matter", gap(fixed[0], fixed[1]), 1e-6)
    soft, steep = (_norms(generator, rate, decay, size=size, power=1.0)[-1] for size in (1.0, 10.0))
    yield printed("SGD: ten times the gradient, the same norm", gap(steep, soft))
    yield corrected("SGD: sqrt(10) times the norm", gap(steep / soft, 10**0.5), 1e-6)


@theorem("P-4")
def _implicit_warmup(generator: torch.Generator) -> Iterator[Check]:
    rate, decay = 0.2, uniform(generator, 0.3, 0.6)
    base = rate / _norms(generator, rate, decay)
    for m in (2.0, 4.0):
        ratio = rate / m / _norms(generator, rate / m, m * decay) / base
        yield printed("relative updates start m times smaller", gap(ratio[0], 1 / m))
        yield printed("and end equal", gap(ratio[-1], 1.0), 1e-6)
        yield printed("and rise in between", excess(ratio[:-1], ratio[1:]), 1e-6)
        kept, a = rate / m / _norms(generator, rate / m, decay)[-1] / base[-1], rate * decay
        told = ((2 - a / m) / (2 - a)) ** 0.5 * m**-0.5
        yield corrected("decay left as it was: about sqrt(m) times smaller for good", gap(kept, told), 1e-2)
        yield fact("steps until half the base", float((ratio < 0.5).sum()))


@theorem("P-5")
def _dynamic_tanh(generator: torch.Generator) -> Iterator[Check]:
    for n, d in ((3, 4), (6, 8)):
        W, x, goal = normal(generator, d, n), normal(generator, 9, n), normal(generator, 9, d)
        alpha = uniform(generator, 0.5, 1.5)
        for c in (0.01, 100.0):
            y, scaled = torch.tanh(alpha * x @ W.T), torch.tanh(alpha * c * x @ W.T)
            yield printed("the scale of the weights does not matter", gap(scaled, y))
            ln, same = (functional.layer_norm(s * x @ W.T, (d,), eps=0.0) for s in (1.0, c))
            yield corrected("to layer normalization it does not", gap(same, ln))
        yield corrected("large inputs: the sign", broken(float((scaled - (x @ W.T).sign()).abs().mean()) < 0.1))
        small = torch.tanh(1e-6 * alpha * x @ W.T) / 1e-6
        yield corrected("small inputs: alpha x", gap(small, alpha * x @ W.T))
        slope = gradient(lambda V, x=x, goal=goal, a=alpha: (torch.tanh(a * x @ V.T) - goal).square().sum(), W)
        yield printed("the gradient is orthogonal to the weights", gap((slope * W).sum(), 0.0, slope.norm() * W.norm()))


def _rms_norm(x: Tensor, eps: float = 0.0) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _rotate(x: Tensor) -> Tensor:
    """Return RoPE of rows at positions 1, 2, ...: dimension k turns with dimension k + half."""
    half = x.shape[-1] // 2
    angles = torch.arange(1, len(x) + 1)[:, None] * 0.7 ** torch.arange(half)
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1)


def _norms(
    generator: torch.Generator, rate: float, decay: float, start: float = 1.0, *, size: float = 1.0, power: float = 0.0
) -> Tensor:
    """Return |w| over the steps w -> (1 - eta lambda) w - eta u, u of length `size / |w|^power` and orthogonal to w."""
    w = normal(generator, 8)
    w, norms = start * w / w.norm(), []
    for step in normal(generator, STEPS, 8):
        norms.append(w.norm())
        step = step - (step @ w) / (w @ w) * w
        w = (1 - rate * decay) * w - rate * size / w.norm() ** power * step / step.norm()
    return torch.stack(norms)
