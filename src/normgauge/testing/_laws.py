"""The declared invariances, each tried on random modules: what the declaration says must be so."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from normgauge.nn.registry import Declaration, Invariance
from normgauge.rng import generator
from normgauge.testing._cases import VANISHING, Case, call, linear_map, prepare_module
from normgauge.testing._verdict import TOLERANCE, Ledger


def check_law(declaration: Declaration, law: Invariance, ledger: Ledger, case: Case) -> None:
    """Try one invariance on one case, in each of its modes."""
    alone = case.channels == 1 and case.spatial == 0 and declaration.statistics in ("sample", "group", "none")
    if case.spatial not in law.spatial or alone:  # a block of one value has no scale to divide by
        return
    eps = case.eps if law.exact else VANISHING
    for mode in law.modes:
        deviation, tolerance = deviation_of(declaration, law, case, mode, eps)
        ledger.require_same(f"{law} [{mode}]", *deviation, tolerance)
        if law.kind == "scale" and law.sign == "positive" and law.flips:
            flipped, tolerance = deviation_of(declaration, law, case, mode, eps, sign=-1)
            ledger.require_same(f"a negative factor flips the sign: {law} [{mode}]", *flipped, tolerance)
        if law.kind == "scale" and law.sign == "any":
            turned, tolerance = deviation_of(declaration, law, case, mode, eps, sign=-1, expected=1)
            ledger.require_same(f"a negative factor changes nothing: {law} [{mode}]", *turned, tolerance)


def deviation_of(
    declaration: Declaration,
    law: Invariance,
    case: Case,
    mode: str,
    eps: float,
    *,
    sign: int = 1,
    expected: int | None = None,
) -> tuple[tuple[Tensor, Tensor], float]:
    """Return output after the change and output before it (times the expected sign), with the tolerance for them."""
    outcome = _outputs_of_wrapped if declaration.placement == "weights" else _outputs_of_layer
    after, before = outcome(declaration, law, case, mode, eps, sign)
    return (after, (sign if expected is None else expected) * before), TOLERANCE[case.dtype]


def _outputs_of_layer(
    declaration: Declaration, law: Invariance, case: Case, mode: str, eps: float, sign: int
) -> tuple[Tensor, Tensor]:
    layer = prepare_module(declaration.layer, case, mode, eps)
    if sign < 0:
        _zero_bias(layer)
    if law.of == "input":
        x = case.inputs()
        return call(layer, _change_input(x, law, case, layer, sign)), call(layer, x)
    # In bfloat16 the linear map itself would round; the law is about the layer behind it.
    first = linear_map(5, case.channels, case.spatial).double()
    shape = (case.batch, 5, *(case.side,) * case.spatial)
    x = torch.randn(shape, generator=generator(case.seed + 5), dtype=torch.float64)
    changed = copy.deepcopy(first)
    with torch.no_grad():
        _change_rows(changed, law, case, layer, sign)
    return call(layer, changed(x).to(case.dtype)), call(layer, first(x).to(case.dtype))


def _outputs_of_wrapped(
    declaration: Declaration, law: Invariance, case: Case, mode: str, eps: float, sign: int
) -> tuple[Tensor, Tensor]:
    module = prepare_module(
        lambda channels, spatial: declaration.wrap(linear_map(3, channels, spatial)), case, mode, eps
    )
    if sign < 0:
        _zero_bias(module)
    x = case.inputs(3)
    if case.dtype == torch.bfloat16:
        _draw_on_grid(raw_weight(module), case)
    changed = copy.deepcopy(module)
    raw = raw_weight(changed)
    with torch.no_grad():
        own = {"row": 0, "column": 1}.get(law.per)  # the axis along which blocks have factors of their own
        shape = tuple(size if axis == own else 1 for axis, size in enumerate(raw.shape))
        if law.kind == "scale":
            raw.mul_(sign * case.factors(shape).to(raw.dtype))
        else:
            raw.add_(case.shifts(shape).to(raw.dtype))
    return call(changed, x), call(module, x)


def check_conventions(declaration: Declaration, ledger: Ledger, case: Case) -> None:
    """Hold the declared place of the gain and of eps against the layer's numbers.

    A gain stored as 1 + w is one where w is zero, one stored as w is none. Multiplied by t, an input meets an eps
    outside the root as eps / t and one inside as eps / t^2.
    """
    if case.channels == 1 or case.spatial not in declaration.spatial:
        return
    if declaration.gain in ("w", "1+w"):
        layer = prepare_module(declaration.layer, case, "eval", 1e-5)
        _zero_bias(layer)
        with torch.no_grad():
            for name, value in layer.named_parameters():
                if name.split(".")[-1] == "weight":
                    value.zero_()
        silent = bool((call(layer, case.inputs()) == 0).all())
        ledger.require(f"gain stored as {declaration.gain}", silent == (declaration.gain == "w"), f"{silent} at w = 0")
    if declaration.eps_place in ("inside", "outside"):
        x, power = case.inputs().double(), 2 if declaration.eps_place == "inside" else 1
        layers = [prepare_module(declaration.layer, case, "eval", eps).double() for eps in (0.5**power * 0.01, 0.01)]
        small, large = (call(layer, factor * x) for layer, factor in zip(layers, (0.5, 1.0), strict=True))
        ledger.require_same(f"eps {declaration.eps_place} the root", small, large, TOLERANCE[torch.float64])


def raw_weight(module: torch.nn.Module) -> torch.nn.Parameter:
    """Return the parameter behind a parametrized weight: the largest, since gains are smaller.

    The weight itself is not asked for: a spectral norm knows it only after the first forward.
    """
    owned = module.parametrizations.weight.parameters()  # type: ignore[union-attr]
    return max(owned, key=lambda value: value.numel())


def _draw_on_grid(raw: torch.nn.Parameter, case: Case) -> None:
    """Draw the raw weight in sixteenths: in bfloat16 adding a whole number to it is then exact."""
    draw = torch.randint(-32, 33, raw.shape, generator=generator(case.seed + 7))
    with torch.no_grad():
        raw.copy_((draw / 16).to(raw.dtype))


def _zero_bias(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if name.split(".")[-1] == "bias":
                value.zero_()


def _groups(layer: torch.nn.Module) -> int:
    return int(getattr(layer, "num_groups", getattr(layer, "groups", 1)))


def _block_shape(per: str, batch: int, channels: int, groups: int) -> tuple[int, int]:
    rows = {"row": channels, "sample_row": channels, "group": groups, "sample_group": groups}.get(per, 1)
    return (batch if per.startswith("sample") else 1), rows


def _spread_over_blocks(values: Tensor, x: Tensor) -> Tensor:
    repeat = x.shape[1] // values.shape[1]
    return values.repeat_interleave(repeat, 1).view(values.shape[0], x.shape[1], *(1,) * (x.dim() - 2)).to(x.dtype)


def _change_input(x: Tensor, law: Invariance, case: Case, layer: torch.nn.Module, sign: int) -> Tensor:
    shape = _block_shape(law.per, x.shape[0], x.shape[1], _groups(layer))
    if law.kind == "scale":
        return x * (sign * _spread_over_blocks(case.factors(shape), x))
    return x + _spread_over_blocks(case.shifts(shape), x)


def _change_rows(first: torch.nn.Module, law: Invariance, case: Case, layer: torch.nn.Module, sign: int) -> None:
    weight, bias = first.weight, first.bias
    assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
    _, blocks = _block_shape(law.per, 1, case.channels, _groups(layer))
    repeat = case.channels // blocks
    if law.kind == "scale":
        rows = sign * case.factors((blocks,)).repeat_interleave(repeat)
        weight.mul_(rows.view(-1, *(1,) * (weight.dim() - 1)))
        bias.mul_(rows)
    else:
        added = case.shifts((blocks, *weight.shape[1:])).repeat_interleave(repeat, 0)
        weight.add_(0.3 * added)
        bias.add_(case.shifts((blocks,), salt=3).repeat_interleave(repeat))
