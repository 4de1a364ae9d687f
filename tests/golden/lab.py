"""Tables of `compare` and of the papers' studies, both at smoke size.

All of them hang on torch's seeded streams: on another torch than the one that wrote them only their keys are compared.
The studies are compared in `test_studies.py`, which runs them anyway.
"""

import math
import re
import tempfile
from functools import partial
from statistics import fmean

import normgauge as ng
from golden.pins import Subject, flatten

LAB = Subject("lab")

# Settings of `compare`. On plain kernels only dln's slopes and curvature moved by more than 2e-6, by up to 1.4e-3.
COMPARISONS = {
    "mlp on digits": {"model": "mlp", "norms": ("none", "batch", "layer")},
    "dln on gaussian": {"model": "dln", "norms": ("none", "batch"), "rates": (1e-3, 1e-2), "seeds": 1, "steps": 3},
}
COSTS = ("step_time", "memory", "seconds_to_target")
NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"


def compared(settings):
    with tempfile.TemporaryDirectory() as out:
        found = ng.compare(size="smoke", out=out, executor=1, progress=False, **settings)
    table = found.frame().astype(object).to_dict("records")
    return {
        "rows": {
            row["norm"]: {
                name: value for name, value in row.items() if not name.endswith(("_low", "_high")) and name not in COSTS
            }
            for row in table
        },
        "order": [row["norm"] for row in table],
        "runs": found.counts,
        "decided": found.decided,
        "answer": re.sub(NUMBER, "#", found.answer),
        "numbers of the answer": [float(number) for number in re.findall(NUMBER, found.answer)],
    }


# Study -> relative tolerance, and keys that have another. Training amplifies rounding, so another CPU's kernels move
# what is read after it: these are a few times what torch's plain kernels (ATEN_CPU_CAPABILITY=default) change.
STUDIES = {
    "conditioning": (1e-4,),
    "implicit-bias": (1e-4,),
    "margin": (1e-4,),
    "norm-conservation": (1e-4,),
    "rate-or-norm": (1e-4,),
    "recipe": (1e-4, ("accuracy", 0.1)),  # one sample more or less
    "saddle-escape": (1e-4,),
    "shift": (1e-4,),
    "trajectories": (1e-4,),
    "valley": (1e-4,),
    "learning-rate-range": (1e-4,),
    "bad-init": (1e-4,),
    "dropout": (1e-4,),
    "lp-norms": (1e-2, ("linf", 0.5)),  # the largest deviation of a batch is one sample's
    "performance": (1e-4, ("augmentation True", 0.1)),  # one sample more or less
    "smoothness": (1e-2,),
    "normalizer-zoo": (1e-4,),
    "covariate-shift": (1e-2,),
    "noisy-batchnorm": (1e-4,),
    "capacity": (1e-2, (r"criteria.*\.1$", 2e-2)),  # half widths of three seeds
    "generalization-bound": (1e-2, ("slopes seen|slope_seen|sum_seen", 0.15)),  # the steepest point found
    "variances": (1e-3, ("accuracy", 0.1)),
    "weight-norms": (1e-3, ("accuracy", 0.1)),
    "gradient-explosion": (1e-4, ("accuracy", 0.05)),
    "halfspace": (1e-4,),
    "inference-statistics": (1e-4,),
    "least-squares": (1e-4,),
    "one-hidden-layer": (1e-4, ("gradients", 1e-2)),  # of searches that stop at rounding
    "batch-size-width": (1e-4,),
    "gamma-sigma": (1e-4,),
    "norm-growth": (1e-3,),
    "pruning": (1e-4,),
    "robustness": (1e-4, ("output_change", 2e-2)),  # by a change that should do nothing
    "sphere-stability": (1e-2,),
    "overconfidence": (1e-3, ("accuracy", 0.1)),  # one sample more or less
    "spectral-noise": (1e-4, ("accuracy", 0.1)),  # one sample more or less
    "whole-spectrum": (1e-2, ("negative|steps", 0.1)),  # eigenvalues next to zero
    "depth-shift": (1e-2,),
    "failures": (1e-2, ("accuracy", 0.1)),
    "gradient-terms": (1e-3,),
}
# Readings that are rounding, and the arms of lp-norms in which 12 steps make anything of it.
LEFT_OUT = re.compile(
    r"law_error|equivalence_gap|_proof|sharpness_residual|difference between \(W, eta\)"
    r"|model dln, norm (l|batch).*(activation_mean)|model dln, norm l[1i]|criteria.*dln: log10 of training loss"
    r"|log10 of final training loss, batch over l1"
)


def study_values(result):
    """Means over seeds of each arm's readings, and the words and margins of a study's criteria."""
    names = sorted({row["reading"] for row in result.table.readings if row["layer"] is None})
    arms = {}
    for row in result.table.rows:
        knobs = ", ".join(f"{knob} {row[knob]}" for knob in result.about.knobs if knob in row)
        arms.setdefault(knobs, []).append(row)
    values = {
        "runs": len(result.table.trials),
        "criteria": {
            name: {"outcome": verdict.word, **{item.name: [item.value, item.tolerance] for item in verdict.evidence}}
            for name, verdict in result.verdicts.items()
        },
        "arms": {arm: {name: mean(rows, name) for name in names} for arm, rows in arms.items()},
    }
    return {name: value for name, value in flatten(values) if not LEFT_OUT.search(name)}


def mean(rows, name):
    values = [row[name] for row in rows if row.get(name) is not None]
    return fmean(values) if values else None


def reproduced(study):
    with tempfile.TemporaryDirectory() as out:
        return study_values(ng.reproduce(study, size="smoke", out=out, executor=1, progress=False))


for title, settings in COMPARISONS.items():
    pin = LAB.pin(f"compare, {title}", rel=1e-4, elsewhere=math.inf, loose=("rows.*(beta|distance|cosine|top)", 1e-2))
    pin(partial(compared, settings))
for study, (rel, *loose) in STUDIES.items():
    LAB.pin(f"study, {study}", rel=rel, elsewhere=math.inf, loose=next(iter(loose), None))(partial(reproduced, study))
