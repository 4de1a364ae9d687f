"""How fast outputs and loss can change with the weights of each layer: bounds beside what the gradient is."""

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.charts import curves
from normgauge.errors import InputError, ModelError
from normgauge.measure.lipschitz import lipschitz as _rules  # noqa: F401 (registers them)
from normgauge.measure.lipschitz.trace import Domain, Walk, private_copy
from normgauge.network import ModuleCall, fix_parametrizations, watched
from normgauge.objective import Objective
from normgauge.records import Chart, Kind, Reading
from normgauge.results import Result, instrument, spend
from normgauge.rng import preserved_rng, seed_everything
from normgauge.theory.batchnorm_calculus import pullback_gradient

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SLACK = 1e-9
_LN10 = math.log(10.0)
HELPED = 1.1  # without / with BatchNorm: ten percent, more than the bounds' own looseness from batch to batch
_COLUMNS = {
    "output_bound": "log10_output",
    "gradient_bound": "log10_chain",
    "local_bound": "log10_local",
    "without_batch_norm": "log10_plain",
    "gradient": "log10_gradient",
}


@dataclass(frozen=True)
class WeightGain:
    """One layer: how fast things can change with its weights."""

    name: str  # of the layer
    input: float  # largest norm of the map from the weights to the layer's output, over the data: A_{i-1}
    log10_output: float | None  # of the bound on the outputs' slope; `None` in train mode with batch statistics
    log10_chain: float | None  # of the bound on the gradient from it; `None` there too
    log10_local: float  # of the bound on the gradient from the gradient that arrives behind the layer
    log10_plain: float | None  # the same without the batch normalization that follows; `None` where none does
    log10_gradient: float  # of the gradient's norm, measured


@dataclass(frozen=True)
class WeightLipschitz(Result):
    """Bounds on the slope with respect to each layer's weights, and the measured gradients.

    Attributes:
        layers: in order of use.
        model: in words.
        why: why the chain bounds are missing, if they are.
    """

    layers: tuple[WeightGain, ...]
    model: str
    why: str = field(default="", repr=False)

    def _title(self) -> str:
        return f"slopes of {self.model} with respect to the weights of each layer, log10"

    def _rows(self) -> list[dict[str, Any]]:
        columns = {"layer": "name", "input": "input", **_COLUMNS}
        return [{name: getattr(layer, own) for name, own in columns.items()} for layer in self.layers]

    def readings(self) -> tuple[Reading, ...]:
        """Return log10 of the local bound and of the gradient per layer, then of the chain bounds where they exist."""
        kinds: dict[str, Kind] = {"local_bound": "upper", "gradient": "exact", "gradient_bound": "upper"}
        return tuple(
            Reading(f"log10 {name.replace('_', ' ')}", row[name], kind, layer=row["layer"])
            for name, kind in kinds.items()
            for row in self._rows()
            if row[name] is not None
        )

    def _meaning(self) -> str:
        steepest = max(self.layers, key=lambda layer: layer.log10_gradient)
        if not math.isfinite(steepest.log10_gradient):
            return f"The gradient of all {len(self.layers)} layers is zero."
        size, bound = steepest.log10_gradient, steepest.log10_local
        said = f"{steepest.name!r} has the largest gradient, 10^{size:.2f} under a bound of 10^{bound:.2f}"
        helped = [(g.log10_plain - g.log10_local, g.name) for g in self.layers if g.log10_plain is not None]
        if not helped:
            return f"{said}; no layer has batch statistics behind it that could lower the bound (factor 1)."
        gain, name = max(helped)
        if gain > math.log10(HELPED):
            return f"{said}; BatchNorm lowers the bound most at {name!r}, by 10^{gain:.2f} (over {HELPED:g})."
        return f"{said}; BatchNorm lowers no bound by more than a factor of {HELPED:g} here."

    def _notes(self) -> str:
        return f"certified in float64 up to slack {_SLACK:g}" + (f"; {self.why}" if self.why else "")

    def chart(self) -> Chart:
        """Return bounds and measured gradients over the layers."""
        names = ("gradient_bound", "local_bound", "without_batch_norm", "gradient")
        rows = [
            {"layer": place, "log10": row[name], "series": name.replace("_", " ")}
            for place, row in enumerate(self._rows(), 1)
            for name in names
            if row[name] is not None and math.isfinite(row[name])
        ]
        return curves(rows, x="layer", y="log10", y_scale="linear", title=self._title())


@instrument
def weight_lipschitz(objective: Objective) -> WeightLipschitz:
    """Bound the slope with respect to each layer's weights, beside the gradient that is measured.

    For a layer y = W h inside a network f with loss L, Frobenius norm of W, sums over samples n:

    * outputs: ||df/dW|| <= max over n of A_n S_n, with A_n the norm of W -> W h_n (the length of h_n; for
      convolutions the spectral norm of its patches) and S_n the bound of `lipschitz` from y to the output at the datum
      (S2 Theorem 12);
    * gradient_bound: ||dL/dW|| <= sum over n of ||dL/df_n|| S_n A_n;
    * local_bound: ||dL/dW|| <= ||H|| ||dL/dy||, H all inputs of the layer as rows. Where BatchNorm follows in train
      mode, ||dL/dy|| comes from the gradient g behind it, unit by unit: (gamma / s) ||g - mean(g) - yh mean(g yh)||
      (S1 Theorem 4.4); `without_batch_norm` is ||H|| ||g||, had BatchNorm not been there.

    Kind: upper bounds, certified up to float64 rounding; the gradient is exact.
    Cost: one forward and backward pass per batch in float64, one forward pass per layer, and the norms of the layers.

    Args:
        objective: model, loss and data; built with `Objective(...)`, one tensor as inputs.

    Deviations: S2 Theorem 12 takes A_{i-1} over all inputs, which is infinite; here it is that of the data. BatchNorm
    in train mode is no fixed map per sample, so its chain bounds are left out. S1 Theorem 4.4 prints the square of the
    right-hand side's first term and misses the factor of H; see `theory.smoothness.worst_weight_gradient`.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False))
        >>> data = (torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0]]))
        >>> _ = net[0].weight.data.copy_(torch.tensor([[1.0, 0.0]]))
        >>> bounds = weight_lipschitz(Objective(net, nn.functional.mse_loss, data, mode="eval"))
        >>> layer = bounds.layers[0]  # loss (w x)^2: gradient 2 (w x) x, of length 2 * 3 * 5
        >>> round(10**layer.log10_chain, 4), round(10**layer.log10_gradient, 4)
        (30.0, 30.0)

    References:
        than2025, santurkar2018.
    """
    me, kind = "weight_lipschitz", type(objective.model).__name__
    if not objective.calls_plainly:
        raise InputError(
            me, "needs Objective(model, loss, data)", "one from a step or with forward=", "Make a module of it"
        )
    model = _plain_copy(objective)
    totals: dict[str, _Sums] = {}
    why, weights = "", 0.0
    for number, batch in objective.batches():
        weights += objective.weight(batch)
        why = _one_batch(objective, model, number, batch, totals) or why
    if not totals:
        raise ModelError(me, "the model needs a Linear or convolution", kind, "Add one")
    spend("gradients")
    spend("forwards", 0 if why else len(totals))  # one walk per layer
    return WeightLipschitz(tuple(sums.row(name.strip("()"), weights) for name, sums in totals.items()), kind, why)


@dataclass
class _Use:
    """What one layer saw in one pass, and the batch normalization in train mode that follows at once."""

    input: Tensor
    output: Tensor
    norm: _BatchNorm | None = None
    behind: Tensor | None = None


class _Sums:
    """Running sums over batches for one layer."""

    def __init__(self) -> None:
        self.input = self.output = self.chain = self.local = self.plain = 0.0
        self.has_chain = self.normalized = True
        self.gradient: Tensor | float = 0.0

    def row(self, name: str, weights: float) -> WeightGain:
        slope = float(torch.as_tensor(self.gradient).norm()) / weights
        output, chain = (_log(x) if self.has_chain else None for x in (self.output, self.chain / weights))
        local, plain = _log(self.local / weights), _log(self.plain / weights) if self.normalized else None
        gradient = math.log10(slope) if slope > 0 else -math.inf
        return WeightGain(name, self.input, output, chain, local, log10_plain=plain, log10_gradient=gradient)

    def add(
        self, layer: nn.Module, use: _Use, loss: Tensor, arriving: Tensor, slopes: Tensor | None, share: float
    ) -> None:
        """Add one call of the layer, whose gradients come from the loss; `slopes`: from its output to the network's."""

        def gradient(at: Tensor) -> Tensor:
            return torch.autograd.grad(loss, at, retain_graph=True, materialize_grads=True)[0]

        each, together = input_norms(layer, use.input.detach())
        self.input, self.has_chain = max(self.input, float(each.max())), self.has_chain and slopes is not None
        if slopes is not None:
            self.output = max(self.output, float((each * slopes).max()))
            self.chain += share * float((arriving * slopes * each).sum())
        if use.norm is None or use.behind is None:
            self.normalized = False
            self.local += share * together * float(gradient(use.output).norm())
            return
        g = gradient(use.behind)
        self.plain += share * together * float(g.norm())
        self.local += share * together * _pull_back(use.norm, use.output.detach(), g)


def _one_batch(objective: Objective, model: nn.Module, number: int, batch: Any, totals: dict[str, _Sums]) -> str:
    """Add one batch to the layers' sums; return why chain bounds are missing, if they are."""
    share, domain = objective.weight(batch), Domain(batch[0])
    inputs = domain.rebuilt(domain.select(range(domain.samples)))
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise InputError("weight_lipschitz", "inputs are one real tensor", "others", "Measure from the embeddings on")
    slopes, why = _slopes(model, domain)
    modules = {name or "(model)": module for name, module in model.named_modules()}
    names = slopes or [name for name, module in modules.items() if isinstance(module, _LAYERS)]
    uses_by_layer: dict[str, list[_Use]] = {name: [] for name in names}

    def note_use(call: ModuleCall) -> None:
        if call.name in uses_by_layer and call.given is not None and call.made is not None:
            uses_by_layer[call.name].append(_Use(call.given, call.made))
        elif isinstance(call.module, _BatchNorm) and call.module.training:
            for use in (use for uses in uses_by_layer.values() for use in uses if use.output is call.given):
                use.norm, use.behind = call.module, call.made

    with preserved_rng(), watched(model, note_use), torch.enable_grad():
        seed_everything(number)
        output = model(inputs.clone().requires_grad_())
        targets = batch[1].double() if torch.is_tensor(batch[1]) and batch[1].is_floating_point() else batch[1]
        loss = cast(Any, objective.loss_function)(output, targets)
        arriving = torch.autograd.grad(loss, output, retain_graph=True)[0].flatten(1).norm(dim=1)
        for name, uses in uses_by_layer.items():
            sums, layer = totals.setdefault(name, _Sums()), modules[name]
            (slope,) = torch.autograd.grad(loss, layer.weight, retain_graph=True, materialize_grads=True)
            sums.gradient = sums.gradient + share * slope.detach()
            for use, steepness in zip(uses, slopes.get(name, [None] * len(uses)), strict=True):
                sums.add(layer, use, loss, arriving, steepness, share)
    return why


def _pull_back(norm: _BatchNorm, y: Tensor, g: Tensor) -> float:
    """Return the length of the gradient before a batch normalization, from the one behind it, unit by unit."""
    units, slopes = (x.movedim(1, 0).flatten(1) for x in (y, g))
    gains = [1.0] * len(units) if norm.weight is None else norm.weight.detach().tolist()
    parts = zip(units, slopes, gains, strict=True)
    return math.sqrt(sum(float(pullback_gradient(u, g, gain, norm.eps).square().sum()) for u, g, gain in parts))


def _slopes(model: nn.Module, domain: Domain) -> tuple[dict[str, list[Tensor | None]], str]:
    """Return, per call of each layer, the bound from its output to the network's at each datum; or why none."""
    if any(isinstance(module, _BatchNorm) and module.training for module in model.modules()):
        return {}, "no chain bounds: samples share batch statistics in train mode"
    walk, slopes = Walk(model, domain), dict[str, list[Tensor | None]]()
    values = [walk.values(datum) for datum in range(domain.samples)]
    for operation in walk.operations:
        if isinstance(operation.module, _LAYERS):
            ats = [walk.run(own, source=operation.result).at for own in values]
            slopes.setdefault(operation.name, []).append(torch.cat(ats).exp())
    return slopes, ""


def _plain_copy(objective: Objective) -> nn.Module:
    """Return a copy in float64 with the objective's values, mode, and weights as they are used."""
    model = private_copy(objective.model)
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name, value in objective.parameters.items():
            own[name].copy_(value)
    # gradients first: torch makes what is left of a parametrization a parameter only where it has one
    model = fix_parametrizations(model.double().eval().requires_grad_(True))
    return model.train(objective.mode == "train")


def _log(value: float) -> float:
    return math.log10(value * (1 + _SLACK)) if value > 0 else -math.inf


def input_norms(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, float]:
    """Return the norm of weights -> output (Frobenius to Euclidean) at each sample, and for all samples together.

    For Linear the norm of the inputs as rows; for a convolution that of its patches as rows, the largest over groups.

    Examples:
        >>> each, together = input_norms(nn.Linear(2, 5), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        >>> each.tolist()
        [5.0, 1.0]
    """
    rows = _input_rows(layer, inputs)
    if rows is None:  # no patches for three axes: each tap of the kernel passes the input on at most once
        taps = math.sqrt(math.prod(layer.kernel_size))  # type: ignore[arg-type]
        lengths = inputs.flatten(1).norm(dim=1)
        return taps * lengths, taps * float(lengths.norm())
    each = torch.stack([_spectral(rows[:, sample]).max() for sample in range(rows.shape[1])])
    return each, float(_spectral(rows.flatten(1, 2)).max())


def _input_rows(layer: nn.Module, inputs: Tensor) -> Tensor | None:
    """Return `[groups, samples, positions, features]`."""
    if isinstance(layer, nn.Linear):
        return inputs.reshape(1, len(inputs), -1, inputs.shape[-1])
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        return None
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = functional.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
    kernel, dilation, stride = layer.kernel_size, layer.dilation, layer.stride
    if isinstance(layer, nn.Conv1d):
        padded = padded.unsqueeze(2)
        kernel, dilation, stride = (1, *kernel), (1, *dilation), (1, *stride)
    patches = functional.unfold(padded, kernel, dilation=dilation, stride=stride)  # [N, channels taps, positions]
    return patches.unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2)


def _spectral(matrices: Tensor) -> Tensor:
    """Return the spectral norm of each matrix, by the Gram matrix of its short side."""
    wide = matrices.shape[-1] > matrices.shape[-2]
    gram = matrices @ matrices.transpose(-1, -2) if wide else matrices.transpose(-1, -2) @ matrices
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0).sqrt() * (1 + 1e-11)
