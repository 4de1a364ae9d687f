"""`GDNP`: gradient descent in normalized parametrization for the layers of a network, as a torch optimizer."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer

from normgauge.errors import InputError

_COLUMNS = 4096  # patches of a convolution that make a second moment, at most
_PROBE = 1e-2  # of the weights' size: the first step, which only measures the curvature
_FLAT = 0.1  # of the slope by the gains: what is left of it where their search ends


class _Plain:
    """A parameter of no layer, as one row: gradient steps, no gain."""

    def __init__(self, *params: Tensor) -> None:
        self.params = params

    def rows(self, *, gradient: bool = False) -> Tensor:
        """Return weights (or gradients) as `[rows, inputs]`, the bias as one more input."""
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad) if gradient else p for p in self.params]
        return torch.cat([part.detach().reshape(self.count(), -1) for part in parts], 1)

    def count(self) -> int:
        return 1

    def write(self, rows: Tensor) -> None:
        self.params[0].copy_(rows.reshape(self.params[0].shape))

    def image(self, rows: Tensor) -> Tensor:
        """Return `S rows`."""
        return rows

    def share(self, w: Tensor, g: Tensor) -> Tensor | float:
        """Return `<w, g> / |w|_S^2` per row: with the curvature's inverse, Newton's relative change of the length."""
        return 0.0

    def moved(self, w: Tensor, g: Tensor, scale: float, damping: float, *, lengths: bool) -> Tensor:
        """Return rows after the step in length (where asked for), then in direction."""
        return w - scale * g


class _Layer(_Plain):
    """Weight and bias of a linear map as rows, and the second moment of what they multiply."""

    def __init__(self, module: Any) -> None:
        super().__init__(*(p for p in (module.weight, module.bias) if p is not None))
        self.module = module
        self.seen: list[Tensor] = []
        self.second_moment, self.factors = torch.empty(0), (torch.empty(0), torch.empty(0))

    def count(self) -> int:
        return len(self.params[0])

    def write(self, rows: Tensor) -> None:
        self.params[0].copy_(rows[:, : self.params[0][0].numel()].reshape(self.params[0].shape))
        if len(self.params) > 1:
            self.params[1].copy_(rows[:, -1])

    def see(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        """Keep a batch of inputs for the second moment."""
        x = given[0].detach()
        if isinstance(self.module, nn.Conv2d):
            c = self.module
            x = F.unfold(x, c.kernel_size, c.dilation, c.padding, c.stride).transpose(1, 2)  # type: ignore[arg-type]
        x = x.reshape(-1, x.shape[-1])
        x = x[:: max(1, math.ceil(len(x) / _COLUMNS))] if isinstance(self.module, nn.Conv2d) else x
        self.seen.append(F.pad(x, (0, 1), value=1.0) if len(self.params) > 1 else x)

    def renew(self, state: dict[str, Any], options: dict[str, Any]) -> None:
        """Bring the running second moment and its eigendecomposition up to date."""
        x, self.seen = torch.cat(self.seen), []
        new, old = x.T @ x / len(x), state.get("second_moment")
        self.second_moment = state["second_moment"] = new if old is None else torch.lerp(new, old, options["decay"])
        state["step"] = state.get("step", -1) + 1
        if not len(self.factors[0]) or state["step"] % options["refresh"] == 0:
            values, vectors = torch.linalg.eigh(self.second_moment.double())
            self.factors = values.clamp_min(0).to(new), vectors.to(new)

    def image(self, rows: Tensor) -> Tensor:
        return rows @ self.second_moment

    def size(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return `|w|_S^2` per row, and whether that is more than rounding."""
        size = (self.image(w) * w).sum(1, keepdim=True)
        return size, size > 1e-12 * (w.square().sum(1, keepdim=True) * self.factors[0][-1]).clamp_min(1e-300)

    def share(self, w: Tensor, g: Tensor) -> Tensor:
        size, alive = self.size(w)
        return torch.where(alive, (w * g).sum(1, keepdim=True) / torch.where(alive, size, 1.0), 0.0)

    def moved(self, w: Tensor, g: Tensor, scale: float, damping: float, *, lengths: bool) -> Tensor:
        values, vectors = self.factors
        share = self.share(w, g)
        longer = w * (1 - scale * share) if lengths else w
        metric = (1 - damping) * values + damping * values[-1]
        across = (g - self.image(w) * share) @ vectors
        turned = longer - scale * (across / metric.clamp_min(1e-30)) @ vectors.T
        before, after = (self.size(rows)[0].clamp_min(0).sqrt() for rows in (longer, turned))
        alive = self.size(w)[1] & (after > 0)  # a row that no input reaches has no ellipsoid to go back to
        return turned * torch.where(alive, before / after.clamp_min(1e-30), 1.0)


class GDNP(Optimizer):
    """Gradient descent in length and direction for Linear and Conv2d layers, in the metric of their inputs.

    BatchNorm writes a row of weights as `gamma w / |w|_S`, S the second moment of the layer's inputs. For each row,
    with its gradient g and `c` the curvature of the loss in the layer's outputs:

    * direction: `w <- w - M t / c` with the part `t = g - S w <w, g> / |w|_S^2` of g along the ellipsoid of constant
      `|w|_S`, then back to it; `M = ((1 - damping) S + damping L I)^-1`, L the largest eigenvalue of S;
    * length, `gain="newton"`: `w <- w (1 - <w, g> / (c |w|_S^2))` before it, exact where the loss is quadratic along w;
      `gain="search"`: after it, all lengths together along these changes, by a safeguarded secant on the slope of the
      loss (S3's bisection, with fewer losses), until a tenth of the slope is left.

    S is a running mean. c is the secant `<dw, dg> / |dw|_S^2` over the layer's last step; a step after which the loss
    of the same batch is not lower is taken back and tried with a larger c. On least squares with `damping=1` these are
    the steps of `gdnp`, whatever the number of outputs. Other parameters get gradient steps with secants of their own.

    Cost: two gradients per step (three at the first), one more for each step taken back; a search takes at least one
    more (three at the first step) and at most `tries`. `evaluations` counts them. An eigendecomposition of every S each
    `refresh` steps.

    Args:
        model: whose Linear and Conv2d layers (zero padding, one group) are stepped so; hooks last for one forward.
        lr: factor of all steps but a searched gain's; 1 is the step of the analysis.
        gain: how lengths are found, "newton" or "search".
        damping: 1 for the metric of S3's step, near 0 for that of S.
        decay: of the running second moments.
        refresh: steps between eigendecompositions.
        tries: of a step that does not lower the loss, and losses in a search.

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
        gain: Literal["newton", "search"] = "newton",
        damping: float = 0.01,
        decay: float = 0.95,
        refresh: int = 10,
        tries: int = 4,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "model", "__class__")}
        in_range = lr > 0 and 0 < damping <= 1 and 0 <= decay < 1 and refresh >= 1 and tries >= 1
        if not in_range or gain not in ("newton", "search"):
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            rule = "lr > 0, 0 < damping <= 1, 0 <= decay < 1, refresh and tries at least 1, gain newton or search"
            raise InputError("GDNP", rule, given, "Leave them out for their defaults")
        self.evaluations = 0
        self._layers = [_Layer(m) for m in dict.fromkeys(model.modules()) if _is_layer(m)]
        super().__init__((p for p in model.parameters() if p.requires_grad), options)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        for layer in self._layers:
            layer.seen = []
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
            first = loss = self._evaluate(closure)
        layers = [layer for layer in self._layers if layer.params[0].grad is not None and layer.seen]
        for layer in layers:
            layer.renew(self.state[layer.params[0]], options)
        inside = {id(p) for layer in layers for p in layer.params}
        blocks = [*layers, *(_Plain(p) for p in options["params"] if p.grad is not None and id(p) not in inside)]
        states = [self.state[block.params[0]] for block in blocks]
        searched = options["gain"] == "search"
        starts, slopes = _read(blocks)

        def move(factor: float) -> None:
            for block, state, w, g in zip(blocks, states, starts, slopes, strict=True):
                scale = factor * options["lr"] / state.get("curvature", 1.0)
                block.write(block.moved(w, g, scale, options["damping"], lengths=not searched))

        def measure(most: float) -> None:
            for block, state, w, g in zip(blocks, states, starts, slopes, strict=True):
                step = block.rows() - w
                bend = float((step * (block.rows(gradient=True) - g)).sum())
                _set_curvature(state, bend, float((block.image(step) * step).sum()), most)

        if any("curvature" not in state for state in states):
            size, push = (math.sqrt(sum(float(t.square().sum()) for t in each)) for each in (starts, slopes))
            move(_PROBE * size / max(push, 1e-300) / options["lr"])
            self._evaluate(closure)
            measure(math.inf)
            if searched:  # the step in direction is that of the best lengths
                _write(blocks, starts)
                self._search_gains(closure, blocks, states, (loss, slopes))
                loss = self._evaluate(closure)
                starts, slopes = _read(blocks)
        for _ in range(options["tries"]):
            move(1.0)
            after = self._evaluate(closure)
            if after <= loss:
                measure(2.0)
                if searched:
                    self._search_gains(closure, blocks, states, (after, _read(blocks)[1]))
                return first
            for state in states:
                state["curvature"] *= 4.0
        _write(blocks, starts)
        return first

    def _search_gains(
        self, closure: Callable[[], Any], blocks: list[Any], states: list[Any], here: tuple[float, list[Tensor]]
    ) -> None:
        """Stretch all rows by the multiple of Newton's changes at which the loss is flat.

        `here` are loss and gradients at the blocks as they are. The multiple is found between ends whose slopes differ
        in sign, by the secant, or a tenth of the way from the nearer one; what raises the loss is an end too.
        """
        starts, (value, slopes) = _read(blocks)[0], here
        parts = zip(blocks, states, starts, slopes, strict=True)
        ways = [-w * block.share(w, g) / state["curvature"] for block, state, w, g in parts]
        slope = sum(float((way * g).sum()) for way, g in zip(ways, slopes, strict=True))
        low, high, s, best = (0.0, slope), math.inf, 1.0, (value, 0.0)
        for _ in range(self.param_groups[0]["tries"] if slope < 0 else 0):
            _write(blocks, [w + s * way for w, way in zip(starts, ways, strict=True)])
            there = self._evaluate(closure)
            rise = sum(float((way * block.rows(gradient=True)).sum()) for way, block in zip(ways, blocks, strict=True))
            best = min(best, (there, s))
            if there <= value and abs(rise) <= _FLAT * abs(slope):
                break
            secant = low[0] + (s - low[0]) * low[1] / (low[1] - rise) if rise > low[1] else math.inf
            if rise > 0 or there > value:
                high = s
            else:
                low = (s, rise)
            end = high if math.isfinite(high) else 4 * max(low[0], 1.0)
            s = min(max(secant, low[0] + 0.1 * (end - low[0])), end - 0.1 * (end - low[0]))
        _write(blocks, [w + best[1] * way for w, way in zip(starts, ways, strict=True)])


def _read(blocks: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    return [block.rows() for block in blocks], [block.rows(gradient=True) for block in blocks]


def _write(blocks: list[Any], rows: list[Tensor]) -> None:
    for block, new in zip(blocks, rows, strict=True):
        block.write(new)


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return isinstance(module, nn.Linear) and isinstance(module._parameters.get("weight"), nn.Parameter)


def _set_curvature(state: dict[str, Any], bend: float, size: float, most: float) -> None:
    """Set the curvature to a secant's, at most a factor `most` from what it was; a step of no size says nothing."""
    old = state.get("curvature", 1.0)
    found = abs(bend) / size if size > 0 else math.nan
    if math.isfinite(found):
        state["curvature"] = min(max(found, old / most, 1e-12), old * most)
    else:
        state.setdefault("curvature", old)
