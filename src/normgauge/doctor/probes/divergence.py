"""Two implementations side by side: the first place where they part, by how much, and why."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.doctor.probes.exam import Patient, unwrap
from normgauge.doctor.probes.identity import FACTOR, identify_call
from normgauge.doctor.probes.passes import is_normalizer
from normgauge.errors import ModelError
from normgauge.network import KeepDouble, ModuleCall, first_tensor, replaced, role_of, watched
from normgauge.objective import call_purely, tensors, untouched

ROUNDING = 1e-9  # relative, of float64 through a network; other formulas are far above
COARSE = 200.0  # times the precision of the type: what another order of operations gives stays below


@dataclass(frozen=True)
class Divergence:
    """Where two models part.

    Attributes:
        where: the first module whose output differs though what it reads agrees, or which the other does not call.
        cause: "eps", "1+w", "QK-norm per head or full", "order with RoPE", "skipped norm", "stale statistics",
            "precision", "row dependence", "kind of norm", "constant factor", "gain or bias", "weights", "other".
        size: relative difference there.
        sentence: all of it in words.
    """

    where: str
    cause: str
    size: float
    sentence: str


Call = ModuleCall
Apart = tuple[Call, Call | None, float, int]


def first_divergence(patient: Patient, other: nn.Module) -> Divergence | None:
    """Return where two models in eval mode part on the patient's batch; `None` where they agree.

    First both run in float64, which no forward can narrow: what differs there is another function. Where nothing does,
    both run as they are: what differs then is precision. Calls are paired by name, else by what they read.
    """
    one, two = patient.model, unwrap(other)
    try:
        a, b = (_trace(model, patient, double=True) for model in (one, two))
        apart = _compare(a, b, ROUNDING)
    except (RuntimeError, TypeError, ValueError, IndexError):  # it cannot run in float64
        a, b, apart = [], [], None
    if apart is not None:
        return _explained(a, b, apart, patient, two)
    a, b = (_trace(model, patient, double=False) for model in (one, two))
    kinds = [t.dtype for call in (*a, *b) if (t := call.made) is not None and t.is_floating_point()]
    coarse = max(torch.finfo(kind).eps for kind in kinds) if all(k == kinds[0] for k in kinds) else 2.0**-23
    apart = _compare(a, b, COARSE * min(coarse, 2.0**-7))
    if apart is None:
        return None
    place, size = apart[0], apart[2]
    said = f"{place.name}: in float64 the two agree to {ROUNDING:g}, as they are they differ by {size:.2g} of the size"
    return Divergence(place.name, "precision", size, f"{said}: one of them computes more coarsely.")


def _trace(model: nn.Module, patient: Patient, *, double: bool) -> list[Call]:
    """Return all calls of submodules in the order they end, inputs cloned before anything overwrites them."""
    batch = replaced(patient.batch, Tensor, lambda t: t.double() if double and t.is_floating_point() else t)
    calls: list[Call] = []
    given: list[Any] = []

    def leave(call: Call) -> None:
        args, kwargs = given.pop()
        calls.append(ModuleCall(call.name, call.module, args, kwargs, _cloned(call.output), call.leaf))

    def body(twin: nn.Module) -> Any:
        enter = lambda call: given.append(_cloned((call.args, call.kwargs)))  # noqa: E731
        with watched(twin, leave, enter), KeepDouble() if double else nullcontext():
            return patient.outputs_and_loss(twin, batch)[0]

    try:
        with torch.no_grad(), untouched(model, "eval", 0) as aliases:
            out = call_purely(model, {}, body, torch.float64 if double else None, aliases=aliases)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if double:
            raise
        step = "Give both the inputs they share"
        raise ModelError("checkup against", "both models take the batch", str(error), step) from error
    return [*calls, ModuleCall("(output)", model, (), {}, _cloned(out))]


def _cloned(tree: Any) -> Any:
    """Return the tensors of a tree, cloned; whatever holds them is not kept."""
    if isinstance(tree, tuple) and len(tree) == 2 and isinstance(tree[1], dict):
        return _cloned(tree[0]), {k: v.detach().clone() for k, v in tree[1].items() if isinstance(v, Tensor)}
    return tuple(t.detach().clone() for t in tensors(tree))


def _gap(a: Tensor | None, b: Tensor | None) -> float:
    """Return the largest difference relative to the size; infinite where shapes or kinds differ."""
    if a is None or b is None or a.numel() != b.numel():
        return 0.0 if a is None and b is None else float("inf")
    a, b = a.detach().double().flatten(), b.detach().double().flatten()
    if not a.numel() or torch.equal(a, b):
        return 0.0
    gap = float((a - b).abs().max() / torch.maximum(a.abs().max(), b.abs().max()))
    return gap if gap == gap else float("inf")


def _compare(a: Sequence[Call], b: Sequence[Call], tol: float) -> Apart | None:
    """Return the first call of `a` whose output differs from its partner's, the partner, the gap and its number."""
    if _gap(a[-1].made, b[-1].made) <= tol:
        return None
    by_name: dict[str, list[Call]] = defaultdict(list)
    for call in b:
        by_name[call.name].append(call)
    seen: dict[str, int] = defaultdict(int)
    unpaired: Apart | None = None
    for number, call in enumerate(a):
        place, seen[call.name] = seen[call.name], seen[call.name] + 1
        named = by_name.get(call.name, [])
        partner = named[place] if place < len(named) else None
        if partner is None:  # another name: a call that reads the same, or gives the same
            found = any(_gap(other.made, call.made) <= tol for other in b)
            if unpaired is None and not found and call.leaf and _normalizes(call):
                unpaired = (call, None, 1.0, number)
            continue
        gap = _gap(call.made, partner.made)
        if gap > tol:
            return unpaired if unpaired is not None else (call, partner, gap, number)
    return unpaired


def _normalizes(call: Call) -> bool:
    given, made = call.given, call.made
    if role_of(call.module) == "normalizer":
        return True
    if not call.leaf or given is None or made is None or given.shape != made.shape or given.ndim < 2:
        return False
    dtype = next((p.dtype for p in call.module.parameters()), given.dtype)
    return bool(given.is_floating_point()) and is_normalizer(call.module, given.shape, dtype)


def _explained(a: Sequence[Call], b: Sequence[Call], apart: Apart, patient: Patient, other: nn.Module) -> Divergence:
    call, partner, size, number = apart
    cause, why = _cause(a, b, call, partner, number)
    where = call.name
    if cause == "other":
        extra = _extra_norm(a, b)
        if extra is not None:
            cause, why, where = "skipped norm", "only one of the two calls it", extra.name
        elif _depends_on_rows(patient, other) and not _depends_on_rows(patient, patient.model):
            cause, why = "row dependence", "a row's output changes with the rest of the batch in the second model only"
    if cause == "skipped norm" and partner is None:
        size = _gap(call.given, call.made)
    size = size if size != float("inf") else 1.0
    return Divergence(where, cause, size, f"{where}: outputs differ by {size:.2g} of their size: {cause} ({why}).")


def _extra_norm(a: Sequence[Call], b: Sequence[Call]) -> Call | None:
    names = [{call.name for call in calls} for calls in (b, a)]
    lone = (call for calls, others in zip((a, b), names, strict=True) for call in calls if call.name not in others)
    return next((call for call in lone if _normalizes(call)), None)


def _cause(a: Sequence[Call], b: Sequence[Call], call: Call, partner: Call | None, number: int) -> tuple[str, str]:
    if partner is None:
        return "skipped norm", "the second model does not call it"
    same_input = _gap(call.given, partner.given) <= 1e3 * ROUNDING
    norms = _normalizes(call), _normalizes(partner)
    if same_input and call.leaf:
        if any(norms) and not all(norms) and _gap(call.given, call.made) != _gap(partner.given, partner.made):
            return "skipped norm", "one of the two gives its input back"
        if all(norms):
            return _norm_cause(call, partner)
        one, two = call.module.state_dict(), partner.module.state_dict()
        changed = next((name for name in one if name not in two or _gap(one[name], two[name]) > ROUNDING), "")
        return ("weights", f"{changed} differs") if changed else ("other", "equal inputs, other outputs")
    if all(norms) and call.given is not None and partner.given is not None:
        rows = [t.double().flatten(0, -2).norm(dim=-1).sort().values for t in (call.given, partner.given)]
        if rows[0].shape == rows[1].shape and _gap(rows[0], rows[1]) < 1e-6:
            return "order with RoPE", "what the two read are rotations of each other, row by row"
        if call.given.numel() != partner.given.numel() or call.given.shape[-1] != partner.given.shape[-1]:
            return "QK-norm per head or full", f"rows of {call.given.shape[-1]} and of {partner.given.shape[-1]} values"
    if _extra_norm(a[: number + 1], b) is None and _order(a, call) != _order(b, partner):
        return "order of norms", "the same modules are called in another order"
    return "other", "what it reads differs already, by a function between modules"


def _order(calls: Sequence[Call], stop: Call) -> list[str]:
    return [call.name for call in takewhile(lambda call: call is not stop, calls) if call.leaf]


def _norm_cause(call: Call, partner: Call) -> tuple[str, str]:
    """Return what differs between two normalizers that read the same."""
    x, y = call.given, partner.given
    one, two = identify_call(call.module, x), identify_call(partner.module, y)
    names = ("running_mean", "running_var")
    stored = [[getattr(m, name, None) for name in names] for m in (call.module, partner.module)]
    if one.statistics != two.statistics and "batch" in (one.statistics, two.statistics):
        return "row dependence", f"statistics {one.statistics} and {two.statistics}"
    if all(isinstance(t, Tensor) for pair in stored for t in pair):
        gaps = [_gap(p, q) for p, q in zip(*stored, strict=True)]
        if max(gaps) > ROUNDING:
            return "stale statistics", f"running mean or variance differ by {max(gaps):.2g}"
    rows = [one.axes, two.axes] if x.shape == y.shape else [x.shape[-1], y.shape[-1]]  # type: ignore[union-attr]
    if "unknown" not in (one.kind, two.kind):
        if rows[0] != rows[1] or one.groups != two.groups:
            return "QK-norm per head or full", f"one row is {rows[0]} here and {rows[1]} there"
        if one.kind != two.kind:
            return "kind of norm", f"{one.kind} and {two.kind}"
        if abs(one.factor - two.factor) > FACTOR:
            return "constant factor", f"{one.factor:.6g} and {two.factor:.6g} times, as by an unbiased variance"
        if (one.eps, one.eps_place) != (two.eps, two.eps_place):
            return "eps", f"{one.eps:.3g} {one.eps_place} and {two.eps:.3g} {two.eps_place}"
        if one.gain != two.gain:
            return "1+w", f"gain stored as {one.gain} and as {two.gain}"
    for p, q in zip(call.module.parameters(), partner.module.parameters(), strict=False):
        if p.shape == q.shape and _gap(p, q) > ROUNDING:
            if float((p - q).detach().abs().sub(1).abs().max()) < 1e-6:
                return "1+w", "the gains differ by exactly one"
            return "gain or bias", f"its parameters differ by {_gap(p, q):.2g}"
    return "other", f"{one.kind} and {two.kind}"


def _depends_on_rows(patient: Patient, model: nn.Module) -> bool:
    """Tell whether the first row of the outputs changes when the other half of the batch is left out."""
    first = next(tensors(patient.batch))
    if len(first) < 2:
        return False
    half = replaced(patient.batch, Tensor, lambda t: t[: len(first) // 2] if t.ndim and len(t) == len(first) else t)
    outs = []
    for batch in (patient.batch, half):
        with torch.no_grad(), untouched(model, "eval", 0) as aliases:
            call = lambda m, b=batch: patient.outputs_and_loss(m, b)[0]  # noqa: E731
            outs.append(first_tensor(call_purely(model, {}, call, aliases=aliases)))
    return _gap(outs[0][0], outs[1][0]) > 1e-3  # type: ignore[index]
