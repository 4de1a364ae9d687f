"""Extreme eigenpairs of a self-adjoint operator by adaptive Lanczos, with residuals computed, not guessed."""

import os
import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normgauge.errors import InputError, OutOfMemoryError, offer_partial
from normgauge.linalg._basis import inner, norm, out_of_memory_message
from normgauge.linalg._lanczos_iteration import NOTHING, Progress, Sequences, drift_limit
from normgauge.linalg._operator import Operator
from normgauge.records import Status
from normgauge.rng import generator

DEFAULT_MEMORY = 1 << 30
NOISE = 0.1  # added to a given start, of its length
Pair = tuple[float, float, Tensor]  # eigenvalue, residual norm, unit vector


@dataclass(frozen=True)
class Eigenpairs:
    """Largest and smallest eigenvalues of an operator, with eigenvectors and true residuals, those of `top` first.

    Attributes:
        top: the largest, descending.
        bottom: the smallest, ascending.
        vectors: unit eigenvectors, one per row.
        residuals: |A v - lambda v| / max(|lambda|, 1e-3 |A|).
        matvecs: products with the operator, verification included.
        restarts: how often the basis was compressed.
        status: nonconverged, or error where the products turned out not to be symmetric.
        sentence: why, where not ok.
    """

    top: tuple[float, ...]
    bottom: tuple[float, ...]
    vectors: Tensor = field(repr=False, compare=False)
    residuals: tuple[float, ...]
    matvecs: int
    restarts: int
    status: Status = "ok"
    sentence: str = ""


def eigenpairs(
    operator: Operator,
    *,
    top: int = 1,
    bottom: int = 0,
    tol: float = 1e-3,
    seed: int = 0,
    start: Tensor | None = None,
    memory: int | None = None,
    max_products: int | None = None,
    progress: Progress | None = None,
) -> Eigenpairs:
    """Return the `top` largest and `bottom` smallest eigenpairs of a self-adjoint `operator`.

    Lanczos, reorthogonalized whenever its drift asks for it, runs until the Ritz residuals of all wanted pairs are
    below tol * max(|lambda|, 1e-3 |A|). One sequence cannot see copies of multiple eigenvalues, nor tell close ones
    apart. For one pair at an end it goes on until its random start would have shown a larger one; for several, random
    sequences in its complement count by Sylvester's law of inertia what lies beyond, and what they find is added. At
    last A is applied to the eigenvectors: the residuals reported are those. Ctrl-C arrives as KeyboardInterrupt, whose
    `partial` holds the outermost pairs that had converged.

    Kind: estimate. Status ok: right to tol; none was missed but for a chance of 0.1 % (in float64) over the starts.
    Cost: products until convergence, 5 to 40 % more to be sure where the wanted values stand out, up to three times as
    many at the edge of a dense spectrum, and one per pair to verify.

    The start is random by `seed`, or a vector, or earlier eigenvectors as rows. `memory` is what bytes the basis may
    take, beyond which it is compressed and the run goes on; by default 1 GiB, or what the smallest basis takes where
    that is more and within a quarter of the machine's memory (else OutOfMemoryError). `max_products` is ten times the
    dimension by default, at most 1000; `progress(products, relative residuals)` is called after every step.

    Examples:
        >>> from normgauge.linalg import DenseOperator
        >>> pairs = eigenpairs(DenseOperator(torch.diag(torch.arange(9.0))), top=2, bottom=1, tol=1e-5)
        >>> [round(value, 3) for value in pairs.top], round(pairs.bottom[0], 3)
        ([8.0, 7.0], 0.0)

    References: parlett1998, simon1984, wu2000.
    """
    _check(operator, top, bottom, tol)
    if max_products is not None and max_products < 1:
        step = "Leave it out for up to a thousand"
        raise InputError("Lanczos", "max_products is at least 1", str(max_products), step)
    sequences = Sequences(
        operator,
        top=top,
        bottom=bottom,
        tol=0.9 * tol,  # leaves room for what rounding adds to the true residual
        capacity=_capacity(operator, top, bottom, memory),
        budget=min(10 * operator.shape[0] + 10, 1000) if max_products is None else max_products,
        generator=generator(seed),
        progress=progress,
        partial=tol >= 10 * drift_limit(operator.dtype),
    )
    with offer_partial(lambda _: _converged_pairs(sequences, tol)):
        sequences.noise = 1.0 if start is None else NOISE
        sequences.run(_first_vector(operator, start, sequences.random()))
        while sequences.search():
            pass
        return _verify_pairs(sequences, tol)


def _verify_pairs(sequences: Sequences, tol: float) -> Eigenpairs:
    """Apply the operator to the wanted vectors once more and measure what is left of A v - <v, A v> v."""
    operator = sequences.operator
    pairs: list[Pair] = []
    for vector in sequences.vectors(sequences.wanted_indices(len(sequences.projected))):
        vector /= norm(vector)
        image = operator.matvec(vector)
        sequences.matvecs += 1
        value = inner(vector, image)
        pairs.append((value, norm(image.sub(vector, alpha=value)), vector))
        del image  # before the next product
    sure, sequences.ritz = sequences.sure, NOTHING  # the pairs stand for themselves: the basis may go
    sequences.basis.rows = sequences.basis.rows[:0].clone()
    pairs.sort(key=lambda pair: -pair[0])
    ends = pairs[: sequences.top], pairs[::-1][: sequences.bottom]
    if sequences.asymmetry > 1e3 * torch.finfo(operator.dtype).eps ** 0.75 * sequences.scale:
        share = sequences.asymmetry / sequences.scale
        why = f"the operator is not self-adjoint: <u, A v> and <v, A u> differ by {share:.2g} of its norm"
        return _result(sequences, *ends, "error", f"{why}; a kernel may have a wrong second derivative, replace it")
    worst = max(residual / sequences.yardstick(value) for value, residual, _ in pairs)
    if worst <= tol and len(pairs) == sequences.wanted_count and sure:
        return _result(sequences, *ends, "ok", "")
    why = f"the largest relative residual is {worst:.2g} after {sequences.matvecs} products, {tol:.2g} was asked"
    if worst <= tol:
        why = f"whether an eigenvalue was missed was not settled by {sequences.matvecs} products"
    limit = f"products in {operator.dtype} allow no more, use float64"
    limit = limit if operator.dtype != torch.float64 else "pass the result as start= and go on"
    cure = "give more products (max_products)" if sequences.exhausted else limit
    return _result(sequences, *ends, "nonconverged", f"{why}; {cure}")


def _converged_pairs(sequences: Sequences, tol: float) -> Eigenpairs:
    """Return the outermost pairs that had converged, by Lanczos' own estimate, after the last whole step."""
    upper: list[Pair] = []
    lower: list[Pair] = []
    values, residuals, _ = sequences.ritz
    order = range(len(values))
    for end, wanted in ((upper, order[::-1][: sequences.top]), (lower, order[: sequences.bottom])):
        for i in wanted:  # no gaps: what comes after a pair that is not known may not be the next one
            if residuals[i] > tol * sequences.yardstick(float(values[i])):
                break
            end.append((float(values[i]), float(residuals[i]), sequences.vectors([i])[0]))
    why = f"interrupted after {sequences.matvecs} products: {len(upper) + len(lower)} of "
    why += f"{sequences.top + sequences.bottom} pairs converged, their residuals are Lanczos estimates"
    return _result(sequences, upper, lower, "nonconverged", why)


def _result(sequences: Sequences, upper: list[Pair], lower: list[Pair], status: Status, sentence: str) -> Eigenpairs:
    pairs = upper + lower
    return Eigenpairs(
        top=tuple(value for value, _, _ in upper),
        bottom=tuple(value for value, _, _ in lower),
        vectors=torch.stack([vector for _, _, vector in pairs]) if pairs else sequences.basis.rows[:0].clone(),
        residuals=tuple(residual / sequences.yardstick(value) for value, residual, _ in pairs),
        matvecs=sequences.matvecs,
        restarts=sequences.restarts,
        status=status,
        sentence=sentence,
    )


def _first_vector(operator: Operator, start: Tensor | None, random: Tensor) -> Tensor:
    """Return where to start: the sum of the given vectors with a little noise, so that nothing new is missed."""
    if start is None:
        return random
    rows = start.reshape(-1, start.shape[-1]).to(device=operator.device, dtype=operator.dtype)
    if rows.shape[1] != operator.shape[0] or not len(rows):
        got, step = f"shape {tuple(start.shape)}", "Pass the vectors of an earlier result on the same parameters"
        raise InputError("Lanczos", f"start is a vector of length {operator.shape[0]}, or several as rows", got, step)
    lengths = torch.tensor([norm(row) for row in rows], device=rows.device, dtype=rows.dtype)
    direction = (rows / lengths.clamp_min(torch.finfo(rows.dtype).tiny)[:, None]).sum(0)
    return direction + random * (NOISE * norm(direction) / norm(random))


def _check(operator: Operator, top: int, bottom: int, tol: float) -> None:
    operator.require_self_adjoint("Lanczos")
    rows = operator.shape[0]
    if min(top, bottom) < 0 or top + bottom == 0 or max(top, bottom) > rows:
        rule = f"top and bottom count eigenvalues of an operator with {rows} of them, at least one in all"
        raise InputError("Lanczos", rule, f"top={top}, bottom={bottom}", f"Ask for at most {rows} at each end")
    least = 10 * torch.finfo(operator.dtype).eps
    if not least <= tol < 1.0:
        rule = f"tol is a relative residual below 1 and not below {least:.2g}, what {operator.dtype} can give"
        raise InputError("Lanczos", rule, f"{tol:.3g}", "Raise tol, or use model.double() and data in float64")


def _capacity(operator: Operator, top: int, bottom: int, memory: int | None) -> int:
    """Return how many basis vectors to keep: what the memory allows, if that is enough to restart from.

    A restart keeps the wanted vectors; the search for copies begins beside them, with as many of its own.
    """
    size, wanted = operator.shape[0], top + bottom
    row = size * torch.finfo(operator.dtype).bits // 8
    least = min(2 * wanted + 4 if max(top, bottom) > 1 else 2 * wanted + 2, 2 * size)
    share = machine_memory(operator.device) // 4
    if least * row > (max(DEFAULT_MEMORY, share) if memory is None else memory):
        machine = f"a quarter of the machine's, {share / 2**30:.3g} GiB"
        budget = machine if memory is None else f"memory={memory} bytes"
        raise OutOfMemoryError(out_of_memory_message(least, size, operator.dtype, budget))
    return min(max(least, (DEFAULT_MEMORY if memory is None else memory) // row), 1000, 2 * size)


def machine_memory(device: torch.device) -> int:
    """Return the bytes a machine has, or a graphics card has free; boundless where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else sys.maxsize
