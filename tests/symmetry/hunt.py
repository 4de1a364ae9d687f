"""The hunt: random networks, each certificate tried anew without the search's own code, and the nullity written out.

`PYTHONPATH=src:tests python tests/symmetry/hunt.py 0 1000` prints the counts; `make test-all` runs it.
"""

import copy
import sys
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.func import functional_call

import normgauge as ng
from reference.symmetry import nullity
from symmetry.zoo import Subject, generic_point, set_eps, subject

HOLDS = 1e-8  # relative movement of the outputs, in float64
COUNTED = ("exact", "exact_without_eps", "batch_statistics_only")


@dataclass
class Outcome:
    seed: int
    what: str
    nullity: int = 0
    explained: int = 0
    undecided: int = 0
    false: list = field(default_factory=list)

    @property
    def missed(self):
        return max(0, self.nullity - self.explained)


def search(case: Subject):
    data = (case.inputs, torch.zeros(len(case.inputs)))
    objective = ng.Objective(case.model, lambda out, _: out.square().mean(), data, mode=case.mode)
    return ng.symmetries(objective)


def moves(model, case: Subject, family, seed):
    """How far outputs move under a finite change at a generic point, on data and factors the search did not use."""
    source = torch.Generator().manual_seed(seed)
    point = generic_point(model, seed)
    if case.inputs.is_floating_point():
        inputs = torch.randn(case.inputs.shape, generator=source)
    else:
        inputs = torch.randint(0, int(case.inputs.max()) + 1, case.inputs.shape, generator=source)
    amounts = 1.7 * torch.randn(len(family), generator=source)
    matrix = family.kind == "matrix"
    after = family.act_randomly(dict(point), source) if matrix else family.act(dict(point), amounts)
    with torch.no_grad():
        first, second = (functional_call(copy.deepcopy(model), values, (inputs,)) for values in (point, after))
    return float((first - second).abs().max() / first.abs().max())


def examine(seed: int) -> Outcome:
    """Search one network and judge what came back."""
    case = subject(seed)
    outcome = Outcome(seed, case.what)
    result = search(case)
    double = set_eps(copy.deepcopy(case.model).double().train(case.mode == "train"))
    bare = set_eps(copy.deepcopy(double), 1e-30)
    for family in result.families:
        if family.status == "undecided":
            outcome.undecided += len(family)
        elif family.status in COUNTED and family.counted:
            model = double if family.status == "exact" else bare
            moved = max(moves(model, case, family, seed + 7 * k) for k in range(2))
            if not moved < HOLDS:
                outcome.false.append((family.status, family.describe(), moved))
    outcome.nullity = 10**9
    for number in range(3):  # a point may have dead units; the generic rank is the largest
        with torch.no_grad():
            for name, value in generic_point(bare, seed + 100 + number).items():
                bare.get_parameter(name).copy_(value)
        outcome.nullity = min(outcome.nullity, dense_nullity(bare, case, seed))
    outcome.explained = result.dimension + result.matrix_dimension + sum(result.unobserved.values())
    return outcome


def dense_nullity(model, case: Subject, seed) -> int:
    """Rank of the Jacobian over fresh batches, outputs times samples at least twice the parameters."""
    source = torch.Generator().manual_seed(seed + 5)
    count = sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        rows = copy.deepcopy(model)(case.inputs).numel()
    batches = []
    for _ in range(max(2, -(-2 * count // rows))):
        if case.inputs.is_floating_point():
            batches.append(torch.randn(case.inputs.shape, generator=source))
        else:
            batches.append(torch.randint(0, int(case.inputs.max()) + 1, case.inputs.shape, generator=source))
    return nullity(model, batches, mode=case.mode, threshold=1e-10)[0]


def main(first: int, last: int) -> None:
    torch.set_default_dtype(torch.float64)
    totals: Counter = Counter()
    for seed in range(first, last):
        outcome = examine(seed)
        totals.update(
            networks=1,
            false=len(outcome.false),
            nullity=outcome.nullity,
            missed=outcome.missed,
            over=max(0, outcome.explained - outcome.nullity),
            undecided=outcome.undecided,
        )
        if outcome.false or outcome.explained != outcome.nullity:
            print(
                seed,
                outcome.what,
                f"nullity {outcome.nullity}, explained {outcome.explained}",
                *outcome.false,
                flush=True,
            )
    print(dict(totals), f"missed {totals['missed'] / max(1, totals['nullity']):.2%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
