"""`ng.spectrum`, `ng.quotient_spectrum`, `ng.layer_spectra`: extreme eigenvalues of curvature, with true residuals."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from normgauge.charts.spectrum import blocks as draw_blocks
from normgauge.charts.spectrum import stems
from normgauge.errors import InputError, offer_partial, unknown_name
from normgauge.linalg import Eigenpairs, Operator, eigenpairs, spectral_nodes
from normgauge.measure.curvature.products import (
    Family,
    Group,
    Of,
    Progress,
    QuotientOperator,
    curvature_of,
    show_residuals,
    writer_owners,
)
from normgauge.measure.signal.layer_statistics import group_names
from normgauge.network import owner_of
from normgauge.objective import Objective
from normgauge.records import Chart, Kind, Reading
from normgauge.results import Result, instrument
from normgauge.symmetry import symmetries as find_symmetries

DENSE_LIMIT = 1500
GRAPHS = 256 << 20  # bytes graphs may take by default: a quarter of what the basis may
MOSTLY_SAMPLE = 0.2  # of lambda_max: more than the factor to which an edge of stability is known
RATE = 2.0  # rate * curvature beyond which a step on a quadratic overshoots by more than it started with
Per = Literal["layer", "block", "tensor"]
UNEVEN = 10.0  # a decade: rates are searched on grids of half a decade, and one rate cannot serve both ends
NOTHING = 1e6  # times less curvature than the sharpest block's, about what float32 resolves


@dataclass(frozen=True)
class Spectrum(Result):
    """Largest and smallest eigenvalues of a curvature matrix, with true residuals.

    Attributes:
        top: the largest eigenvalues (algebraic), descending.
        bottom: the smallest, ascending.
        residuals: |A v - lambda v| / |lambda| of each pair, those of `top` first; for eigenvalues below a
            thousandth of the largest the divisor is that thousandth.
        matvecs: products with the matrix, those that verify included.
        of: which matrix.
        dimension: the number of variables.
        tol: the relative residual asked for.
        vectors: unit eigenvectors as rows, those of `top` first; pass the whole result as `start=` later.
        held_out: v^T A v on other data for each vector v of `top`; empty where none were given.
    """

    top: tuple[float, ...]
    bottom: tuple[float, ...]
    residuals: tuple[float, ...]
    matvecs: int
    of: str
    dimension: int
    tol: float
    vectors: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)
    held_out: tuple[float, ...] = ()

    @property
    def sample_share(self) -> float:
        """The share of lambda_max that is the sample: 1 - v^T A' v / lambda_max, A' that of the data held out.

        lambda_max = max_v v^T A v is chosen by its sample, so it exceeds what v has on data it did not see.
        """
        return 1 - self.held_out[0] / self.top[0] if self.held_out else math.nan

    def readings(self) -> tuple[Reading, ...]:
        """Return each eigenvalue as a reading; its uncertainty is |A v - lambda v|, which bounds the error."""
        seen = tuple(Reading(f"held out along top {i}", value, "estimate") for i, value in enumerate(self.held_out, 1))
        values = tuple(
            Reading(
                f"{row['end']} eigenvalue {row['index']}",
                row["eigenvalue"],
                kind="estimate",
                uncertainty=row["residual"] * abs(row["eigenvalue"]),
                status="ok" if row["residual"] <= self.tol else "nonconverged",
                sentence="" if row["residual"] <= self.tol else self.sentence,
            )
            for row in self._rows()
        )
        return values + seen

    def _meaning(self) -> str:
        values = self.top + self.bottom
        if not values:
            return f"Of the {self.dimension} eigenvalues none was found."
        largest, smallest = max(values), min(values)
        if largest <= 0:
            shape = "no curvature" if largest == smallest == 0 else "no upward curvature among the eigenvalues found"
            return f"There is {shape} (largest {largest:.4g}), so curvature sets no limit to the learning rate here."
        if self.of == "empirical_fisher":
            return f"Gradients of single samples vary most along one direction, by {largest:.4g}; no rate follows."
        said = f"Plain gradient descent is stable here up to a learning rate of {RATE:g} / {largest:.4g} = "
        said += f"{RATE / largest:.4g}, to second order; a larger one climbs along the top eigenvector."
        if self.of == "hessian" and smallest < -self.tol * largest:
            said += f" The smallest eigenvalue, {smallest:.4g}, is below zero: this is no minimum."
        if self.held_out:
            advice = "measure on more before comparing" if self.sample_share > MOSTLY_SAMPLE else "it is the network's"
            said += f" {self.sample_share:.0%} of the largest is the sample (limit {MOSTLY_SAMPLE:.0%}): {advice}."
        return said

    def _notes(self) -> str:
        said = f"true relative residuals, asked {self.tol:g}"
        exact = self.vectors.dtype == torch.float64
        sure = "missed ones: chance below 0.1 %" if exact else "float32 may miss copies of small ones"
        return f"{said}; {sure}" if self.status == "ok" else said

    def _title(self) -> str:
        return f"Spectrum of the {self.of.replace('_', '-')} matrix, {self.dimension} variables"

    def _rows(self) -> list[dict[str, Any]]:
        ends = [(end, i, value) for end in ("top", "bottom") for i, value in enumerate(getattr(self, end), 1)]
        return [
            {"end": end, "index": index, "eigenvalue": value, "residual": residual}
            for (end, index, value), residual in zip(ends, self.residuals, strict=True)
        ]

    def chart(self) -> Chart:
        """Return a chart with one stem per eigenvalue."""
        return stems(self._rows(), self._title())


@dataclass(frozen=True)
class QuotientSpectrum(Spectrum):
    """Extreme eigenvalues of the quotient curvature, and what they say about the landscape.

    Attributes:
        gauge: how coupled rescalings were fixed: "given point" where blocks were passed as they are.
        blocks: the number of spheres.
        condition: largest over smallest |eigenvalue| that is not zero; `None` above 1500 variables.
        negatives: the number of negative eigenvalues; an estimate above 1500 variables, nan if not counted.
        negatives_kind: exact or estimate.
    """

    gauge: str = "given point"
    blocks: int = 0
    condition: float | None = None
    negatives: float = math.nan
    negatives_kind: Kind = "exact"

    @property
    def sharpness(self) -> float:
        """The spherical sharpness: the largest eigenvalue."""
        return self.top[0]

    def readings(self) -> tuple[Reading, ...]:
        """Return the eigenvalues, the condition number and the number of negative eigenvalues."""
        why = f"above {DENSE_LIMIT} variables it is not computed"
        condition = math.nan if self.condition is None else self.condition
        return (
            *super().readings(),
            Reading.measured("condition number of the non-zero part", condition, why=why),
            Reading.measured("negative eigenvalues", self.negatives, self.negatives_kind, why="they were not counted"),
        )

    def _meaning(self) -> str:
        spread = "" if self.condition is None else f", condition {self.condition:.3g} over what is not flat"
        valley = "no direction leads down" if self.negatives < 0.5 else f"{self.negatives:.3g} directions bend down"
        if math.isnan(self.negatives):
            valley = "how many directions bend down was not counted"
        if not self.top:
            return f"There is no top eigenvalue here; {valley} (0 at a minimum)."
        return (
            f"Whatever the scale of its weights, this function is as sharp as {self.top[0]:.4g}{spread}, and {valley}: "
            f"compare networks by this number (a minimum has 0 negative eigenvalues), not by the plain spectrum."
        )

    def _notes(self) -> str:
        return f"gauge {self.gauge}, {self.blocks} spheres; {super()._notes()}"


@instrument
def spectrum(
    objective: Objective,
    *,
    top: int = 5,
    bottom: int = 0,
    of: Of | Literal["quotient"] = "hessian",
    tol: float = 1e-3,
    seed: int = 0,
    symmetries: Any = None,
    start: Spectrum | None = None,
    held_out: Any = None,
    memory: int | None = None,
    max_products: int | None = None,
    group: Group = None,
    progress: Progress | None = None,
    partial: bool = False,
) -> Spectrum:
    """Return the `top` largest and `bottom` smallest eigenvalues of the curvature of `objective`.

    Of A = d^2 L / d theta^2 (`of="hessian"`) or of a matrix that approximates it, by Lanczos with
    reorthogonalization, until |A v - lambda v| <= tol |lambda| for every pair. What one sequence cannot see, copies and
    close eigenvalues, is counted by others. At last A is applied to every eigenvector: residuals are measured.

    Kind: estimate; an eigenvalue of A lies within |A v - lambda v| of each value. With status ok they are the outermost
    ones, each to `tol`, but for a chance of 0.1 % over the random starts (in float64; float32 may miss copies of small
    ones). Cost: usually 10 to 60 products, each about two gradients, counted in `matvecs`. Memory: one vector of the
    variables per product, at most `memory` bytes, then the basis is compressed.

    Args:
        objective: model, loss, data and mode.
        top: how many of the largest, in the algebraic order.
        bottom: how many of the smallest.
        of: "hessian", "gauss_newton", "empirical_fisher", or "quotient": the Hessian with all certified scale and
            rescaling symmetries divided out (a `QuotientSpectrum`; see `quotient_spectrum`).
        tol: relative residual to reach.
        seed: of the random start; equal seeds give equal results.
        symmetries: for the quotient: what `ng.symmetries(objective)` gave; discovered when left out.
        start: an earlier spectrum of the same variables, for instance from an earlier step of training.
        held_out: other data of the same kind, to see how much of the largest eigenvalues is the sample: `.held_out`,
            `.sample_share`. One product for each of `top`.
        memory: bytes the Lanczos basis may take; by default 1 GiB, or the least it needs up to a quarter of the
            machine's. A graph of more than a quarter of it (by default 256 MiB) is computed again block by block.
        max_products: most products before giving up with status "nonconverged".
        group: process group over which the data are sharded: every rank makes the objective on its share and calls
            this function; all get the same result. Batch statistics stay those of each rank's batches.
        progress: called as `progress(products, residuals)`; by default shown on a terminal's stderr.
        partial: on Ctrl-C return the outermost eigenvalues that had converged, with status "nonconverged"; otherwise
            KeyboardInterrupt is raised and carries them as `partial`.

    Raises:
        InputError: more eigenvalues than variables, a tolerance below the precision.
        OutOfMemoryError: when graph or basis do not fit.
        NotDifferentiableError: where model or loss has no second derivative.
        NonFiniteError: where a product is not finite, naming the batch.

    Examples:
        For a mean of squares over x with independent columns the Hessian is 2 mean(x x^T):

        >>> x = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> objective = Objective(model, torch.nn.functional.mse_loss, (x, torch.zeros(3, 1)), mode="eval")
        >>> [round(value, 4) for value in spectrum(objective, top=2).top]
        [6.0, 2.6667]

    References: pearlmutter1994, parlett1998.
    """
    options: dict[str, Any] = {"top": top, "bottom": bottom, "tol": tol, "seed": seed, "max_products": max_products}
    options["memory"] = memory
    if of == "quotient":
        if group is not None:
            raise InputError("spectrum", "the quotient is measured in one process", "group=", "Leave group= out")
        options |= {"start": start, "progress": progress, "partial": partial}
        return quotient_spectrum(objective, symmetries=symmetries, **options)

    def result(pairs: Eigenpairs) -> Spectrum:
        return Spectrum(**_fields(pairs, of, objective, tol))

    with curvature_of(objective, of, group, GRAPHS if memory is None else memory // 4) as operator:
        pairs = _search(operator, of, objective, result, start, progress, **options)
    if held_out is None:
        return result(pairs)
    with curvature_of(objective.replace(data=held_out), of, group) as other:
        seen = tuple(float(vector.double() @ (other @ vector).double()) for vector in pairs.vectors[: len(pairs.top)])
    return replace(result(pairs), held_out=seen)


def _search(
    operator: Operator,
    of: str,
    objective: Objective,
    result: Callable[[Eigenpairs], Spectrum],
    start: Spectrum | None,
    progress: Progress | None,
    **options: Any,
) -> Eigenpairs:
    if start is not None and start.dimension != objective.dimension:
        rule, got = f"start must be a spectrum of the same {objective.dimension} variables", f"one of {start.dimension}"
        raise InputError("spectrum", rule, got, "Leave start out, or select the same parameters")
    first = None if start is None or not start.vectors.numel() else start.vectors
    with (
        offer_partial(lambda pairs: result(pairs) if pairs and pairs.residuals else None),
        show_residuals(f"spectrum of {of}", progress) as callback,
    ):
        return eigenpairs(operator, start=first, progress=callback, **options)


def _fields(pairs: Eigenpairs, of: str, objective: Objective, tol: float) -> dict[str, Any]:
    """Return what eigenpairs say of a spectrum."""
    values = pairs.top + pairs.bottom
    flat = "every product was zero: the loss is piecewise linear in these variables"
    names = ("top", "bottom", "residuals", "matvecs", "vectors", "status")
    own = {name: getattr(pairs, name) for name in names}
    sentence = pairs.sentence or (flat if values and not any(values) else "")
    return {**own, "of": of, "dimension": objective.dimension, "tol": tol, "sentence": sentence}


@instrument
def quotient_spectrum(
    objective: Objective,
    blocks: Sequence[Family] | Tensor | None = None,
    *,
    symmetries: Any = None,
    gauge: str = "given point",
    top: int = 5,
    bottom: int = 0,
    tol: float = 1e-3,
    seed: int = 0,
    start: Spectrum | None = None,
    memory: int | None = None,
    max_products: int | None = None,
    progress: Progress | None = None,
    partial: bool = False,
) -> QuotientSpectrum:
    """Return the extreme eigenvalues of the curvature of `objective` on the product of spheres of `blocks`.

    See `QuotientOperator` for the matrix. Multiplying scale-invariant blocks by any factors changes the plain
    spectrum by orders of magnitude and this one not at all.

    Kind: estimate with true residuals. Cost: that of `spectrum`, up to 1500 variables one product for each to count
    negative eigenvalues exactly, beyond that 30 more to estimate their number.

    `blocks` are families of blocks, `[(("0.weight", 0),)]` for the rows of one weight, at a canonical point where they
    are coupled, whose name is `gauge`; by default those of the `symmetries` (discovered when they are not given either)
    at the canonical point of `objective`. All other arguments are those of `spectrum`.

    Examples:
        On the circle |w| = 1 the loss w_1 has second derivative -cos(angle): at w = (1, 0) it is -1.

        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.copy_(torch.tensor([[1.0, 0.0]]))
        >>> objective = Objective.from_step(model, lambda m, _: m.weight[0, 0], torch.ones(1), mode="eval")
        >>> round(quotient_spectrum(objective, [(("weight", 0),)], top=1, bottom=1).bottom[0], 5)
        -1.0
    """
    if blocks is None:
        symmetries = find_symmetries(objective) if symmetries is None else symmetries
        objective = objective.at(symmetries.canonical(objective.parameters))
        blocks, gauge = writer_owners(objective, symmetries), "unit-writer"
    operator = QuotientOperator(objective, blocks)

    def result(pairs: Eigenpairs, products: int = 0, **counts: Any) -> QuotientSpectrum:
        pairs = replace(pairs, matvecs=pairs.matvecs + products)
        fields = _fields(pairs, "quotient", objective, tol)
        return QuotientSpectrum(**fields, gauge=gauge, blocks=operator.count, **counts)

    with closing(operator):
        options: dict[str, Any] = {"top": top, "bottom": bottom, "tol": tol, "max_products": max_products}
        pairs = _search(operator, "quotient", objective, result, start, progress, seed=seed, memory=memory, **options)
        late = replace(pairs, status="nonconverged", sentence="interrupted before negative eigenvalues were counted")
        with offer_partial(lambda _: result(late)):
            counts, products = _counts(operator, max(map(abs, pairs.top + pairs.bottom), default=0.0), seed)
    return result(pairs, products, **counts)


def _counts(operator: QuotientOperator, scale: float, seed: int) -> tuple[dict[str, Any], int]:
    """Return condition number and number of negative eigenvalues, and the products they took."""
    size = operator.shape[0]
    if size <= DENSE_LIMIT:
        dense = operator.matmat(torch.eye(size, dtype=operator.dtype, device=operator.device)).double()
        values = torch.linalg.eigvalsh((dense + dense.T) / 2)
        zero = 100 * size * torch.finfo(operator.dtype).eps * float(values.abs().max())
        rest = values[values.abs() > zero].abs()
        condition = float(rest.max() / rest.min()) if rest.numel() else None
        return {"condition": condition, "negatives": float((values < -zero).sum())}, size
    nodes = spectral_nodes(operator, probes=1, steps=30, seed=seed)
    below = [w for v, w in zip(nodes[0].values, nodes[0].weights, strict=True) if v < -1e-5 * scale]
    return {"negatives": size * sum(below), "negatives_kind": "estimate"}, len(nodes[0].values)


@dataclass(frozen=True)
class LayerSpectra(Result):
    """The spectra of the diagonal blocks of a curvature matrix, by name.

    Attributes:
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
        return draw_blocks(self._rows(), self._title())


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

    `per` is "layer" (the module that owns the parameters), "block" (the model's direct children), "tensor" (each
    parameter alone), or a mapping from names to selections (a glob, names or a predicate). All other arguments are
    those of `spectrum`, for each block; on Ctrl-C the blocks that were finished are the partial result.

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
    keys: dict[str, Callable[[str], str]] = {
        "layer": owner_of,
        "block": lambda name: name.split(".", 1)[0],
        "tensor": str,
    }
    return group_names(names, keys[per])
