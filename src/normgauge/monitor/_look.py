"""One forward pass of training seen from inside: variances, dead units, gradients, stored statistics, logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normgauge.measure.signal.layer_statistics import Recorder, divided_variance
from normgauge.network import ModuleCall, role_of, watched


class Look(Recorder):
    """A `Recorder` that also sees stored statistics, what eps adds, and the logits of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.distances: dict[str, float] = {}
        self.eps_shares: dict[str, float] = {}
        self.inputs: dict[str, tuple[int, float]] = {}
        self.logits: dict[str, float] = {}

    def leave(self, called: ModuleCall) -> None:
        """Note a normalizer's input beside what it has stored."""
        inside = called.name
        super().leave(called)
        inputs, module = called.given, called.module
        if inputs is None or role_of(module) != "normalizer" or not inputs.is_floating_point():
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            variance = divided_variance(module, inputs)
            self.inputs[inside] = (
                inputs.shape[1 if isinstance(module, nn.modules.batchnorm._NormBase) else -1],
                variance,
            )
            eps = next((getattr(module, name) for name in ("eps", "variance_epsilon") if hasattr(module, name)), None)
            if isinstance(eps, float) and math.isfinite(variance):
                self.eps_shares[inside] = eps / (variance + eps) if variance + eps else 1.0
            mean, spread = getattr(module, "running_mean", None), getattr(module, "running_var", None)
            if isinstance(mean, Tensor) and isinstance(spread, Tensor) and inputs.ndim > 1:
                axes = [axis for axis in range(inputs.ndim) if axis != 1]
                gap = (inputs.float().mean(axes) - mean.float()) / (spread.float() + (eps or 0.0)).sqrt()
                self.distances[inside] = float(gap.square().mean().sqrt())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and self._open:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                queries, keys = (
                    args[i] if len(args) > i else (kwargs or {})[key] for i, key in ((0, "query"), (1, "key"))
                )
                scale = (kwargs or {}).get("scale") or queries.shape[-1] ** -0.5
                bound = float(queries.float().norm(dim=-1).amax() * keys.float().norm(dim=-1).amax() * scale)
                self.logits[self._open[-1][0]] = bound
        elif func in (F.softmax, torch.softmax, Tensor.softmax) and self._open and args[0].is_floating_point():
            with torch._C.DisableTorchFunction(), torch.no_grad():
                scores = args[0].detach()
                seen = scores[scores > torch.finfo(scores.dtype).min / 4].abs()  # masked ones are no logits
                if args[0].ndim > 2 and seen.numel():
                    self.logits[self._open[-1][0]] = float(seen.amax())
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def stream_growth(self) -> float:
        """The largest over the smallest root variance that normalizers as wide as the last one read."""
        widths = list(self.inputs.values())
        sizes = [math.sqrt(v) for width, v in widths if width == widths[-1][0] and v > 0 and math.isfinite(v)]
        return max(sizes) / min(sizes) if len(sizes) > 1 else math.nan

    @property
    def gradient_growth(self) -> float:
        """Fitted factor per layer by which the squared gradient grows from output to input."""
        squares = [c.gradient for c in self.calls.values() if c.role == "affine" and c.reached and c.gradient > 0]
        if len(squares) < 4:
            return math.nan
        logs, middle = [math.log(s) for s in squares], (len(squares) - 1) / 2
        slope = sum((i - middle) * value for i, value in enumerate(logs)) / sum(
            (i - middle) ** 2 for i in range(len(logs))
        )
        return math.exp(-slope)

    @contextmanager
    def looking(self, model: nn.Module) -> Iterator[None]:
        """Watch one forward pass; gradients arrive in the backward pass that follows."""
        self.start_batch(1.0)
        self._open.append(("(model)", model))
        with watched(model, self.leave, self.enter, inside=True), self:
            yield


@contextmanager
def unchanged(model: nn.Module, training: bool) -> Iterator[None]:
    """Run the model outside of training: eager, in one mode without dropout; buffers, modes, random streams return."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    eager = getattr(torch.compiler, "set_stance", None)
    try:
        for module, _ in modes:
            module.training = training and hasattr(module, "running_mean")
        with torch.random.fork_rng(), torch.no_grad():
            if eager is None:
                yield
            else:
                with eager("force_eager"):
                    yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
