"""`ng.layer_spectra`: the spectrum of each layer's, block's or tensor's own curvature."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from normgauge.errors import offer_partial, unknown_name
from normgauge.measure.curvature.products import Of
from normgauge.measure.curvature.spectrum import RATE, Spectrum, spectrum
from normgauge.network import owner_of
from normgauge.objective import Objective
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument

Per = Literal["layer", "block", "tensor"]
UNEVEN = 10.0  # a decade: rates are searched on grids of half a decade, and one rate cannot serve both ends
NOTHING = 1e6  # times less curvature than the sharpest block's, about what float32 resolves


@dataclass(frozen=True)
class LayerSpectra(Result):
    """The spectra of the diagonal blocks of a curvature matrix, by name.

    Args:
        spectra: one spectrum per block of variables.
        per: what a block is.
    """

    spectra: dict[str, Spectrum] = field(repr=False)
    per: str

    def __getitem__(self, name: str) -> Spectrum:
        """Return the spectrum of one block."""
        if name not in self.spectra:
            raise unknown_name("block of variables", name, self.spectra)
        return self.spectra[name]

    def readings(self) -> tuple[Reading, ...]:
        """Return the eigenvalues of every block, those of the sharpest first."""
        order = sorted(self.spectra, key=lambda name: -max(self[name].top, default=-math.inf))
        return tuple(replace(reading, layer=name) for name in order for reading in self[name].readings())

    def _meaning(self) -> str:
        tops = sorted((max(each.top), name) for name, each in self.spectra.items() if each.top)
        if not tops or tops[-1][0] <= 0:
            return f"No block of {len(self.spectra)} has upward curvature, so none limits the learning rate alone."
        (sharp, name), (low, mild) = tops[-1], tops[0]
        said = f"{name!r} is the sharpest of {len(tops)} blocks, {sharp:.4g}: it alone allows {RATE / sharp:.3g}."
        if low > 0 and sharp / low > UNEVEN:
            times = f"{sharp / low:.3g}" if sharp / low < NOTHING else f"over {NOTHING:g}"  # beyond it is rounding
            said += f" {mild!r} would allow {times} times that (over {UNEVEN:g}): consider a rate per layer."
        return said

    def _title(self) -> str:
        return f"Spectra per {self.per}"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"variables": name, "dimension": each.dimension, **row, "status": each.status}
            for name, each in self.spectra.items()
            for row in each._rows()
        ]

    def _notes(self) -> str:
        one = next(iter(self.spectra.values()))
        return f"{one.of} of each block alone, {one._notes()}"

    def chart(self) -> Chart:
        """Return the eigenvalues of every block side by side."""
        from normgauge.charts.spectrum import blocks

        return blocks(self._rows(), self._title())


@instrument
def layer_spectra(
    objective: Objective,
    *,
    per: Per | Mapping[str, Any] = "layer",
    top: int = 1,
    bottom: int = 0,
    of: Of = "hessian",
    tol: float = 1e-3,
    seed: int = 0,
    partial: bool = False,
) -> LayerSpectra:
    """Return the extreme eigenvalues of each diagonal block of the curvature of `objective`.

    A block holds the second derivatives with respect to the variables of one layer, the others held fixed; its
    largest eigenvalue never exceeds that of the whole matrix.

    Kind: estimate with true residuals, as `spectrum`. Cost: that of `spectrum` for each block.

    Args:
        objective: model, loss, data and mode.
        per: "layer" (the module that owns the parameters), "block" (the model's direct children), "tensor" (each
            parameter alone), or a mapping from names to selections (a glob, names or a predicate).
        top: how many of the largest eigenvalues of each block, at most its dimension.
        bottom: how many of the smallest.
        of: "hessian", "gauss_newton" or "empirical_fisher".
        tol: relative residual to reach.
        seed: of the random starts.
        partial: on Ctrl-C return the blocks that were finished, with status "nonconverged"; otherwise
            KeyboardInterrupt is raised and carries them as `partial`.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> data = (torch.eye(2), torch.zeros(2, 1))
        >>> objective = Objective(model, torch.nn.functional.mse_loss, data, mode="eval")
        >>> list(layer_spectra(objective).spectra)
        ['0', '2']
    """
    parts = dict(per) if isinstance(per, Mapping) else _partition(objective.names, per)
    spectra: dict[str, Spectrum] = {}

    def result() -> LayerSpectra:
        done = sum(each.status == "ok" for each in spectra.values())
        return LayerSpectra(
            dict(spectra),
            per if isinstance(per, str) else "selection",
            status="ok" if done == len(parts) else "nonconverged",
            sentence="" if done == len(parts) else f"{len(parts) - done} of {len(parts)} blocks have not converged",
        )

    with offer_partial(lambda _: result() if spectra else None):
        for name, selection in parts.items():
            part = objective.replace(parameters=selection)
            spectra[name] = spectrum(
                part, top=min(top, part.dimension), bottom=min(bottom, part.dimension), of=of, tol=tol, seed=seed
            )
    return result()


def _partition(names: tuple[str, ...], per: str) -> dict[str, list[str]]:
    if per not in get_args(Per):
        raise unknown_name("partition", per, get_args(Per), "Or pass a mapping from names to selections")
    parts: dict[str, list[str]] = {}
    for name in names:
        if per == "tensor":
            key = name
        elif per == "block":
            key = name.split(".", 1)[0]
        else:  # a parametrized tensor belongs to the layer that carries the parametrization
            key = owner_of(name) or "(model)"
        parts.setdefault(key, []).append(name)
    return parts
