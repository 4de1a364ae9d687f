"""`symmetries`: probe, find, certify."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from normgauge.errors import OutOfMemoryError
from normgauge.linalg import machine_memory
from normgauge.objective import Objective
from normgauge.results import instrument
from normgauge.rng import generator
from normgauge.symmetry._axes import Hints, check_enough_samples, trace
from normgauge.symmetry._certify import Certifier
from normgauge.symmetry._coupled import coupled_families, drop_known_writers, probes_wanted, split_by_probes
from normgauge.symmetry._family import Family, carry_back
from normgauge.symmetry._fibre import can_walk, fibre_families
from normgauge.symmetry._independence import dimensions, is_implied
from normgauge.symmetry._matrix import change_of_basis
from normgauge.symmetry._probe import Columns, Signatures, list_columns
from normgauge.symmetry._result import Symmetries
from normgauge.symmetry._single import (
    centred_candidates,
    dead_entries,
    dead_here,
    dead_units,
    drop_unobserved,
    null_everywhere,
    single_block,
    unread_candidates,
    unused_entries,
)
from normgauge.symmetry._terms import Term
from normgauge.symmetry._values import Function, Of, Point, Setting

PROBES = 4
BYTES = 48  # per parameter: two vectors in float64, the largest gradients, room for what is made of them
MOST_PARTIAL, MOST_PASSES = 48, 20  # probes on a part of the batch, and what they may cost in passes over all of it
_ORDER = ("scale", "rescale", "shift", "dead", "matrix", "fibre")


@instrument
def symmetries(
    objective: Objective, *, of: Of = "outputs", seed: int = 0, memory: int | None = None, walk: bool = False
) -> Symmetries:
    """Find and certify the changes of the parameters that leave the function unchanged.

    A symmetry of the architecture holds at every parameter value, so it is looked for at redrawn ones, at which
    activations are of order one, in float64 and with every eps removed. A direction v(theta) is a symmetry to first
    order iff <v, J^T c> = 0 for every output cotangent c. The inner products of all slices of all parameters come from
    a few gradients; slices whose products vanish have a free scale or shift, and combinations with shared coefficients
    along an index are the null space of one matrix per index size. Changes of basis are decided by moment maps.
    Everything found is then tried as a finite change (powers of two for scales) at three redrawn points and on fresh
    inputs, again with eps, at the given parameters, and in eval mode.

    Status: `exact`; `exact_without_eps`, with what eps moves at the given parameters; `batch_statistics_only`;
        `exact_here`, at the given values alone (units that never fire, what a gain of zero hides), not counted in
        `.dimension`; `undecided`, null to first order and not certified, with the movement measured.
    Kind: exact up to rounding for what is certified; a symmetry outside the families searched is missed, never
        invented. One batch is probed (the first four if there are several). With `walk` the rest of a small network's
        null space of the Jacobian is kind `fibre`: directions without closed form, as many as there are at the redrawn
        points with the fewest, if walks of finite length along them leave held-out outputs alone, in all settings that
        the status claims at once (`exact`: with eps and without). These counts are estimates: the least over redrawn
        points, near which they are walked.
    Cost: 9 gradients on the batch (on halves or quarters of a large one), up to 48 on a sixteenth of it, and
        about 28 forwards on a quarter; the sum in passes over the batch is `Symmetries.cost`. With `walk`, 1.3
        gradients per parameter more, and up to about forty times that where something has no closed form.
        Memory: about 48 bytes per parameter (41 measured for GPT-2 with the model), and the graph of a forward.

    Args:
        objective: model, data and mode; its trainable, selected parameters are asked about.
        of: "outputs" (unchanged outputs) or "loss" (unchanged loss, e.g. a common shift of logits).
        seed: of redrawn points, cotangents and finite changes.
        memory: bytes it may take besides the graph of a forward; by default what the machine has.
        walk: whether to look for directions without closed form, in networks of at most 1,500 parameters; the result's
            `.walked` and its last line say whether that was done.

    Returns:
        `Symmetries`, with `.generators`, `.dimension`, `.project`, `.canonical`, `.explain()` and more.

    Raises:
        DataError: batch statistics from fewer than four values per channel.
        NonFiniteError: outputs that are not finite.
        ModelError: a forward that does not repeat itself.
        NotDifferentiableError: outputs without graph.
        OutOfMemoryError: before the work, when it needs more than `memory`.

    Deviations: akbar2025, Proposition 4.1 scales gamma against the weights before it is corrected in the text;
        what is certified here is (W, b) -> (c W, c b) with gamma unchanged. sun2020, Lemma 2 asks for every
        real factor; batch normalization is invariant for positive ones only.

    Examples:
        Six hidden ReLU units have six rescalings, and nothing else:

        >>> import torch
        >>> from torch import nn
        >>> x = torch.randn(32, 4, generator=generator(0))
        >>> with torch.random.fork_rng():
        ...     _ = torch.manual_seed(0)
        ...     model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> objective = Objective(model, nn.functional.mse_loss, (x, torch.zeros(32, 3)), mode="eval")
        >>> free = symmetries(objective)
        >>> free.dimension, free.generators[0].kind, free.generators[0].status
        (6, 'rescale', 'exact')

    References: sun2020, akbar2025.
    """
    _check_room(objective, memory)
    function = Function(objective, of, seed)
    hints: Hints = function.run(lambda model, batch: trace(lambda: objective.outputs_of(model, batch)))
    check_enough_samples(hints, objective.mode)
    certifier = Certifier(function, seed)
    columns = list_columns(objective.parameters, hints, function.coordinates, function.homes())
    given = Signatures(function.user)
    ask = partial(function.probe, number=0, source=generator(seed + 40), setting=Setting(eps=True))
    given.add((), ask, observe=True)
    alive = {name: value > 0 for name, value in given.largest.items() if not bool(value.all())}  # else all are
    del given
    signatures = _probe(function, columns, certifier, seed)
    signatures.admit(alive)
    families = _candidates(function, signatures, columns, hints=hints, precision=certifier.precision, seed=seed)
    signatures.point = {}  # as large as the parameters; what follows needs room for graphs
    certified = certifier.tell_eps(certifier.certify(families))
    if certifier.depends_on_mode():
        certified = certifier.tell_batch_statistics(certified)
    units = dead_units(certified, alive)
    certified += certifier.holding_here(units) + certifier.holding_here(
        dead_here([*units, *(f for f in certified if f.kind == "dead")], signatures, alive)
    )
    known = [f for f in certified if f.counted]
    walked: bool | None = walk and can_walk(function)
    if walked:
        fibres = fibre_families(function, certifier, known, unused_entries(signatures), seed)
        certified, walked = [*certified, *(fibres or ())], None if fibres is None else True
    signatures.point = certifier.point(0)
    return _result(function, certified, signatures, walked)


def _check_room(objective: Objective, memory: int | None) -> None:
    count = sum(parameter.numel() for parameter in objective.model.parameters())
    room = machine_memory(objective.device) if memory is None else memory
    if BYTES * count > room:
        raise OutOfMemoryError(
            f"symmetries({type(objective.model).__name__})",
            f"{count} parameters need about {BYTES * count / 2**30:.3g} GiB, and the graph of a forward",
            f"{room / 2**30:.3g} GiB" + ("" if memory is None else f" (memory={memory})"),
            "Ask about a smaller model of the same kind (fewer blocks, narrower), which has the same families",
        )


def _probe(function: Function, columns: Columns, certifier: Certifier, seed: int) -> Signatures:
    """Return the signatures of a few gradients that see all data.

    Larger batches are probed in halves or quarters, each sample by some probe: less memory, as many equations.
    A unit may be silent at one point, so that two more are asked; coefficients are the same at all of them.
    """
    coupling = {*columns.scales, *columns.shifts}
    signatures = Signatures({}, frozenset(term for term in columns.averages if term not in coupling))
    wanted = {**probes_wanted(columns.scales), **probes_wanted(columns.shifts)}
    few = [term for term, needed in wanted.items() if needed > PROBES]
    source = generator(seed + 10)
    parts = function.parts(source)
    asked = [(few, k, 0, generator(seed + 12 + k), certifier.part) for k in (1, 2)]
    asked += [(columns.all_terms(), 0, k, source, parts[k % len(parts)]) for k in range(PROBES)]
    for terms, place, number, draws, part in asked:
        signatures.point = {}  # freed before the next is drawn
        signatures.point = certifier.point(place)
        signatures.add(terms, partial(function.probe, number=number, source=draws, part=part), observe=True)
    return signatures


def _probe_parts(function: Function, signatures: Signatures, terms: Sequence[Term], seed: int) -> Point:
    """Add gradients of parts of the batch, cheap, for the index sizes that lack equations; return one more gradient."""
    source, wanted = generator(seed + 11), probes_wanted(terms)
    count = max(4, -(-function.samples[0] // 16))
    whole = function.part(count, generator(0)) is None
    most = min(MOST_PARTIAL, MOST_PASSES if whole else MOST_PASSES * function.samples[0] // count)
    for number in range(PROBES, min(PROBES + most, max(wanted.values(), default=0))):
        ask = partial(function.probe, number=0, source=source, part=function.part(count, source))
        signatures.add([term for term, needed in wanted.items() if number < needed], ask)
    gradient = function.probe(signatures.point, 0, source, function.parts(generator(seed + 10))[0])
    signatures.add(terms, lambda _, visit: [visit(name, slope) for name, slope in gradient.items()])
    return gradient


def _candidates(
    function: Function, signatures: Signatures, columns: Columns, *, hints: Hints, precision: float, seed: int
) -> list[Family]:
    """Return everything that is null to first order and not implied by something simpler."""
    point = signatures.point
    accepted = dead_entries(signatures, precision)
    explained = list(accepted)  # with unobserved indices too: a sum over a group of units is no news for one
    unused = unused_entries(signatures)
    keys: set[tuple[frozenset[Term], tuple[int, ...] | None]] = set()

    def accept(families: list[Family]) -> None:
        for family in families:
            key = (frozenset(family.terms), family.indices)  # overlapping windows find the same thing again
            if key not in keys and not is_implied(family, explained, point, unused=unused):
                explained.append(family)
                accepted.extend(drop_unobserved(family, signatures))
            keys.add(key)

    accept(single_block(signatures, columns, precision))
    groups = []
    for group in (columns.scales, columns.shifts):
        live = [term for term in group if not null_everywhere(signatures, term, precision)]
        ready, waiting = split_by_probes(signatures, live)
        accept(coupled_families(signatures, ready, precision))
        groups.append(drop_known_writers(waiting, accepted))
    gradient = _probe_parts(function, signatures, [term for waiting in groups for term in waiting], seed)
    for waiting in groups:
        accept(coupled_families(signatures, [term for term in waiting if term.size > 1], precision))
        whole = drop_known_writers([term for term in waiting if term.size == 1], accepted)
        accept(coupled_families(signatures, whole, precision))
    accept(_hidden_shifts(centred_candidates(list(accepted), point, gradient), point, gradient, precision))
    accept(_hidden_shifts(unread_candidates(point, gradient, hints), point, gradient, precision))
    return [*accepted, *change_of_basis(accepted, point, [gradient], hints, precision)]


def _hidden_shifts(candidates: Iterable[tuple[Term, ...]], point: Point, gradient: Point, limit: float) -> list[Family]:
    result = []
    for terms in candidates:
        family = Family("shift", terms, terms[0].size)
        ratio = family.gather(point, gradient).abs() / family.magnitude(point, gradient).clamp_min(1e-300)
        if float(ratio.max()) < 10 * limit:
            result.append(replace(family, residuals=tuple(float(r) for r in ratio)))
    return result


def _result(function: Function, families: list[Family], signatures: Signatures, walked: bool | None) -> Symmetries:
    families = sorted(families, key=lambda family: _ORDER.index(family.kind))
    counted = [f for f in families if f.status != "undecided" and f.counted]
    dimension, matrix_dimension = dimensions([f for f in counted if f.kind != "fibre"], signatures.point)
    matrix_dimension += sum(f.size for f in counted if f.kind == "fibre")
    return Symmetries(
        families=tuple(carry_back(family, function.coordinates, signatures.point) for family in families),
        dimension=dimension,
        matrix_dimension=matrix_dimension,
        unobserved={name: int(mask.sum()) for name, mask in unused_entries(signatures).items()},
        of=function.of,
        shapes={name: tuple(value.shape) for name, value in function.objective.parameters.items()},
        parameters={name: value.double() for name, value in function.objective.parameters.items()},
        walked=walked,
    )
