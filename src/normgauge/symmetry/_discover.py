"""`symmetries`: probe, find, certify."""

from __future__ import annotations

from dataclasses import replace

import torch

from normgauge.objective import Objective
from normgauge.rng import generator
from normgauge.symmetry._certify import HOPELESS, Certifier
from normgauge.symmetry._bases import change_of_basis
from normgauge.symmetry._centred import centred_candidates
from normgauge.symmetry._coupled import coupled, probes_wanted
from normgauge.symmetry._family import Family
from normgauge.symmetry._independence import dimension, implied
from normgauge.symmetry._probe import Columns, Signatures, columns, imitation, jittered_point
from normgauge.symmetry._single import dead_entries, null_everywhere, single_block, unused
from normgauge.symmetry._terms import Term
from normgauge.symmetry._trace import check_enough_samples, trace
from normgauge.symmetry._values import Function, Of

PROBES = 4
MOST_PARTIAL = 48  # probes on a part of the batch


def discover(objective: Objective, *, of: Of = "outputs", seed: int = 0):
    function = Function(objective, of)
    hints = trace(lambda: function.run(lambda model, batch: objective._recipe.outputs(model, batch)))
    check_enough_samples(hints, objective.mode)
    point = jittered_point(function, seed)
    certifier = Certifier(function, point, seed)
    found = columns(point, hints)
    signatures = _probe(function, found, point, seed)
    candidates = _candidates(signatures, found, certifier.precision)
    gradients = []
    draw, source = function.probe(point, 0), generator(seed + 20)
    gradients = [draw(source) for _ in range(2)]
    candidates += _centred(candidates, point, gradients, certifier.precision)
    candidates += change_of_basis(candidates, point, gradients, hints, certifier.precision)
    certified = certifier.certify(candidates)
    kept = [f for f in certified]
    return kept, dimension([f for f in kept if f.status != "undecided"], point), unused(signatures), function


def _probe(function: Function, found: Columns, point, seed: int) -> Signatures:
    signatures, source = Signatures(point), generator(seed + 10)
    terms = found.every()
    draw = None
    for number in range(PROBES):
        if draw is None or len(function.batches) > 1:
            draw = function.probe(point, number)
        signatures.add(terms, draw(source))
    wanted = min(MOST_PARTIAL, max(probes_wanted(found.scales), probes_wanted(found.shifts)) - PROBES)
    count = max(4, -(-function.samples[0] // 16))
    for _ in range(wanted):
        draw = function.probe(point, 0, function.part(count, source))
        signatures.add(terms, draw(source))
    return signatures


def _centred(families, point, gradients, precision):
    accepted = list(families)
    new = []
    for terms in centred_candidates(families, point):
        family = Family("shift", terms, terms[0].size)
        ratio = torch.stack([family.gather(point, g).abs() / family.magnitude(point, g).clamp_min(1e-300) for g in gradients]).amax(0)
        if float(ratio.max()) < precision * 10:
            family = replace(family, residuals=tuple(float(r) for r in ratio))
            if not implied(family, accepted, point):
                accepted.append(family); new.append(family)
    return new


def _candidates(signatures: Signatures, found: Columns, precision: float) -> list[Family]:
    point = signatures.point
    accepted: list[Family] = dead_entries(signatures, precision)
    for family in single_block(signatures, found, precision):
        if not implied(family, accepted, point):
            accepted.append(family)
    terms = found.every()
    imitated = imitation(point, terms, signatures.probes, 99)
    for group in (found.scales, found.shifts):
        live = [t for t in group if not null_everywhere(signatures, t, precision)]
        for family in coupled(signatures, imitated, live, precision):
            if not implied(family, accepted, point):
                accepted.append(family)
    return accepted
