"""`ng.spectrum`: the extreme eigenvalues of a loss's curvature, each with its true residual."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from normgauge.errors import InputError, explain
from normgauge.linalg import eigenpairs
from normgauge.measure._curvature_of import Group, Of, curvature_of
from normgauge.measure._progress import Progress, residuals_shown
from normgauge.objective import Objective
from normgauge.records import Reading, Result, Status

if TYPE_CHECKING:
    import altair


@dataclass(frozen=True)
class Spectrum(Result):
    """Largest and smallest eigenvalues of a curvature matrix, with true residuals.

    Args:
        top: the largest eigenvalues (algebraic), descending.
        bottom: the smallest, ascending.
        residuals: |A v - lambda v| / |lambda| of each pair, those of `top` first; for eigenvalues below a thousandth
            of the largest the divisor is that thousandth.
        matvecs: products with the matrix, those that verify included.
        of: which matrix.
        mode: the objective's mode.
        dimension: the number of variables.
        tol: the relative residual asked for.
        seed: of the random start.
        status: ok or nonconverged.
        sentence: why, where not ok.
        vectors: unit eigenvectors as rows, those of `top` first; pass the whole result as `start=` later.
    """

    top: tuple[float, ...]
    bottom: tuple[float, ...]
    residuals: tuple[float, ...]
    matvecs: int
    of: str
    mode: str
    dimension: int
    tol: float
    seed: int
    status: Status = "ok"
    sentence: str = ""
    vectors: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)

    def readings(self) -> tuple[Reading, ...]:
        """Return each eigenvalue as a reading; its uncertainty is |A v - lambda v|, which bounds the error."""
        found = []
        for row in self._rows():
            inside = row["residual"] <= self.tol
            found.append(
                Reading(
                    f"{row['end']} eigenvalue {row['index']}",
                    row["eigenvalue"],
                    kind="estimate",
                    uncertainty=row["residual"] * abs(row["eigenvalue"]),
                    status="ok" if inside else "nonconverged",
                    sentence="" if inside else self.sentence,
                )
            )
        return tuple(found)

    def _title(self) -> str:
        return f"Spectrum of the {self.of.replace('_', '-')} matrix, {self.dimension} variables"

    def _rows(self) -> list[dict[str, Any]]:
        ends = [("top", i + 1, value) for i, value in enumerate(self.top)]
        ends += [("bottom", i + 1, value) for i, value in enumerate(self.bottom)]
        return [
            {"end": end, "index": index, "eigenvalue": value, "residual": residual}
            for (end, index, value), residual in zip(ends, self.residuals, strict=True)
        ]

    def _footer(self) -> str:
        line = (
            f"kind: estimate, true relative residuals (asked {self.tol:g}); mode: {self.mode}; seed: {self.seed}; "
            f"cost: {self.matvecs} products; status: {self.status}"
        )
        return f"{line} ({self.sentence})" if self.sentence else line

    def chart(self) -> altair.TopLevelMixin:
        """Return a chart with one stem per eigenvalue."""
        from normgauge.charts.spectrum import stems

        return stems(self._rows(), self._title())


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
    memory: int | None = None,
    products: int | None = None,
    group: Group = None,
    progress: Progress | None = None,
) -> Spectrum:
    """Return the `top` largest and `bottom` smallest eigenvalues of the curvature of `objective`.

    Of A = d^2 L / d theta^2 (`of="hessian"`) or of a matrix that approximates it, by Lanczos with
    reorthogonalization, until |A v - lambda v| <= tol |lambda| for every pair. Copies of multiple eigenvalues are
    searched for. At last A is applied to every eigenvector: the residuals are measured, not estimated.

    Kind: estimate; an eigenvalue of A lies within |A v - lambda v| of each value. Cost: usually 10 to 50 products,
    each about two gradients; `matvecs` counts them. Memory: one vector of the variables per product, at most
    `memory` bytes, then the basis is compressed.

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
        memory: bytes the Lanczos basis may take; 1 GiB by default.
        products: most products before giving up with status "nonconverged".
        group: process group over which the data are sharded: every rank makes the objective on its share and calls
            this function; all get the same result. Batch statistics stay those of each rank's batches.
        progress: called as `progress(products, residuals)`; by default shown on a terminal's stderr.

    Returns:
        The eigenvalues. Ctrl-C ends the search and returns those that had converged, with status "nonconverged".

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
    if of == "quotient":
        from normgauge.measure._quotient import quotient_spectrum

        if group is not None:
            raise InputError(
                explain("spectrum", "the quotient is measured in one process", "group=", "Leave group= out")
            )
        return quotient_spectrum(
            objective,
            symmetries=symmetries,
            top=top,
            bottom=bottom,
            tol=tol,
            seed=seed,
            start=start,
            memory=memory,
            products=products,
            progress=progress,
        )
    first = None if start is None else start_vectors(objective, start)
    with (
        curvature_of(objective, of, group) as operator,
        residuals_shown(f"spectrum of {of}", progress) as shown,
    ):
        found = eigenpairs(
            operator,
            top=top,
            bottom=bottom,
            tol=tol,
            seed=seed,
            start=first,
            memory=memory,
            products=products,
            progress=shown,
        )
    return Spectrum(
        top=found.top,
        bottom=found.bottom,
        residuals=found.residuals,
        matvecs=found.matvecs,
        of=of,
        mode=objective.mode,
        dimension=objective.dimension,
        tol=tol,
        seed=seed,
        status=found.status,
        sentence=found.sentence or _remark(found.top + found.bottom),
        vectors=found.vectors,
    )


def _remark(values: tuple[float, ...]) -> str:
    zero = values and not any(values)
    return "every product was zero: the loss is piecewise linear in these variables" if zero else ""


def start_vectors(objective: Objective, start: Spectrum) -> Tensor | None:
    """Return the vectors of an earlier spectrum, which must be of the same variables."""
    if start.dimension != objective.dimension:
        raise InputError(
            explain(
                "spectrum",
                f"start must be a spectrum of the same {objective.dimension} variables",
                f"one of {start.dimension} variables",
                "Leave start out, or select the same parameters",
            )
        )
    return start.vectors if start.vectors.numel() else None
