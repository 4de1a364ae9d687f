"""Tables a study would store, made up: six normalizers, five learning rates, three seeds, some of them diverged."""

import math
import random

from normgauge.report import ReportTables

NORMS = ["none", "batch", "layer", "group", "instance", "weight"]
RATES = [0.01, 0.03, 0.1, 0.3, 1.0]
SPEED = {"none": 0.35, "batch": 1.0, "layer": 0.9, "group": 0.85, "instance": 0.6, "weight": 0.55}
LIMIT = {"none": 0.1, "batch": 1.0, "layer": 0.3, "group": 0.3, "instance": 0.3, "weight": 0.1}
COLUMNS = [
    {
        "name": "test_accuracy",
        "title": "Test accuracy",
        "unit": "%",
        "better": "higher",
        "help": "Share of held-out digits that are named right, at the last step.",
    },
    {
        "name": "train_loss",
        "title": "Training loss",
        "unit": "",
        "better": "lower",
        "help": "Mean cross-entropy over the training batch.",
    },
    {
        "name": "steps_to_loss",
        "title": "Steps to loss 0.5",
        "unit": "steps",
        "better": "lower",
        "help": "First measured step at which the training loss is 0.5 or less.",
    },
    {
        "name": "effective_beta",
        "title": "Effective beta",
        "unit": "",
        "better": None,
        "help": "Largest change of the gradient per distance moved along it.",
    },
    {"name": "top_eigenvalue", "title": "Top Hessian eigenvalue", "unit": "", "better": None, "help": ""},
]


def realistic(seeds=3, steps=12, decided=True):
    """The whole of a stored comparison."""
    draw = random.Random(0)
    runs, readings = [], []
    for norm in NORMS:
        for rate in RATES:
            for seed in range(seeds):
                run, rows = _run(draw, norm, rate, seed, steps)
                runs.append(run)
                readings += rows
    runs[4] |= {"status": "error", "sentence": "RuntimeError in step 3: out of memory while measuring the spectrum."}
    return ReportTables(runs, readings, _documents(runs, readings, decided))


def small(**settings):
    """The same with two metrics, one seed and four steps: enough for every part of the page."""
    tables = realistic(**{"seeds": 1, "steps": 4, **settings})
    kept = [row for row in tables.readings if row["name"] in ("train_loss", "test_accuracy")]
    return ReportTables(tables.runs, kept, tables.documents)


def _run(draw, norm, rate, seed, steps):
    identity = f"{draw.getrandbits(64):016x}"
    spec = {"norm": norm, "lr": rate, "seed": seed, "model": "vgg8", "data": "digits", "steps": 220, "batch": 128}
    fate = 6 if rate > LIMIT[norm] else None
    pace = SPEED[norm] * rate**0.45 * draw.uniform(0.85, 1.15)
    rows = []
    for k in range(steps):
        if fate is not None and k > fate:
            break
        loss = 2.3 * math.exp(-pace * k) + 0.004 if fate is None else 2.3 * math.exp(0.3 * k * rate)
        found = {
            "train_loss": loss * draw.uniform(0.92, 1.08),
            "test_accuracy": min(0.992, 1 - 0.9 * math.exp(-1.1 * pace * k) - 0.01 * draw.random()),
            "effective_beta": (40 if norm == "none" else 9) * draw.uniform(0.6, 1.5) / (0.3 + loss),
            "gradient_predictiveness": 0.2 * draw.uniform(0.7, 1.4) + loss / 5,
            "top_eigenvalue": (90 if norm == "none" else 22) * draw.uniform(0.8, 1.2) * (1 - math.exp(-0.4 * k) + 0.1),
            "loss_variation": 0.5 * loss * draw.uniform(0.5, 1.5),
        }
        for name, value in found.items():
            rows.append(_reading(identity, k * 20, name, value))
        for layer in ("conv1", "conv2", "head"):
            rows.append(_reading(identity, k * 20, "weight_norm", 4 + 0.1 * k * rate + draw.random(), layer))
    if fate is not None:
        rows.append(_reading(identity, (fate + 1) * 20, "train_loss", float("nan")))
    run = {"id": identity, "status": "ok", "sentence": "", "seconds": draw.uniform(1.5, 3.5), "spec": spec}
    if fate is not None:
        run |= {"status": "diverged", "sentence": f"Loss above 10 times its start at step {20 * fate + 7} (lr {rate})."}
    return run, rows


def _reading(run, step, name, value, layer=None):
    return {
        "run": run,
        "step": step,
        "name": name,
        "layer": layer,
        "value": value,
        "kind": "exact",
        "status": "ok" if math.isfinite(value) else "diverged",
    }


def _documents(runs, readings, decided):
    rows = []
    for norm in NORMS:
        best = LIMIT[norm]
        mine = {run["id"] for run in runs if run["spec"]["norm"] == norm and run["spec"]["lr"] == best}
        row = {
            "norm": norm,
            "lr": best,
            "n": len(mine),
            "stable_up_to": f">= {LIMIT[norm]:g}",
            "status": "ok",
            "note": "",
        }
        for name in ("test_accuracy", "train_loss", "effective_beta", "top_eigenvalue"):
            last = max(r["step"] for r in readings if r["run"] in mine and r["name"] == name)
            values = [r["value"] for r in readings if r["run"] in mine and r["name"] == name and r["step"] == last]
            middle = sum(values) / len(values)
            spread = 1.5 * (max(values) - min(values)) / 2
            row |= {name: middle, f"{name}_low": middle - spread, f"{name}_high": middle + spread}
        row["steps_to_loss"] = None if norm == "none" else round(60 / SPEED[norm])
        rows.append(row)
    rows[0]["note"] = "never reached loss 0.5"
    return {
        "study": {
            "name": "compare",
            "title": "Six normalizers on digits",
            "question": "Which normalizer should this network use, at what learning rate, and by what margin?",
            "scientific": {"norm": NORMS},
            "nuisance": {"lr": RATES},
            "fixed": {"model": "vgg8", "data": "digits", "steps": 220, "batch": 128, "momentum": 0.9},
            "seeds": 3,
            "cite": ["santurkar2018"],
        },
        "comparison": rows,
        "columns": COLUMNS,
        "answer": {
            "sentence": "Use batch norm at learning rate 1: test accuracy 98.7 % against 97.9 % for layer norm, the "
            "next best (difference 0.8 points, 95 % interval 0.3 to 1.3, 3 seeds).",
            "decided": decided,
        },
        "chosen": {norm: {"lr": LIMIT[norm]} for norm in NORMS},
        "provenance": {
            "versions": {"normgauge": "0.1.0.dev0", "torch": "2.13.0", "numpy": "2.4.6", "python": "3.11.2"},
            "machine": {"system": "Linux", "processor": "x86_64", "cores": 2, "device": "cpu"},
            "revision": "f523741",
            "started": "2026-01-02 10:00:00",
            "command": "normgauge compare --data digits --model vgg8 --seeds 3 --out runs.sqlite",
        },
    }
