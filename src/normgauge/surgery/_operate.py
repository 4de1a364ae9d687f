"""One way to operate: a copy in float64 is changed, compared with what it was, refused or brought back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from itertools import product
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, ModelError
from normgauge.network import Graph, KeepDouble, Network, Recorder, copy_model, double, is_leaf, replaced, without_eps
from normgauge.objective import Mode, call_model, call_purely, copy_batch, tensors, untouched
from normgauge.results import spend
from normgauge.rng import generator
from normgauge.surgery._surgery import EXACT, Surgery, transplant

Forward = Callable[[nn.Module, Any], Any]


class Options(TypedDict, total=False):
    """What operations take: `forward(model, inputs)` for unusual calls; `inplace`, to change the model itself."""

    forward: Forward | None
    inplace: bool


Where = str | Iterable[str] | Callable[[str, nn.Module], bool] | None


class RefusedError(ModelError):
    """Nothing can be promised of the whole, so nothing is done; the names and reasons are its arguments."""

    def __init__(self, *reasons: tuple[str, str]) -> None:
        Exception.__init__(self, *reasons)


class _OuterRecorder(Recorder):
    """Records who asks for values between the steps only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; forget that it asked for values inside of a step."""
        asked = len(self.steered)
        result = super().__torch_function__(func, types, args, kwargs)
        if any(leaf for leaf, _ in self._open):
            del self.steered[asked:]
        return result


class Patient:
    """The copy an operation changes: float64, read once, with a diary of what was done and what was not."""

    def __init__(self, model: nn.Module, example: Any, forward: Forward, mode: Mode) -> None:
        self.model, self.inputs, self.forward = copy_model(model).double(), double(example), forward
        self.rows: list[dict[str, Any]] = []
        self.refused: list[tuple[str, str]] = []
        self.first: list[Tensor] = []  # the outputs of the pass that reads the network

        def called(model: nn.Module, inputs: Any) -> Any:
            with KeepDouble():
                outputs = forward(model, inputs)
            self.first = self.first or [tensor.detach().clone() for tensor in tensors(outputs)]
            return outputs

        self.network = Network(self.model, self.inputs, forward=called, mode=mode)
        spend("forwards")
        try:
            with torch.no_grad():
                self.network.record()
        except (RuntimeError, TypeError, ValueError) as error:
            rule = "the model must run on the example, also in float64, in which results are proved"
            step = "Check the example; choose kernels that know float64 (Hugging Face: experts_implementation='eager')"
            raise ModelError("surgery", rule, f"{type(error).__name__}: {error}", step) from error

    @property
    def graph(self) -> Graph:
        """The steps, which must hold for all inputs; ask before anything is changed."""
        with torch.no_grad():
            graph = self.network.graph
        if graph.steered:
            graph = self._outer_steps()
        if graph.steered:
            raise RefusedError(("(model)", f"a trace of one input must hold for all: {graph.why}"))
        return graph

    def _outer_steps(self) -> Graph:
        """Return the steps with mixtures of experts as one each: what asks for values inside steers no other step."""

        def is_step(module: nn.Module) -> bool:
            return is_leaf(module) or any(value.ndim > 2 for value in module.parameters(recurse=False))

        def body(model: nn.Module) -> Graph:
            recorder = _OuterRecorder(model, self.inputs, is_step)
            with recorder.recording(), KeepDouble():
                return recorder.graph(self.forward(model, self.inputs))

        spend("forwards")
        with torch.no_grad(), untouched(self.model, self.network.mode, 0) as aliases:
            return replace(call_purely(self.model, {}, body, aliases=aliases), why=self.network.graph.why)

    def refuse(self, name: str, reason: str) -> None:
        """Note a layer that is left alone."""
        self.refused.append((name, reason))
        self.rows.append({"normalizer": name, "what": f"left alone: {reason}"})

    def did(self, name: str, what: str, **more: Any) -> None:
        """Note what was done to a layer."""
        self.rows.append({"normalizer": name, "what": what, **more})


def operate(
    operation: str,
    model: nn.Module,
    example: Any,
    edit: Callable[[Patient], str | None],
    *,
    modes: tuple[Mode, ...] = ("eval",),
    forward: Forward | None = None,
    inplace: bool = False,
    exact: bool = True,
    eps_apart: bool = False,
) -> Surgery:
    """Run `edit` on a float64 copy of a model, prove it, and return the result in the model's own precision.

    Where `exact` is promised and the outputs moved by more than 1e-10, everything is refused and the model given back
    as it came. `eps_apart`: the promise is for normalizers without eps; what eps does is a row of its own.
    """
    forward = forward or call_model
    original = copy_model(model) if inplace else model
    patient = Patient(model, example, forward, modes[0])
    sets = {"example": patient.inputs, "fresh": fresh_inputs(patient.inputs)}
    before = {(modes[0], "example", False): patient.first}
    for mode, kind, bare in product(modes, sets, (False, True) if eps_apart else (False,)):
        if (mode, kind, bare) not in before:
            try:
                before[mode, kind, bare] = run(patient.model, sets[kind], forward, mode, bare=bare)
            except ValueError:  # torch refuses statistics of one value: this mode is not there for the example
                if mode == modes[0]:
                    raise
    with torch.no_grad():
        try:
            note = edit(patient) or ""
        except RefusedError as error:
            note, patient.rows, patient.refused = "", [], []
            for name, reason in error.args:
                patient.refuse(name, reason)
    unfuse(patient.model)

    def finish(proofs: list[dict[str, Any]]) -> Surgery:
        patient.model = patient.model if proofs else copy_model(model)
        patient.model.train(model.training)
        own = dict(patient.model.named_modules())
        for name, module in model.named_modules():  # flags of single modules, as they were
            if name in own:
                own[name].training = module.training
        judged = [row["difference"] for row in proofs[:-1] if row.get("eps") != "as it is"]  # the last: own precision
        return Surgery(
            model=transplant(patient.model, model) if inplace else patient.model,
            rows=tuple(patient.rows),
            proof=max(judged, default=0.0),
            change=proofs[-1]["difference"] if proofs else 0.0,
            original=original,
            note=note,
            operation=operation,
            refused=patient.refused,
            proofs=tuple(proofs),
            exact=exact,
            inplace=inplace,
            mode=proofs[0]["mode"] if proofs else "",
        )

    if not any("left alone" not in row["what"] for row in patient.rows):
        return finish([])
    proofs: list[dict[str, Any]] = []
    for (mode, kind, bare), outputs in before.items():
        difference = relative_difference(outputs, run(patient.model, sets[kind], forward, mode, bare=bare))
        row = {"mode": mode, "precision": "float64", "inputs": kind, "difference": difference}
        proofs.append({**row, "eps": "left out" if bare else "as it is"} if eps_apart else row)
    moved = max(row["difference"] for row in proofs if row.get("eps") != "as it is")
    reason = "" if not exact or moved <= EXACT else f"the outputs would move by {moved:.2g} of their size, in float64"
    narrow(patient.model, model)
    mode, kind = modes[0], "fresh" if exact else "example"
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs, wide = _as_given(sets[kind], example), before[mode, kind, False]
    change = relative_difference(wide, run(patient.model, inputs, forward, mode, wide=False)) if not reason else 0.0
    if exact and not eps_apart and not change <= torch.finfo(dtype).eps ** 0.5:  # other kernels may do other things
        reason = f"in {dtype} the outputs would be {change:.2g} of their size from the float64 ones: no rounding"
    if reason:
        done = [row["normalizer"] for row in patient.rows if "left alone" not in row["what"]]
        patient.rows = [row for row in patient.rows if "left alone" in row["what"]]
        for name in done:
            patient.refuse(name, reason)
        return finish([])
    own = str(dtype).removeprefix("torch.")
    proofs.append({"mode": mode, "precision": own, "inputs": kind, "difference": change})
    return finish(proofs)


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Remove hooks on exit."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def has_statistics(module: nn.Module) -> bool:
    """Tell whether a normalizer keeps statistics of what it has seen."""
    return all(isinstance(getattr(module, name, None), Tensor) for name in ("running_mean", "running_var"))


def store_statistics(module: Any, mean: Tensor, variance: Tensor) -> None:
    """Write other running statistics into a normalizer's buffers."""
    module.running_mean.copy_(mean)
    module.running_var.copy_(variance)


def unfuse(model: nn.Module) -> None:
    """Keep torch's encoder layers from their fused kernel, which takes whatever stands there for a LayerNorm."""
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and {type(layer.norm1), type(layer.norm2)} != {nn.LayerNorm}:
            layer.activation_relu_or_gelu = 0


def run(
    model: nn.Module, inputs: Any, forward: Forward, mode: Mode, *, wide: bool = True, bare: bool = False
) -> list[Tensor]:
    """Return the outputs on a copy of the state: in float64 that stays there, and without eps, if asked for."""
    spend("forwards")
    with (
        torch.no_grad(),
        untouched(model, mode, 0) as aliases,
        KeepDouble() if wide else nullcontext(),
        without_eps(model) if bare else nullcontext(),
    ):
        outputs = call_purely(model, {}, lambda twin: forward(twin, copy_batch(inputs)), aliases=aliases)
        return [tensor.detach().clone() for tensor in tensors(outputs)]


def relative_difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest |a - b| over the largest |a|, over tensors; infinite where shapes or holes differ."""
    if len(first) != len(second) or any(a.shape != b.shape for a, b in zip(first, second, strict=False)):
        return float("inf")
    worst = 0.0
    for a, b in ((a.double(), b.double()) for a, b in zip(first, second, strict=True) if a.numel()):
        finite = a.isfinite() & b.isfinite()
        if not torch.equal(torch.where(finite, 0.0, a).nan_to_num(7), torch.where(finite, 0.0, b).nan_to_num(7)):
            return float("inf")
        if finite.any() and (gap := float((a - b)[finite].abs().max())):
            worst = max(worst, gap / size if (size := float(a[finite].abs().max())) else float("inf"))
    return worst


def fresh_inputs(example: Any, seed: int = 1) -> Any:
    """Return other inputs of the same shapes: Gaussian at the example's mean and deviation, integers in its range.

    Booleans stay, and where there are several tensors those of zeros and ones and infinities too: they are masks.
    """
    source, several = generator(seed), len(list(tensors(example))) > 1

    def draw(tensor: Tensor) -> Tensor:
        binary = several and bool(((tensor == 0) | (tensor == 1)).all())
        if tensor.dtype == torch.bool or binary or not tensor.numel() or not bool(tensor.double().isfinite().all()):
            return tensor
        if not tensor.is_floating_point():
            low, high = int(tensor.min()), int(tensor.max())
            return torch.randint(low, high + 1, tensor.shape, generator=source).to(tensor)
        spread = float(tensor.double().std(correction=0)) or 1.0
        noise = torch.randn(tensor.shape, generator=source, dtype=torch.float64)
        return (float(tensor.double().mean()) + spread * noise).to(tensor)

    return replaced(example, Tensor, draw)


def _as_given(wide: Any, example: Any) -> Any:
    """Return float64 inputs in the types of the example."""
    types = [tensor.dtype for tensor in tensors(example)]
    return replaced(wide, Tensor, lambda tensor: tensor.to(types.pop(0)))


def narrow(model: nn.Module, original: nn.Module) -> None:
    """Bring parameters and buffers back to the types they had; new ones to that of the first floating parameter."""
    types = {name: value.dtype for name, value in (*original.named_parameters(), *original.named_buffers())}
    usual = next((value.dtype for value in original.parameters() if value.is_floating_point()), torch.float32)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point():
            value.data = value.data.to(types.get(name, usual))


def is_selected(where: Where, name: str, module: nn.Module) -> bool:
    """Tell whether a glob, names or globs, or a predicate of (name, module) select a module; `None` selects all."""
    if where is None or callable(where):
        return where is None or bool(where(name, module))
    return any(fnmatch(name, glob) for glob in ([where] if isinstance(where, str) else where))


def require_selection(operation: str, where: Where, model: nn.Module, taken: Iterable[str]) -> None:
    """Raise where a selection was given and nothing answers to it."""
    if where is not None and not list(taken):
        names = ", ".join(name for name, _ in list(model.named_modules())[1:6])
        rule = "where selects modules by glob, names or predicate(name, module)"
        raise InputError(operation, rule, f"{where!r}, which selects nothing", f"Modules are: {names}, ...")
