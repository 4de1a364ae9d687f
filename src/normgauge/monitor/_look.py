"""One forward pass of training seen from inside: variances, dead units, gradients, stored statistics, logits."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normgauge.measure.signal.layer_statistics import Recorder, divided_variance, fit_growth
from normgauge.network import ModuleCall, role_of, watched


def _largest_product(query: Tensor, key: Tensor, *_: Any, scale: float | None = None, **__: Any) -> float:
    """Bound the logits of fused attention by the longest query times the longest key."""
    longest = query.float().norm(dim=-1).amax() * key.float().norm(dim=-1).amax()
    return float(longest) * (scale or query.shape[-1] ** -0.5)


def _largest_projected(query: Tensor, key: Tensor, *rest: Any, **_: Any) -> float:
    """The same for torch's multi-head attention, which projects queries and keys itself."""
    _, width, heads, weight, bias = rest[:5]
    if weight is None:
        return math.nan
    pair = [
        F.linear(value, weight[part], None if bias is None else bias[part]).unflatten(-1, (heads, -1))
        for value, part in ((query, slice(0, width)), (key, slice(width, 2 * width)))
    ]
    return _largest_product(*pair)


def _largest_score(scores: Tensor, *_: Any, **__: Any) -> float:
    """Return the largest input of a softmax that is not masked; nan for one that is not over a matrix of scores."""
    seen = scores[scores > torch.finfo(scores.dtype).min / 4].abs() if scores.ndim > 2 else scores[:0]
    return float(seen.amax()) if seen.numel() else math.nan


_ATTENTION: dict[Any, Callable[..., float]] = {
    F.scaled_dot_product_attention: _largest_product,
    F.multi_head_attention_forward: _largest_projected,
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _largest_score),
}


class Look(Recorder):
    """A `Recorder` that also sees stored statistics, what gains and eps do, and the logits of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.distances: dict[str, float] = {}
        self.eps_shares: dict[str, float] = {}
        self.gains: dict[str, float] = {}
        self.inputs: dict[str, tuple[int, float]] = {}
        self.logits: dict[str, float] = {}
        self.fault: Exception | None = None

    def leave(self, called: ModuleCall) -> None:
        """Note what a module was given and made; a fault of ours must not end the forward it looks at."""
        try:
            super().leave(called)
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._note_normalizer(called)
        except Exception as error:  # noqa: BLE001 - raised again where it can be said
            self.fault = error

    def _note_normalizer(self, called: ModuleCall) -> None:
        inputs, module, name = called.given, called.module, called.name
        if inputs is None or role_of(module) != "normalizer" or not inputs.is_floating_point():
            return
        variance = divided_variance(module, inputs)
        axis = 1 if isinstance(module, nn.modules.batchnorm._NormBase) else -1
        self.inputs[name] = (inputs.shape[axis], variance)
        eps = next((getattr(module, key) for key in ("eps", "variance_epsilon") if hasattr(module, key)), None)
        if isinstance(eps, float) and math.isfinite(variance):
            self.eps_shares[name] = eps / (variance + eps) if variance + eps else 1.0
        if isinstance(gain := getattr(module, "weight", None), Tensor):
            self.gains[name] = float(gain.float().square().mean().sqrt())
        mean, spread = getattr(module, "running_mean", None), getattr(module, "running_var", None)
        if isinstance(mean, Tensor) and isinstance(spread, Tensor) and inputs.ndim > 1:
            axes = [axis for axis in range(inputs.ndim) if axis != 1]
            gap = (inputs.float().mean(axes) - mean.float()) / (spread.float() + (eps or 0.0)).sqrt()
            self.distances[name] = float(gap.square().mean().sqrt())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._open and func in _ATTENTION:
            try:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    size = _ATTENTION[func](*args, **(kwargs or {}))
            except Exception as error:  # noqa: BLE001 - raised again where it can be said
                self.fault, size = error, math.nan
            if math.isfinite(size):
                name = self._open[-1][0]
                self.logits[name] = max(size, self.logits.get(name, 0.0))
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def stream_growth(self) -> float:
        """The largest over the smallest root variance that normalizers as wide as the last one read."""
        widths = list(self.inputs.values())
        sizes = [math.sqrt(v) for width, v in widths if width == widths[-1][0] and v > 0 and math.isfinite(v)]
        return max(sizes) / min(sizes) if len(sizes) > 1 else math.nan

    @property
    def dead_shares(self) -> dict[str, float]:
        """Of every layer with an activation, the share of units that are zero on the whole batch."""
        return {n: float(c.zero_units.float().mean()) for n, c in self.calls.items() if c.zero_units is not None}

    @property
    def gradient_growth(self) -> float:
        """Fitted factor per layer by which the squared gradient grows from output to input."""
        squares = [c.gradient for c in self.calls.values() if c.role == "affine" and c.reached and c.gradient > 0]
        return fit_growth(squares)[0] if len(squares) >= 4 else math.nan

    @contextmanager
    def looking(self, model: nn.Module, *, inside: bool = False) -> Iterator[None]:
        """Watch a forward pass, also from inside of it; gradients arrive in the backward pass that follows."""
        self.start_batch(1.0, None)
        self._open.append(("(model)", model))
        with watched(model, self.leave, self.enter, inside=inside), self:
            yield


@contextmanager
def unchanged(model: nn.Module, training: bool) -> Iterator[None]:
    """Run the model outside of training: eager, in one mode without dropout; buffers, modes, random streams return."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    stance = getattr(torch.compiler, "set_stance", None)
    try:
        for module, _ in modes:
            module.training = training and hasattr(module, "running_mean")
        with torch.random.fork_rng(), torch.no_grad(), stance("force_eager") if stance else nullcontext():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
