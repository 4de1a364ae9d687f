"""`GDNP`: gradient descent in normalized parametrization for the layers of a network, as a torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer

from normgauge.errors import InputError

_COLUMNS = 4096  # patches of a convolution that make a second moment, at most
_PROBE = 1e-2  # of the weights' size: the first step, which only measures the curvature


class _Layer:
    """Weight and bias of a linear map as rows, and the second moment of what they multiply."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.params: list[Tensor] = [p for p in (module.weight, module.bias) if p is not None]
        self.total: Tensor | None = None
        self.count = 0
        self.factors: tuple[Tensor, Tensor] | None = None

    def rows(self, *, gradient: bool = False) -> Tensor:
        """Return weights (or gradients) as `[rows, inputs]`, the bias as one more input."""
        parts = [
            p.grad if gradient and p.grad is not None else p if not gradient else torch.zeros_like(p)
            for p in self.params
        ]
        return torch.cat([part.detach().reshape(len(self.params[0]), -1) for part in parts], 1)

    def write(self, rows: Tensor) -> None:
        """Set the parameters to these rows."""
        self.params[0].copy_(rows[:, : self.params[0][0].numel()].reshape(self.params[0].shape))
        if len(self.params) > 1:
            self.params[1].copy_(rows[:, -1])

    def see(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        """Add a batch of inputs to the second moment."""
        x = given[0].detach()
        if isinstance(self.module, nn.Conv2d):
            c = self.module
            x = F.unfold(x, c.kernel_size, c.dilation, c.padding, c.stride).transpose(1, 2)  # type: ignore[arg-type]
        x = x.reshape(-1, x.shape[-1])
        x = x[:: max(1, math.ceil(len(x) / _COLUMNS))] if isinstance(self.module, nn.Conv2d) else x
        if len(self.params) > 1:
            x = F.pad(x, (0, 1), value=1.0)
        self.total = x.T @ x + (0 if self.total is None else self.total)
        self.count += len(x)


class GDNP(Optimizer):
    """Gradient descent in length and direction for Linear and Conv2d layers, in the metric of their inputs.

    BatchNorm writes a row of weights as `gamma w / |w|_S`, S the second moment of the layer's inputs. For each row,
    with its gradient g and `c` the curvature of the loss in the layer's outputs:

    * length: `w <- w (1 - <w, g> / (c |w|_S^2))`, the Newton step, exact where the loss is quadratic along w;
    * direction: `w <- w - M t / c` with the part `t = g - S w <w, g> / |w|_S^2` of g along the ellipsoid of constant
      `|w|_S`, then back to it; `M = ((1 - damping) S + damping L I)^-1`, L the largest eigenvalue of S.

    S is a running mean. c is the secant `<dw, dg> / |dw|_S^2` over the layer's last step; a step after which the loss
    of the same batch is not lower is taken back and tried with a larger c. On least squares with `damping=1` these are
    the steps of `gdnp`, whatever the number of outputs. Other parameters get gradient steps with secants of their own.

    Cost: two gradients per step (three at the first), one more for each step taken back; `evaluations` counts them. An
    eigendecomposition of every S each `refresh` steps.

    Args:
        model: whose Linear and Conv2d layers (zero padding, one group) are stepped so; hooks last for one forward.
        lr: factor of all steps; 1 is the step of the analysis.
        damping: 1 for the metric of S3's step, near 0 for that of S.
        decay: of the running second moments.
        refresh: steps between eigendecompositions.
        tries: of a step that does not lower the loss.

    Raises:
        InputError: for values out of range, or a step without closure.

    Deviations: S3 trains one layer, all else fixed; here all layers move together, and nothing is promised of it.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(50, 3, dtype=torch.float64)
        >>> y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
        >>> layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        >>> optimizer = GDNP(layer, damping=1.0)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = F.mse_loss(layer(x), y)
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(40):
        ...     _ = optimizer.step(closure)
        >>> [round(value, 4) for value in layer.weight[0].tolist()]
        [1.0, -2.0, 0.5]

    References: kohler2019, martens2020
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1.0,
        *,
        damping: float = 0.01,
        decay: float = 0.95,
        refresh: int = 10,
        tries: int = 4,
    ) -> None:
        if not (lr > 0 and 0 < damping <= 1 and 0 <= decay < 1 and refresh >= 1 and tries >= 1):
            given = f"lr={lr}, damping={damping}, decay={decay}, refresh={refresh}, tries={tries}"
            rule = "lr > 0, 0 < damping <= 1, 0 <= decay < 1, refresh and tries at least 1"
            raise InputError("GDNP", rule, given, "Leave them out for their defaults")
        self.evaluations = 0
        self._layers = [_Layer(m) for m in dict.fromkeys(model.modules()) if _is_layer(m)]
        defaults = {"lr": lr, "damping": damping, "decay": decay, "refresh": refresh, "tries": tries}
        super().__init__((p for p in model.parameters() if p.requires_grad), defaults)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        handles = [layer.module.register_forward_pre_hook(layer.see) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _evaluate(self, closure: Callable[[], Any]) -> float:
        self.evaluations += 1
        with torch.enable_grad():
            return float(torch.as_tensor(closure()).detach())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; `closure` clears the gradients, computes the loss of one batch and its gradients, returns it."""
        if closure is None:
            raise InputError("GDNP.step", "the step compares losses of one batch", "no closure", "Pass closure=")
        options = self.param_groups[0]
        with self._watching():
            loss = self._evaluate(closure)
        layers = [layer for layer in self._layers if layer.params[0].grad is not None and layer.total is not None]
        inside = {id(p) for layer in layers for p in layer.params}
        others = [p for p in options["params"] if p.grad is not None and id(p) not in inside]
        for layer in layers:
            self._renew(layer, options)
        starts = [layer.rows() for layer in layers]
        slopes = [layer.rows(gradient=True) for layer in layers]
        flat, pushes = [p.clone() for p in others], [p.grad.clone() for p in others]

        def move(factor: float) -> None:
            for layer, w, g in zip(layers, starts, slopes, strict=True):
                state = self.state[layer.params[0]]
                scale = factor * options["lr"] / state.get("curvature", 1.0)
                layer.write(_moved(w, g, state["second_moment"], layer.factors, scale, options["damping"]))
            for p, start, push in zip(others, flat, pushes, strict=True):
                p.copy_(start - factor * options["lr"] / self.state[p].get("curvature", 1.0) * push)

        def measure(most: float) -> None:
            for layer, w, g in zip(layers, starts, slopes, strict=True):
                state, step = self.state[layer.params[0]], layer.rows() - w
                size = float(((step @ state["second_moment"]) * step).sum())
                _set_curvature(state, float((step * (layer.rows(gradient=True) - g)).sum()), size, most)
            for p, start, push in zip(others, flat, pushes, strict=True):
                step, slope = p - start, torch.zeros_like(p) if p.grad is None else p.grad
                _set_curvature(self.state[p], float((step * (slope - push)).sum()), float(step.square().sum()), most)

        def restore() -> None:
            for layer, w in zip(layers, starts, strict=True):
                layer.write(w)
            for p, start in zip(others, flat, strict=True):
                p.copy_(start)

        known = [*(self.state[layer.params[0]] for layer in layers), *(self.state[p] for p in others)]
        if any("curvature" not in state for state in known):
            size = math.sqrt(sum(float(w.square().sum()) for w in (*starts, *flat)))
            push = math.sqrt(sum(float(g.square().sum()) for g in (*slopes, *pushes)))
            move(_PROBE * size / max(push, 1e-300) / options["lr"])
            self._evaluate(closure)
            measure(math.inf)
        for _ in range(options["tries"]):
            move(1.0)
            after = self._evaluate(closure)
            if after <= loss:
                measure(2.0)
                return loss
            for state in known:
                state["curvature"] *= 4.0
        restore()
        return loss

    def _renew(self, layer: _Layer, options: dict[str, Any]) -> None:
        """Bring a layer's running second moment and its eigendecomposition up to date."""
        assert layer.total is not None
        state = self.state[layer.params[0]]
        new, layer.total, layer.count = layer.total / layer.count, None, 0
        old = state.get("second_moment")
        state["second_moment"] = new if old is None else torch.lerp(new, old, options["decay"])
        state["step"] = state.get("step", -1) + 1
        if layer.factors is None or state["step"] % options["refresh"] == 0:
            values, vectors = torch.linalg.eigh(state["second_moment"].double())
            layer.factors = values.clamp_min(0).to(new), vectors.to(new)


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return isinstance(module, nn.Linear) and isinstance(module._parameters.get("weight"), nn.Parameter)


def _moved(w: Tensor, g: Tensor, S: Tensor, factors: Any, scale: float, damping: float) -> Tensor:
    """Return rows after the step in length, then in direction."""
    values, vectors = factors
    image = w @ S
    size = (image * w).sum(1, keepdim=True)
    alive = size > 1e-12 * (w.square().sum(1, keepdim=True) * values[-1]).clamp_min(1e-300)
    share = torch.where(alive, (w * g).sum(1, keepdim=True) / torch.where(alive, size, 1.0), 0.0)
    longer = w * (1 - scale * share)
    across = g - image * share
    metric = (1 - damping) * values + damping * values[-1]
    turned = longer - scale * ((across @ vectors) / metric.clamp_min(1e-30)) @ vectors.T
    before, after = (((rows @ S) * rows).sum(1, keepdim=True).clamp_min(0).sqrt() for rows in (longer, turned))
    return turned * torch.where(alive & (after > 0), before / after.clamp_min(1e-30), 1.0)


def _set_curvature(state: dict[str, Any], bend: float, size: float, most: float) -> None:
    """Set the curvature to a secant's, at most a factor `most` from what it was; a step of no size says nothing."""
    old = state.get("curvature", 1.0)
    found = abs(bend) / size if size > 0 else math.nan
    if math.isfinite(found):
        state["curvature"] = min(max(found, old / most, 1e-12), old * most)
    else:
        state.setdefault("curvature", old)
