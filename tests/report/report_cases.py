"""Runs and document a study would store, made up: six normalizers, five learning rates, three seeds, some diverged."""

import dataclasses
import math
import random

from normgauge.documents import Arm, ComparisonDocument, Metric, Question
from normgauge.records import Provenance, Run
from normgauge.report._content import PageContent
from normgauge.stats import Interval
from normgauge.store import spec_id

NORMS = ["none", "batch", "layer", "group", "instance", "weight"]
RATES = [0.01, 0.03, 0.1, 0.3, 1.0]
SPEED = {"none": 0.35, "batch": 1.0, "layer": 0.9, "group": 0.85, "instance": 0.6, "weight": 0.55}
LIMIT = {"none": 0.1, "batch": 1.0, "layer": 0.3, "group": 0.3, "instance": 0.3, "weight": 0.1}
METRICS = (
    Metric(
        "test_accuracy",
        "Test accuracy",
        "Share of held-out digits that are named right, at the last step.",
        "%",
        "higher",
        bounds=(0.0, 1.0),
    ),
    Metric(
        "train_loss",
        "Training loss",
        "Mean cross-entropy over the training batch.",
        better="lower",
        bounds=(0.0, None),
    ),
    Metric(
        "steps_to_loss",
        "Steps to loss 0.5",
        "First measured step at which the training loss is 0.5 or less.",
        "steps",
        "lower",
        bounds=(0.0, None),
    ),
    Metric("effective_beta", "Effective beta", "Largest change of the gradient per distance moved along it."),
    Metric("top_eigenvalue", "Top Hessian eigenvalue"),
)


def realistic(seeds=3, steps=12, decided=True):
    """The whole of a stored comparison."""
    draw = random.Random(0)
    runs = [_run(draw, norm, rate, seed, steps) for norm in NORMS for rate in RATES for seed in range(seeds)]
    runs[4].status = "error"
    runs[4].sentence = "RuntimeError in step 3: out of memory while measuring the spectrum."
    return PageContent(runs, _document(runs, decided))


def small(**settings):
    """The same with two metrics, one seed and four steps: enough for every part of the page."""
    content = realistic(**{"seeds": 1, "steps": 4, **settings})
    for run in content.runs:
        run.readings = [row for row in run.readings if row.name in ("train_loss", "test_accuracy")]
    return content


def replaced(content, **changes):
    """The same runs, with a document that differs."""
    return PageContent(content.runs, dataclasses.replace(content.document, **changes))


def _run(draw, norm, rate, seed, steps):
    spec = {"norm": norm, "lr": rate, "seed": seed, "model": "vgg8", "data": "digits", "steps": 220, "batch": 128}
    fate = 6 if rate > LIMIT[norm] else None
    pace = SPEED[norm] * rate**0.45 * draw.uniform(0.85, 1.15)
    run = Run(spec, seconds=draw.uniform(1.5, 3.5))
    for k in range(steps):
        if fate is not None and k > fate:
            break
        loss = 2.3 * math.exp(-pace * k) + 0.004 if fate is None else 2.3 * math.exp(0.3 * k * rate)
        values = {
            "train_loss": loss * draw.uniform(0.92, 1.08),
            "test_accuracy": min(0.992, 1 - 0.9 * math.exp(-1.1 * pace * k) - 0.01 * draw.random()),
            "effective_beta": (40 if norm == "none" else 9) * draw.uniform(0.6, 1.5) / (0.3 + loss),
            "gradient_predictiveness": 0.2 * draw.uniform(0.7, 1.4) + loss / 5,
            "top_eigenvalue": (90 if norm == "none" else 22) * draw.uniform(0.8, 1.2) * (1 - math.exp(-0.4 * k) + 0.1),
            "loss_variation": 0.5 * loss * draw.uniform(0.5, 1.5),
        }
        for name, value in values.items():
            run.record(k * 20, name, value)
        for layer in ("conv1", "conv2", "head"):
            run.record(k * 20, "weight_norm", 4 + 0.1 * k * rate + draw.random(), layer=layer)
    if fate is not None:
        run.record((fate + 1) * 20, "train_loss", math.nan)
        run.status, run.sentence = "diverged", f"Loss above 10 times its start at step {20 * fate + 7} (lr {rate})."
    return run


def _arm(norm, runs):
    best = LIMIT[norm]
    mine = [run for run in runs if run.spec["norm"] == norm and run.spec["lr"] == best]
    values = {}
    for name in ("test_accuracy", "train_loss", "effective_beta", "top_eigenvalue"):
        finals = [run.last(name) for run in mine]
        middle = sum(finals) / len(finals)
        spread = 1.5 * (max(finals) - min(finals)) / 2
        values[name] = Interval(middle, middle - spread, middle + spread, len(finals))
    if norm != "none":
        values["steps_to_loss"] = Interval(60 / SPEED[norm], math.nan, math.nan, 1)
    remarks = ("norm none: never reached loss 0.5.",) if norm == "none" else ()
    return Arm({"norm": norm}, {"lr": best}, len(mine), values, f">= {best:g}", remarks)


def _document(runs, decided):
    return ComparisonDocument(
        question=Question(
            name="compare",
            title="Six normalizers on digits",
            question="Which normalizer should this network use, at what learning rate, and by what margin?",
            scientific={"norm": tuple(NORMS)},
            nuisance={"lr": tuple(RATES)},
            fixed={"model": "vgg8", "data": "digits", "steps": 220, "batch": 128, "momentum": 0.9},
            seeds=3,
            tuning_seeds=3,
            cite=("santurkar2018",),
        ),
        metrics=METRICS,
        arms=tuple(_arm(norm, runs) for norm in NORMS),
        answer="Use batch norm at learning rate 1: test accuracy 98.7 % against 97.9 % for layer norm, the "
        "next best (difference 0.8 points, 95 % interval 0.3 to 1.3, 3 seeds).",
        decided=decided,
        runs=tuple(spec_id(run.spec) for run in runs),
        provenance=Provenance(
            python="3.11.2",
            versions={"normgauge": "0.1.0.dev0", "torch": "2.13.0", "numpy": "2.4.6"},
            machine={"system": "Linux", "processor": "x86_64", "cores": 2, "device": "cpu"},
            revision="f523741",
        ),
        command="normgauge compare --data digits --model vgg8 --seeds 3",
        finished="2026-01-02T10:00:00+00:00",
    )
