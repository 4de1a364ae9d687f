"""`Surgery`: the new model, what was done to which layer, the proof, and the way back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normgauge.network import copy_model, exchange
from normgauge.records import Chart, Reading
from normgauge.results import Result

_REGISTERED = ("_parameters", "_buffers", "_modules")
EXACT = 1e-10  # largest relative difference, in float64, of what calls itself exact: rounding through deep networks


@dataclass(frozen=True)
class Surgery(Result):
    """What an operation on a model left behind; the user's model is touched only with `inplace=True`.

    Attributes:
        model: the new model.
        rows: one row per layer: what was done, or why nothing was.
        proof: largest relative difference of outputs from what the operation promises, in float64, over the modes in
            which it is exact, on the example and on fresh inputs; without the eps of normalizers where they matter.
        change: largest relative difference of the new model's outputs, in its own precision, from those before in
            float64.
        original: the model as it came; a copy of it after `inplace=True`.
        note: what else a person needs before using it.
        operation: its name.
        refused: layers left alone, by name, with the reason.
        proofs: one row per mode, precision and kind of inputs.
        exact: whether the operation promises equal outputs; otherwise `change` is what it did.
        inplace: whether `model` is the user's own.
    """

    model: nn.Module
    rows: tuple[dict[str, Any], ...]
    proof: float
    change: float
    original: nn.Module
    note: str = ""
    operation: str = "surgery"
    refused: tuple[tuple[str, str], ...] | list[tuple[str, str]] = ()
    proofs: tuple[dict[str, Any], ...] = ()
    exact: bool = True
    inplace: bool = False

    def undo(self) -> nn.Module:
        """Return a copy of the model as it came; after `inplace=True` the user's own model, put back."""
        original = copy_model(self.original)
        return transplant(original, self.model) if self.inplace else original

    def chart(self) -> Chart:
        """Return bars: channels before and after where some were taken away, else the proofs (`lab` extra)."""
        from normgauge.charts import bars

        channels = [
            {"normalizer": row["normalizer"], "state": state, "channels": row[column]}
            for row in self.rows
            for state, column in (("before", "channels"), ("after", "kept"))
            if row.get(column) is not None
        ]
        if channels:
            return bars(channels, x="normalizer", y="channels", series="state")
        rows = [{"inputs": f"{p['inputs']}, {p['mode']}", **p} for p in self.proofs]
        return bars(rows, x="inputs", y="difference", series="precision")

    def _title(self) -> str:
        return f"Surgery ({self.operation}): what was done to each layer"

    def _rows(self) -> list[dict[str, Any]]:
        outputs = [{"normalizer": "(outputs)", "what": "compared", **row} for row in self.proofs]
        return [dict(row) for row in self.rows] + outputs

    def readings(self) -> tuple[Reading, ...]:
        """Return the proof and the change of the outputs."""
        return Reading("proof", self.proof), Reading("change of the outputs", self.change)

    def _meaning(self) -> str:
        done = sum("left alone" not in str(row.get("what", "")) for row in self.rows)
        own = self.proofs[-1]["precision"] if self.proofs else "its own precision"
        told = f"in {own} the outputs differ by {self.change:.3g} of their size from the float64 ones before"
        left = f"; {len(self.refused)} left alone, see .refused" if self.refused else ""
        if not done:
            return f"Nothing was done: 0 layers changed{left}."
        if not self.exact:
            return f"{done} layers changed, and the function with them: {told}{left}."
        if self.proof <= EXACT:
            bare = " without eps" if any(row.get("eps") == "left out" for row in self.proofs) else ""
            return f"{done} layers changed; equal up to {self.proof:.2g}{bare} (limit {EXACT:g}); {told}{left}."
        return f"The new model is {self.proof:.2g} from what was promised (limit {EXACT:g}): do not use it; {told}."

    def _notes(self) -> str:
        return self.note


@torch.no_grad()
def transplant(source: nn.Module, target: nn.Module) -> nn.Module:
    """Give `target` the structure and values of `source` and return it; `source` must not be used afterwards."""
    _copy_own(source, target)
    own = dict(target.named_modules())
    for name, module in list(source.named_modules(remove_duplicate=False)):
        there = own.get(name)
        if not name or any(name.startswith(f"{taken}.") for taken in own if own[taken] is None):
            continue
        akin = there is not None and (isinstance(module, type(there)) or isinstance(there, type(module)))
        if there is None or not akin:
            exchange(target, name, module)
            own[name] = None
        else:
            _copy_own(module, there)
            exchange(target, name, there)
    ties = {id(value): name for name, value in source.named_parameters()}
    for name, value in source.named_parameters(remove_duplicate=False):
        if ties[id(value)] != name:
            parent, _, child = name.rpartition(".")
            target.get_submodule(parent)._parameters[child] = target.get_parameter(ties[id(value)])
    return target


def _copy_own(source: nn.Module, target: nn.Module) -> None:
    """Copy what a module has besides its children; a parameter of the same shape stays the same object."""
    attributes = {name: value for name, value in vars(source).items() if name not in _REGISTERED}
    for name in [name for name in vars(target) if name not in _REGISTERED and name not in attributes]:
        del target.__dict__[name]
    target.__dict__.update(attributes)
    target.__class__ = source.__class__
    for kind in ("_parameters", "_buffers"):
        there, new = getattr(target, kind), getattr(source, kind)
        for name in [name for name in there if name not in new]:
            del there[name]
        for name, value in new.items():
            old = there.get(name)
            if old is not None and value is not None and old.shape == value.shape and old.dtype == value.dtype:
                old.data.copy_(value)
                old.requires_grad_(value.requires_grad)
            else:
                there[name] = value
    for name in [name for name in target._modules if name not in source._modules]:
        del target._modules[name]
