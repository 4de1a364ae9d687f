"""`ng.smoothing`: what each normalizer takes from gradient and curvature of the loss (S1 Theorems 4.1, 4.2, 4.4)."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.charts import bars, curves
from normgauge.network import first_tensor, role_of
from normgauge.objective import Objective
from normgauge.records import Chart, Reading, Status
from normgauge.results import Result, instrument, spend

NOTABLE = 0.05  # share of the squared gradient: what is taken below it changes the gradient's norm by 3 % at most
FITS = 1e-4  # relative residual between a layer and the formula, more where its precision has less
Rows = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
Layout = tuple[str, Tensor, Tensor, Tensor, Rows]  # kind, normalized groups as rows, their s, gamma, to rows and back


@dataclass(frozen=True, slots=True)
class LayerSmoothing:
    """What one call of a normalizer does to the gradient, and to the curvature along it.

    With y a normalization group of m values, s = sqrt(var + eps), yh = (y - mean) / s, z = gamma yh + beta, g and H
    gradient and Hessian of the loss by z, h = gamma g, v the gradient by y through the normalizer; sums over groups.

    Attributes:
        layer: the module's name; `#2` and so on for further calls.
        step: of training, where checkpoints were given.
        kind: "batch", "layer", "group", "instance" or "rms".
        groups: how many groups share a mean and a variance.
        m: values in a group.
        sigma: median of s over the groups.
        sigma_low: the smallest.
        sigma_high: the largest.
        gain: median of gamma / s, with the root mean square of gamma where it varies within a group.
        mean_share: sum <1, h>^2 / m over sum |h|^2, removed with the mean; 1/m for random signs, 0 for RMS norms.
        yhat_share: sum <h, yh>^2 (2 - |yh|^2 / m) / m over sum |h|^2, removed along yh; 1/m for an uncorrelated h.
        sum_square: sum <1, h>^2, which S1 says grows with m^2.
        reduction: |v|^2 / |g|^2: realized, against the network whose backward path skips the normalizer; inputs of
            spectral norm lambda multiply both by lambda^2 at worst, so it is Theorem 4.4's ratio too.
        slack: (bound - |v|^2) / bound of Theorem 4.1 with 1/m, which is 0 without eps and never negative.
        printed_slack: the same with the printed 1/sqrt(m); negative where the printed theorem fails.
        curvature: v^T Hhat v / |v|^2, Hhat the Hessian by y through the normalizer.
        scaled: (Jv)^T H (Jv) / |v|^2, what is left of the loss's own curvature; J v = gamma v / s without eps.
        term: curvature - scaled, that is -<h, yh> |v|^2 / (m s^2) per group without eps; below 0 it smooths.
        twin_curvature: g^T H g / |g|^2, of the network whose backward path skips the normalizer.
        status: ok, or skipped.
        sentence: why, where not ok.
    """

    layer: str
    step: int = 0
    kind: str = ""
    groups: int = 0
    m: int = 0
    sigma: float = math.nan
    sigma_low: float = math.nan
    sigma_high: float = math.nan
    gain: float = math.nan
    mean_share: float = math.nan
    yhat_share: float = math.nan
    sum_square: float = math.nan
    reduction: float = math.nan
    slack: float = math.nan
    printed_slack: float = math.nan
    curvature: float = math.nan
    scaled: float = math.nan
    term: float = math.nan
    twin_curvature: float = math.nan
    status: Status = "ok"
    sentence: str = ""

    @property
    def taken(self) -> float:
        """The share of the squared gradient that is removed."""
        return self.mean_share + self.yhat_share


@dataclass(frozen=True)
class Smoothing(Result):
    """What normalizers take from gradient and curvature, layer by layer."""

    layers: tuple[LayerSmoothing, ...]  # in the order of their calls, step after step

    def __getitem__(self, layer: str) -> LayerSmoothing:
        """Return one layer by its name, at the last step."""
        return next(entry for entry in reversed(self.layers) if entry.layer == layer)

    @property
    def measured(self) -> tuple[LayerSmoothing, ...]:
        """The layers that could be measured."""
        return tuple(entry for entry in self.layers if entry.status == "ok")

    @property
    def _steps(self) -> list[int]:
        """The steps of training, where there are several."""
        steps = sorted({entry.step for entry in self.layers})
        return steps if len(steps) > 1 else []

    def _title(self) -> str:
        count = len({entry.layer for entry in self.measured})
        return f"Smoothing by {count} normalizer{'s' * (count != 1)}"

    def _rows(self) -> list[dict[str, Any]]:
        return [{item.name: getattr(entry, item.name) for item in fields(entry)} for entry in self.layers]

    def _shown_rows(self) -> list[dict[str, Any]]:
        hidden = {"groups", "sigma_low", "sigma_high", "sum_square", "twin_curvature", "" if self._steps else "step"}
        return [{name: value for name, value in row.items() if name not in hidden} for row in self._rows()]

    def readings(self) -> tuple[Reading, ...]:
        """Return per layer what is removed from the squared gradient, the curvature term, and gamma over sigma."""
        named = {
            "mean_share": "share removed by the mean",
            "yhat_share": "share removed along the activations",
            "term": "curvature term along the gradient",
            "gain": "gamma over sigma",
            "reduction": "squared gradient over the twin's",
        }

        def reading(entry: LayerSmoothing, name: str) -> Reading:
            why, step = entry.sentence or "the gradient is 0", entry.step if self._steps else None
            return Reading.measured(named[name], getattr(entry, name), layer=entry.layer, step=step, why=why)

        return tuple(reading(entry, name) for name in named for entry in self.layers) or (
            Reading.measured("share removed by the mean", math.nan, why=self.sentence),
        )

    def _meaning(self) -> str:
        last = max((entry.step for entry in self.layers), default=0)
        seen = [entry for entry in self.measured if entry.step == last and math.isfinite(entry.mean_share)]
        if not seen:
            return "No normalizer with a gradient was measured, so 0 layers can be judged."
        most = max(seen, key=lambda entry: entry.taken)
        strong, bent = sum(entry.taken >= NOTABLE for entry in seen), sum(entry.term > 0 for entry in seen)
        said = f"{strong} of {len(seen)} normalizers take {NOTABLE:.0%} or more of the squared gradient; "
        said += f"{most.layer!r} takes most, {most.taken:.1%} (mean {most.mean_share:.1%}, along the activations "
        said += f"{most.yhat_share:.1%})"
        if self._steps:
            first = max(entry.taken for entry in self.measured if entry.step == self._steps[0])
            said = f"At step {last} {said}, at step {self._steps[0]} it was {first:.1%} at most"
        elif not strong:
            said += ": what changes the gradient is gamma / sigma alone"
        sign = f"In {bent} it adds curvature along the gradient" if bent else "In none it adds curvature"
        return f"{said}. {sign} (term above 0), which is what S1 needs the sign of <g, yhat> for."

    def _notes(self) -> str:
        failed = sum(entry.printed_slack < 0 for entry in self.measured)
        slack = max((entry.slack for entry in self.measured), default=0.0)
        return f"the printed 1/sqrt(m) fails in {failed} layers; with 1/m the largest slack, from eps, is {slack:.2g}"

    def chart(self) -> Chart:
        """Return the shares removed per layer, over training where there are several steps."""
        if not self.measured:
            raise NotImplementedError("nothing was measured")
        if self._steps:
            lines = [{"step": e.step, "series": e.layer, "value": e.taken} for e in self.measured]
            return curves(lines, title=self._title(), y_title="share of |gradient|^2 removed")
        named = {"mean_share": "by the mean", "yhat_share": "along the activations"}
        rows = [
            {"layer": entry.layer, "removed": title, "share": getattr(entry, name)}
            for entry in self.measured
            for name, title in named.items()
        ]
        return bars(rows, x="layer", y="share", series="removed", title=self._title(), y_title="share of |gradient|^2")


@dataclass
class _Call:
    """One call of a normalizer: its output in the graph, and how it came about, or why nobody knows."""

    layer: str
    given: Tensor
    made: Tensor
    layout: Layout | str


@instrument
def smoothing(objective: Objective, *, checkpoints: Mapping[int, Mapping[str, Tensor]] | None = None) -> Smoothing:
    """Measure per normalizer what Theorems 4.1, 4.2 and 4.4 of S1 say it takes from gradient and curvature.

    Per group of m values, with the symbols of `LayerSmoothing`,

        |v|^2 = (|h|^2 - <1, h>^2 / m - <h, yh>^2 (2 - |yh|^2 / m) / m) / s^2
        v^T Hhat v = (Jv)^T H (Jv) - (<h, yh> |v|^2 + 2 <h, v> c - 3 <h, yh> c^2 / m) / (m s^2),   c = <yh, v>

    exactly for every eps; without eps |yh|^2 = m and c = 0. Normalizers by sample have the same form with their own
    groups, RMS norms without the term of the mean. What a layer computes is compared with the formula first.

    Kind: exact. Cost: one gradient, and two products per call of a normalizer at most (from its output on), per step.

    Args:
        objective: model, loss, data and mode. BatchNorm in eval mode removes nothing and is skipped, with the reason.
        checkpoints: training step -> parameters, for smoothing over training.

    Raises:
        NotDifferentiableError: where model or loss has no second derivative.

    Deviations: S1 prints the theorems as inequalities and Theorem 4.1 with 1/sqrt(m), which fails for m > 1.

    Examples:
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        >>> data = (torch.randn(16, 3), torch.randint(2, (16,)))
        >>> found = smoothing(Objective(model, nn.functional.cross_entropy, data, mode="train"))
        >>> 0 < found["1"].mean_share + found["1"].yhat_share < 1
        True

    References: santurkar2018.
    """
    places = {0: objective} if checkpoints is None else {s: objective.at(checkpoints[s]) for s in sorted(checkpoints)}
    called = tuple(entry for step, place in places.items() for entry in _measure(place, step))
    lost = [entry.sentence for entry in called if entry.status != "ok"]
    if len(called) == len(lost):
        return Smoothing(called, status="skipped", sentence=lost[0] if lost else "no normalizer was called")
    return Smoothing(called, sentence=f"{len(lost)} of {len(called)} normalizers: {lost[0]}" if lost else "")


def _measure(objective: Objective, step: int) -> Iterator[LayerSmoothing]:
    sums: dict[str, dict[str, Any]] = {}
    whole = sum(objective.weight(batch) for _, batch in objective.batches())
    for number, batch in objective.batches():
        share, calls = objective.weight(batch) / whole, list[_Call]()
        with _noted(objective.model, calls):
            _, _, value = objective.graph(number, batch)
        live = [call for call in calls if call.made.requires_grad and not isinstance(call.layout, str)]
        slopes: tuple[Tensor | None, ...] = ()
        if live:
            made = [call.made for call in live]
            slopes = torch.autograd.grad(share * value, made, create_graph=True, allow_unused=True)
        graph = {id(call): slope for call, slope in zip(live, slopes, strict=True)}
        for call in calls:
            _add_call(sums.setdefault(call.layer, {"sentence": ""}), call, graph.get(id(call)), share)
    for name, entry in sums.items():
        yield replace(_layer(name, entry), step=step)


@contextmanager
def _noted(model: nn.Module, calls: list[_Call]) -> Iterator[None]:
    """Note every call of a normalizer; what follows works on a copy of its output, in place if it likes."""
    times: dict[str, int] = {}

    def hook(name: str) -> Callable[..., Any]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            given = first_tensor((args, kwargs))
            if given is None or not isinstance(output, Tensor):
                return None
            times[name] = times.get(name, 0) + 1
            layer = name if times[name] == 1 else f"{name}#{times[name]}"
            with torch.no_grad():  # now: gains and mode are those asked for while the model runs only
                layout = _layout(module, given.detach(), output.detach())
            calls.append(_Call(layer or "(model)", given, output, layout))
            return output.clone()

        return note

    named = [(name, module) for name, module in model.named_modules() if role_of(module) == "normalizer"]
    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add_call(entry: dict[str, Any], call: _Call, slope: Tensor | None, share: float) -> None:
    """Add one call's sums over its groups to a layer's entry, or say why there are none."""
    if isinstance(call.layout, str) or slope is None:
        entry["sentence"] = call.layout if isinstance(call.layout, str) else "no gradient reaches it"
        return
    kind, yh, s, gamma, (rows, back) = call.layout
    with torch.no_grad():
        g = rows(slope.detach()).double()
        h, m = gamma * g, yh.shape[1]
        mean = h.mean(1, keepdim=True) if kind != "rms" else torch.zeros_like(s)
        a, length = (h * yh).sum(1, keepdim=True), yh.square().sum(1, keepdim=True)
        v = (h - mean - yh * a / m) / s
        size, pull, c = v.square().sum(1, keepdim=True), (h * v).sum(1, keepdim=True), (yh * v).sum(1, keepdim=True)
        sides = (v - (v.mean(1, keepdim=True) if kind != "rms" else 0.0) - yh * c / m) / s
        energy, middle, along = h.square().sum(1, keepdim=True), m * mean.square(), a.square() / m
        bound, printed = ((energy - middle - k * along) / s.square() for k in (1.0, math.sqrt(m)))
        term = -(a * size + 2 * pull * c - 3 * a * c.square() / m) / (m * s.square())
        directions = [back((gamma * sides).to(slope.dtype)), slope.detach()]
    if call.given.requires_grad:
        (real,) = torch.autograd.grad(call.made, call.given, slope.detach(), retain_graph=True)
        if float((rows(real) - v).norm()) > FITS * float(v.norm()) + _rounding(slope) * float((h / s).norm()):
            entry["sentence"] = "its backward path is not the derivative of its forward"
            return
    found = {
        **{"energy": energy, "middle": middle, "along": along * (2 - length / m), "bound": bound, "printed": printed},
        **{"size": size, "twin": g.square(), "term": term, "sum_square": m * middle},
    }
    for name, values in found.items():
        entry[name] = entry.get(name, 0.0) + float(values.sum())
    for name, direction in zip(("scaled", "bent"), directions, strict=True):
        spend("products", share)
        product = None
        if slope.requires_grad:  # else the loss is affine in it
            (product,) = torch.autograd.grad(slope, call.made, direction, retain_graph=True, allow_unused=True)
        entry[name] = entry.get(name, 0.0) + (0.0 if product is None else float((product * direction).double().sum()))
    entry.setdefault("sigmas", []).append(s.reshape(-1))
    entry.setdefault("gains", []).append((gamma.square().mean(1, keepdim=True).sqrt() / s).reshape(-1))
    entry.update(kind=kind, m=m, groups=entry.get("groups", 0) + len(yh))


def _layer(name: str, entry: Mapping[str, Any]) -> LayerSmoothing:
    if entry["sentence"]:
        return LayerSmoothing(name, status="skipped", sentence=entry["sentence"])
    sigmas, gains = torch.cat(entry["sigmas"]), torch.cat(entry["gains"])

    def over(top: float, bottom: float) -> float:
        return top / bottom if bottom else math.nan

    return LayerSmoothing(
        layer=name,
        **{key: entry[key] for key in ("kind", "groups", "m", "sum_square")},
        sigma=float(sigmas.median()),
        sigma_low=float(sigmas.min()),
        sigma_high=float(sigmas.max()),
        gain=float(gains.median()),
        mean_share=over(entry["middle"], entry["energy"]),
        yhat_share=over(entry["along"], entry["energy"]),
        reduction=over(entry["size"], entry["twin"]),
        slack=over(entry["bound"] - entry["size"], entry["bound"]),
        printed_slack=over(entry["printed"] - entry["size"], entry["bound"]),
        curvature=over(entry["scaled"] + entry["term"], entry["size"]),
        scaled=over(entry["scaled"], entry["size"]),
        term=over(entry["term"], entry["size"]),
        twin_curvature=over(entry["bent"], entry["twin"]),
    )


def _layout(module: nn.Module, given: Tensor, made: Tensor) -> Layout | str:
    """Return how a normalizer came from its input to its output, or why that is not known."""
    stores = getattr(module, "running_mean", None) is not None
    if stores and not module.training:
        return "it takes stored statistics, which are constants: it removes nothing"
    if given.shape != made.shape or given.ndim < 2:
        return "it changes the shape of its input"
    target = made.double()
    for kind, rows, back in _candidates(module, given):
        values = rows(given).double()
        if values.shape[1] < 2:
            continue
        centred = values if kind == "rms" else values - values.mean(1, keepdim=True)
        s = (centred.square().mean(1, keepdim=True) + _eps(module, given.dtype)).sqrt()
        yh = centred / s
        for gamma, beta in _affine(module, given, kind in ("batch", "group", "instance")):
            said = back(rows(gamma).double() * yh) + beta.double()
            if float((said - target).norm()) <= max(FITS, _rounding(made)) * float(target.norm()):
                return kind, yh, s, rows(gamma).double(), (rows, back)
    return f"{type(module).__name__} does not compute gamma (y - mean) / sqrt(var + eps) + beta over a known group"


def _rounding(values: Tensor) -> float:
    return min(1e3 * torch.finfo(values.dtype).eps, 0.02)


def _candidates(module: nn.Module, given: Tensor) -> Iterator[tuple[str, Callable[..., Tensor], Callable[..., Tensor]]]:
    """Yield the groupings a normalizer of this make may have: kind, to rows of groups, and back."""
    shape = given.shape

    def tail(axes: int) -> Rows:
        return lambda x: x.expand(shape).reshape(math.prod(shape[: len(shape) - axes]), -1), lambda r: r.view(shape)

    name = type(module).__name__.lower()
    if "layer" in name or "rms" in name or hasattr(module, "normalized_shape"):
        wide = getattr(module, "normalized_shape", None)
        axes = len(wide) if isinstance(wide, tuple) else 1
        yield ("layer", *tail(axes))
        yield ("rms", *tail(axes))
        return
    groups = getattr(module, "num_groups", None)
    if isinstance(groups, int):
        yield "group", lambda x: x.expand(shape).reshape(shape[0] * groups, -1), lambda r: r.view(shape)
        return
    if "instance" in name:
        yield ("instance", *tail(given.ndim - 2))
    moved = (shape[1], shape[0], *shape[2:])
    to_rows, back = lambda x: x.expand(shape).movedim(1, 0).reshape(shape[1], -1), lambda r: r.view(moved).movedim(0, 1)
    yield "batch", to_rows, back
    yield ("layer", *tail(1))
    yield ("rms", *tail(1))


def _eps(module: nn.Module, dtype: torch.dtype) -> float:
    names = [name for name, value in vars(module).items() if "eps" in name and isinstance(value, float)]
    return float(getattr(module, names[0])) if names else torch.finfo(dtype).eps * isinstance(module, nn.RMSNorm)


def _affine(module: nn.Module, given: Tensor, by_channel: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield gain and shift in the input's shape, as stored and as 1 + w; none where they do not fit it."""

    def spread(values: Any, empty: float) -> Tensor:
        if not isinstance(values, Tensor):
            return given.new_full((), empty).expand(given.shape)
        flat = values.detach().to(given.dtype)
        return (flat.view(-1, *(1,) * (given.ndim - 2)) if by_channel and flat.ndim == 1 else flat).expand(given.shape)

    weight = getattr(module, "weight", None)
    try:
        shift = spread(getattr(module, "bias", None), 0.0)
        yield spread(weight, 1.0), shift
        if isinstance(weight, Tensor):
            yield spread(weight, 0.0) + 1, shift
    except RuntimeError:  # they do not broadcast
        return
