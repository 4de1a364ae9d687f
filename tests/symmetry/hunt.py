"""The hunt: random networks, each certificate tried anew without the search's own code, and the nullity written out.

`PYTHONPATH=src:tests python tests/symmetry/hunt.py 0 1000 FILE` prints the counts by kind; `make test-all` runs it.
Outcomes are appended to FILE as they come, and those it holds already are not made again.
"""

import copy
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.func import functional_call

import normgauge as ng
from reference.symmetry import clear_gap, fibre_walk, nullity
from symmetry.zoo import Subject, generic_point, set_eps, subject

HOLDS = 1e-8  # relative movement of the outputs, in float64
COUNTED = ("exact", "exact_without_eps", "batch_statistics_only")
SPREADS = (1.7, 1.0, 3.0, 1.7, 5.0, 0.6, 2.3, 1.0, 4.0, 1.7, 10.0, 3.0)  # of points: at some, units never fire or bend


@dataclass
class Outcome:
    seed: int
    kind: str
    what: str
    nullity: int = 0
    explained: int = 0
    undecided: int = 0
    fibre: int = 0  # of the explained: without closed form
    unjudged: int = 0  # of these: no point had as few null directions, or no walk converged there
    false: list = field(default_factory=list)
    seconds: float = 0.0

    @property
    def missed(self):
        return max(0, self.nullity - self.explained)


def search(case: Subject):
    data = (case.inputs, torch.zeros(len(case.inputs)))
    objective = ng.Objective(case.model, lambda out, _: out.square().mean(), data, mode=case.mode)
    return ng.symmetries(objective, walk=True)


def draw(case: Subject, source, size=1.0):
    """Draw other inputs."""
    if case.inputs.is_floating_point():
        return size * torch.randn(case.inputs.shape, generator=source)
    return torch.randint(0, int(case.inputs.max()) + 1, case.inputs.shape, generator=source)


def draw_batches(model, case: Subject, source):
    """Draw batches with two and a half times as many outputs as parameters, or more; every second one is larger.

    In train mode sixteen at least: where a layer is linear but for its statistics, a batch tells little. Larger inputs
    wake units that are silent or never bend.
    """
    with torch.no_grad():
        rows = copy.deepcopy(model)(case.inputs).numel()
    few, count = 16 if case.mode == "train" else 4, sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [draw(case, source, 1.0 + 2 * (k % 2)) for k in range(max(few, -(-5 * count // (2 * rows))))]


def fibre_moves(double, bare, case: Subject, result, family, seed):
    """How far fresh outputs move over a walk in the settings that the status claims, all at once; None if none decides.

    Infinite where fewer directions are null in all of them. Where more are, some unit is silent on these data and
    others would wake it: the next point is asked.
    """
    rest = [f for f in result.families if f.status in COUNTED and f.counted and f.kind != "fibre"]
    models = [double, bare] if family.status == "exact" else [bare]
    twins = [(model, case.mode) for model in models]
    if case.mode == "train" and family.status != "batch_statistics_only":
        twins.append((models[0], "eval"))
    for number, spread in enumerate(3 * SPREADS):
        source, point = torch.Generator().manual_seed(seed + number), generic_point(double, seed + number, spread)
        batches = draw_batches(double, case, source)
        count, moved = fibre_walk(twins, batches, draw(case, source), rest, point, unobserved=result.unobserved)
        if count is not None and count < family.size:
            return float("inf")
        if count == family.size and moved < float("inf"):
            return moved
    return None


def moves(model, case: Subject, family, seed):
    """How far outputs move under a finite change at a generic point, on data and factors the search did not use."""
    source = torch.Generator().manual_seed(seed)
    point = generic_point(model, seed)
    inputs = draw(case, source)
    amounts = 1.7 * torch.randn(len(family), generator=source)
    matrix = family.kind == "matrix"
    after = family.act_randomly(dict(point), source) if matrix else family.act(dict(point), amounts)
    with torch.no_grad():
        first, second = (functional_call(copy.deepcopy(model), values, (inputs,)) for values in (point, after))
    return float((first - second).abs().max() / first.abs().max())


def examine(seed: int, case: Subject | None = None) -> Outcome:
    """Search one network (that of the seed, or another) and judge what came back."""
    case = subject(seed) if case is None else case
    outcome, start = Outcome(seed, case.kind, case.what), time.perf_counter()
    result = search(case)
    double = set_eps(copy.deepcopy(case.model).double().train(case.mode == "train"))
    bare = set_eps(copy.deepcopy(double), 1e-30)
    for family in result.families:
        if family.status == "undecided":
            outcome.undecided += len(family)
        elif family.status in COUNTED and family.counted:
            model = double if family.status == "exact" else bare
            if family.kind == "fibre":
                outcome.fibre += family.size
                moved = fibre_moves(double, bare, case, result, family, seed + 7)
                outcome.unjudged += family.size if moved is None else 0
            else:
                moved = max(moves(model, case, family, seed + 7 * k) for k in range(2))
            if moved is not None and not moved < HOLDS:
                outcome.false.append((family.status, family.describe(), moved))
    outcome.explained = result.dimension + result.matrix_dimension + sum(result.unobserved.values())
    outcome.nullity, seen, blurred, walked = 10**9, [], [], copy.deepcopy(bare)
    # a point may have units that are dead or never bend: the generic rank is the largest, and comes three times
    for number, spread in enumerate(SPREADS):
        enough = len(seen) >= (3 if outcome.fibre else 1)  # fewer directions elsewhere would be a false count
        if enough and (outcome.nullity == outcome.explained or seen.count(min(seen)) > 2):
            break
        with torch.no_grad():
            for name, value in generic_point(bare, seed + 100 + number, spread).items():
                walked.get_parameter(name).copy_(value)
        count, clear = dense_nullity(walked, case, seed)
        (seen if clear else blurred).append(count)
        outcome.nullity = min(seen or blurred)
    outcome.seconds = time.perf_counter() - start
    return outcome


def dense_nullity(model, case: Subject, seed) -> tuple[int, bool]:
    """Nullity of the Jacobian over fresh batches, two and a half times as many of their outputs as parameters.

    And whether rounding leaves it clear: saturated units before a norm without eps may lift null singular values.
    """
    source = torch.Generator().manual_seed(seed + 5)
    batches, count = draw_batches(model, case, source), sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows = copy.deepcopy(model)(case.inputs).numel()
    # combinations of all outputs: a few of the outputs themselves may leave a row of the head unread
    mix = lambda: torch.randn(-(-5 * count // (2 * len(batches))), rows, generator=source)  # noqa: E731
    forward = lambda twin, inputs: mix() @ twin(inputs).reshape(-1)  # noqa: E731
    count, sigma = nullity(model, batches, mode=case.mode, threshold=1e-10, forward=forward)
    return count, clear_gap(sigma)


def hunt(first: int, last: int, path: Path | None = None) -> list[Outcome]:
    """Examine the networks of these seeds, apart from those whose outcome the file holds."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    outcomes = {entry["seed"]: Outcome(**entry) for entry in map(json.loads, lines)}
    for seed in range(first, last):
        if seed not in outcomes:
            outcomes[seed] = examine(seed)
            if path is not None:
                with path.open("a") as file:
                    print(json.dumps(asdict(outcomes[seed])), file=file)
    return [outcomes[seed] for seed in range(first, last)]


def table(outcomes: list[Outcome]) -> str:
    """Return the counts by kind, one line each, and of all."""
    totals: dict[str, Counter] = {}
    for outcome in outcomes:
        for kind in (outcome.kind, "all"):
            totals.setdefault(kind, Counter()).update(
                networks=1,
                false=len(outcome.false),
                nullity=outcome.nullity,
                missed=outcome.missed,
                over=max(0, outcome.explained - outcome.nullity),
                fibre=outcome.fibre,
                unjudged=outcome.unjudged,
                undecided=outcome.undecided,
                seconds=round(outcome.seconds),
            )
    return "\n".join(
        f"{kind:13}" + " ".join(f"{name} {number}" for name, number in counts.items())
        + f" missed {counts['missed'] / max(1, counts['nullity']):.2%}"
        for kind, counts in sorted(totals.items(), key=lambda item: item[0] == "all")
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    path = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    print(table(hunt(int(sys.argv[1]), int(sys.argv[2]), path)))
