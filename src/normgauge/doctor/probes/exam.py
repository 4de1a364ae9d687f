"""`Exam`: one model examined: every probe is made when a check first asks for it, and shared by all."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normgauge.doctor.probes.identity import NormIdentity, identify_call
from normgauge.doctor.probes.passes import NormCall, Pass, Watcher, candidates, is_normalizer
from normgauge.network import copy_model, first_tensor, replaced
from normgauge.objective import Mode, Objective, call_model, call_purely, copy_batch, guess_loss, tensors, untouched
from normgauge.results import spend
from normgauge.rng import preserved_rng
from normgauge.surgery import recalibrate_norms

BatchNorm = nn.modules.batchnorm._BatchNorm
NormBase = nn.modules.batchnorm._NormBase
Affine = (nn.Linear, nn.modules.conv._ConvNd)
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)


@dataclass
class Patient:
    """A model and how it is called."""

    model: nn.Module  # without wrappers
    wrapper: nn.Module  # what it came in, where it came wrapped
    batch: Any  # inputs, or inputs and targets
    outputs_and_loss: Callable[[nn.Module, Any], tuple[Any, Tensor]]
    real: bool = True  # whether the batch is real data
    targets: bool = False
    values: Mapping[str, Tensor] = field(default_factory=dict)  # parameters at other values than the model's


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside of `DistributedDataParallel`, `DataParallel` and `torch.compile`."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, wrappers) else model._orig_mod  # type: ignore[assignment]
    return model


def patient_of(subject: Objective | nn.Module, batch: Any, *, real: bool) -> Patient:
    """Return how an objective, or a model on a batch, is called."""
    if isinstance(subject, Objective):
        objective, known = subject, subject.loss_function is not None

        def evaluate(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
            if known:
                return objective.outputs_and_loss_of(model, 0, batch)
            terms = objective.terms_of(model, 0, batch)
            return terms, torch.stack(list(terms.values())).sum()

        first, model = next(iter(objective.batches()))[1], unwrap(objective.model)
        values = objective.parameters if model is objective.model else {}  # wrappers put a word before the names
        return Patient(model, objective.model, first, evaluate, real=real, targets=known, values=values)
    model = unwrap(subject)
    inputs, targets = _split(model, batch)

    def call_and_score(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
        spend("forwards")
        outputs = call_model(model, copy_batch(batch[0]))
        return outputs, guess_loss(outputs, batch[1])

    return Patient(model, subject, (inputs, targets), call_and_score, real, targets is not None)


def _split(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets: a pair whose first half alone the model accepts is both, anything else inputs."""
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        return batch, None
    try:
        with torch.no_grad(), untouched(model, "eval", 0) as aliases:
            spend("forwards")
            call_purely(model, {}, lambda m: call_model(m, copy_batch(batch[0])), aliases=aliases)
    except _REFUSALS:
        return tuple(batch), None
    return batch[0], batch[1]


@dataclass
class Exam:
    """One model under examination: the patient, what trains it where given, and probes made when first asked for."""

    patient: Patient
    optimizer: Optimizer | None = None
    loader: Any = None
    quick: bool = False  # whether to leave out what costs more than a few gradients
    notes: list[str] = field(default_factory=list)  # what could not be looked at, and why

    def __post_init__(self) -> None:
        self.training = {name: module.training for name, module in self.model.named_modules()}
        self._identities: dict[Any, NormIdentity] = {}

    @property
    def model(self) -> nn.Module:
        """The model without wrappers."""
        return self.patient.model

    @cached_property
    def modules(self) -> dict[str, Any]:
        """All modules by name."""
        return {name or "(model)": module for name, module in self.model.named_modules()}

    @cached_property
    def train(self) -> Pass | None:
        """In train mode, with gradients; `None` where the model refuses, which `notes` says."""
        return self._try("train", lambda: self._pass("train", gradients=True))

    @cached_property
    def eval(self) -> Pass | None:
        """In eval mode."""
        return self._try("eval", lambda: self._pass("eval"))

    @cached_property
    def quiet(self) -> Pass | None:
        """In train mode with dropout off."""
        return self._try("train", lambda: self._pass("train", quiet=True))

    def rows(self, mode: Mode, axis: int = 0) -> tuple[float, float]:
        """Return how the first sample's outputs change when it comes with half of the others, and rounding's share.

        Both relative to the outputs' size; nan where outputs have no rows. Samples lie on the first axis, or on `axis`.
        """
        whole, first = self.eval if mode == "eval" else self.train, next(tensors(self.patient.batch), None)
        size = first.shape[axis] if first is not None and first.ndim > axis else 0
        if whole is None or size < (2 if axis else 4):
            return math.nan, math.nan
        half = self._try(mode, lambda: self._pass(mode, batch=self.part(self.patient.batch, size, axis)))
        outputs = [None if p is None else first_tensor(p.outputs) for p in (whole, half)]
        sizes = [0 if out is None or out.ndim <= axis else out.shape[axis] for out in outputs]
        if sizes != [size, size // 2]:
            return math.nan, math.nan
        a, b = (out.select(axis, 0).detach().double() for out in outputs if out is not None)
        last = whole.records[-1].made if whole.records else None
        eps = torch.finfo(last.dtype).eps if last is not None and last.is_floating_point() else 1e-7
        return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)), 1e3 * eps

    @cached_property
    def sequence_first(self) -> bool:
        """Whether axis 0 is time: a layer says `batch_first=False`, and no sample sees the others along axis 1."""
        told = any(getattr(module, "batch_first", True) is False for module in self.model.modules())
        gap, rounding = self.rows("eval", axis=1) if told else (0.0, 0.0)
        return told and not gap > max(1e-3, rounding)

    @cached_property
    def samples(self) -> int:
        """Samples in the batch: the first axis of its first tensor."""
        first = next(tensors(self.patient.batch), None)
        return 0 if first is None or not first.ndim else len(first)

    def part(self, batch: Any, size: int, axis: int) -> Any:
        """Return the first half of the `size` samples of a batch."""
        fits = lambda t: t.ndim > axis and t.shape[axis] == size  # noqa: E731
        return replaced(batch, Tensor, lambda t: t.narrow(axis, 0, size // 2) if fits(t) else t)

    def _try(self, mode: str, run: Callable[[], Pass]) -> Pass | None:
        try:
            return run()
        except _REFUSALS as error:
            self.notes.append(f"{mode} mode raises {type(error).__name__}: {error}".partition("\n")[0])
            return None

    def _pass(self, mode: Mode, *, gradients: bool = False, quiet: bool = False, batch: Any = None) -> Pass:
        batch = self.patient.batch if batch is None else batch
        own = {**{n: p.detach() for n, p in self.model.named_parameters()}, **self.patient.values}
        # also frozen ones: whether a bias is dead does not depend on who trains it
        leaves = {n: v.clone().requires_grad_(v.is_floating_point()) for n, v in own.items()} if gradients else own

        def body(model: nn.Module) -> Pass:
            for module in model.modules():
                if quiet and isinstance(module, nn.modules.dropout._DropoutNd):
                    module.eval()
            with Watcher(model).watching() as found:
                found.outputs, loss = self.patient.outputs_and_loss(model, batch)
            found.loss = float(loss.detach())
            if not math.isfinite(found.loss):
                self.notes.append(f"the loss is {found.loss} in {mode} mode, and so is what follows from it")
            self._add_custom_norms(found)
            if gradients and loss.requires_grad:
                _differentiate(found, loss, leaves)
            return found

        with torch.set_grad_enabled(gradients), untouched(self.model, mode, 0) as aliases:
            return call_purely(self.model, leaves, body, aliases=aliases)

    def _add_custom_norms(self, found: Pass) -> None:
        for record in candidates(found):
            if is_normalizer(record.module, record.given.shape, record.given.dtype):  # type: ignore[union-attr]
                names = tuple(f"{record.name}.{key}" for key, _ in record.module.named_parameters(recurse=False))
                for call in found.calls(record.name):
                    x, y = call.given, call.made
                    made = NormCall(call.name, "custom", call.module, x.detach(), y.detach(), x.shape[-1])  # type: ignore[union-attr]
                    made.parameters, made.producer, made.number = names, call.producer, call.number
                    found.norms.append(made)
        found.norms.sort(key=lambda call: call.number)

    @cached_property
    def step(self) -> dict[str, tuple[int, int]]:
        """BatchNorm -> its calls in a forward, and how often a whole step updated it: on a copy, checkpoints kept."""
        trackers = [n for n, m in self.batch_norms() if m.num_batches_tracked is not None]
        if not trackers or self.train is None:
            return {}
        twin = copy_model(self.model).train()
        layers = {n: twin.get_submodule("" if n == "(model)" else n) for n in trackers}
        before = {n: int(layer.num_batches_tracked) for n, layer in layers.items()}  # type: ignore[arg-type]
        with preserved_rng(), torch.enable_grad():
            _, loss = self.patient.outputs_and_loss(twin, self.patient.batch)
            if loss.requires_grad:
                loss.backward()
                spend("forwards", -1)
                spend("gradients")
        after = {n: int(layer.num_batches_tracked) for n, layer in layers.items()}  # type: ignore[arg-type]
        return {n: (len(self.train.calls(n)), after[n] - before[n]) for n in trackers}

    @property
    def recalibration(self) -> Callable[[nn.Module], Any] | None:
        """The repair that measures stored statistics anew, where there is a loader."""
        return None if self.loader is None else lambda model: recalibrate_norms(model, self.loader, inplace=True)

    @property
    def operation(self) -> dict[str, Any]:
        """What operations of `surgery` on a copy of this model are told."""
        call = self.patient.outputs_and_loss
        return {"example": self.patient.batch, "forward": lambda model, batch: call(model, batch)[0], "inplace": True}

    @cached_property
    def norms(self) -> list[NormCall]:
        """Calls of normalizers in train mode, or in eval mode where train mode is refused."""
        found = self.train or self.eval
        return [] if found is None else found.norms

    def batch_norms(self) -> Iterator[tuple[str, Any]]:
        """Yield modules of torch's BatchNorm family."""
        return ((name, module) for name, module in self.modules.items() if isinstance(module, BatchNorm))

    @cached_property
    def gains(self) -> dict[str, NormCall]:
        """Parameters of normalizers, by behaviour: parameter -> the first call that uses it."""
        table: dict[str, NormCall] = {}
        for call in self.norms:
            for name in call.parameters:
                table.setdefault(name, call)
        return table

    def identity(self, call: NormCall) -> NormIdentity:
        """Return what a call's module computes; modules of one class with equal settings are asked once."""
        module = call.module
        if module is None or call.x.numel() < 2:
            return NormIdentity(sentence="a function, or too few values", status="skipped")
        settings = sorted((k, v) for k, v in vars(module).items() if isinstance(v, (int, float)))
        key = (type(module), call.x.shape[-1], str(settings))
        if key not in self._identities:
            self._identities[key] = identify_call(module, call.x)
        return self._identities[key]

    @cached_property
    def groups(self) -> dict[str, dict[str, Any]]:
        """Parameter -> its group in the optimizer."""
        names = {id(value): name for name, value in self.model.named_parameters()}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {names[id(p)]: group for group in groups for p in group["params"] if id(p) in names}

    @cached_property
    def invariant(self) -> list[str]:
        """Weights whose length does not matter: a norm over samples reads what they make, and <w, gradient> is 0."""
        if self.train is None:
            return []
        names, values = [], {n: p.detach() for n, p in self.model.named_parameters()}
        for maker in dict.fromkeys(c.producer for c in self.train.norms if c.kind in ("batch", "instance") and c.own):
            weight, slope = values.get(f"{maker}.weight"), self.train.gradients.get(f"{maker}.weight")
            if maker and weight is not None and slope is not None and isinstance(self.modules[maker], Affine):
                along = float((weight * slope).sum().abs() / (weight.norm() * slope.norm()).clamp_min(1e-30))
                names += [f"{maker}.weight"] if along < 1e-2 else []
        return names

    @cached_property
    def trained(self) -> bool:
        """Whether something shows that the model was trained: gains that differ, or counted batches."""
        parameters = dict(self.model.named_parameters())
        gains = [parameters[name].detach() for name in self.gains if name in parameters]
        counts = [m.num_batches_tracked for _, m in self.batch_norms() if m.num_batches_tracked is not None]
        return any(bool((v != v.flatten()[0]).any()) for v in gains) or any(int(count) > 0 for count in counts)


def _differentiate(found: Pass, loss: Tensor, leaves: Mapping[str, Tensor]) -> None:
    affine = [r for r in found.records if isinstance(r.module, Affine) and r.made is not None and r.made.requires_grad]
    leaves = {name: value for name, value in leaves.items() if value.requires_grad}
    wanted = [*leaves.values(), *(record.made for record in affine)]
    slopes = torch.autograd.grad(loss, wanted, allow_unused=True)  # type: ignore[arg-type]
    spend("forwards", -1)
    spend("gradients")
    found.gradients = {n: g.detach() for n, g in zip(leaves, slopes, strict=False) if g is not None}
    behind = slopes[len(leaves) :]
    found.slopes = [(r.name, g.detach()) for r, g in zip(affine, behind, strict=True) if g is not None]
