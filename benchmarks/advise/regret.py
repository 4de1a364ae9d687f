"""What following `ng.advise` costs against the best point of each problem's grid, and gains on the default.

`python -m benchmarks.advise.regret GRID.jsonl OUT` reads the grid that `zoo` has run, asks for advice on training and
validation data (40 runs), and trains default, best grid point (by its validation accuracy) and advice on five seeds
that neither has seen, judged on test data. All is kept in OUT: call again and only what is missing runs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

import normgauge as ng
from benchmarks.advise import zoo
from normgauge.lab.data import Dataset
from normgauge.stats import paired_difference

BUDGET = "40 runs"
SEEDS = range(100, 105)


def advised(problem: zoo.Problem, out: Path) -> dict[str, Any]:
    """Return the setting `ng.advise` gives, and what it said."""
    train, validation, _ = zoo.data(problem.data)
    data = Dataset(problem.data, "classification", train, validation, validation, classes=10)  # no test data
    default, begin = problem.default, time.perf_counter()
    advice = ng.advise(
        problem.factory,
        data,
        loss=zoo.loss,
        optimizer=lambda model: problem.descent(model.parameters(), default["lr"], default["weight_decay"]),
        budget=BUDGET,
        steps=problem.steps,
        batch=problem.batch,
        norm=default["norm"],
        out=out / "runs" / problem.name.replace(" ", "-"),
    )
    setting = {"norm": advice.setting.norm, "lr": advice.setting.rate, "weight_decay": advice.setting.decay}
    return {"setting": setting, "text": str(advice), "seconds": time.perf_counter() - begin}


def best_point(problem: zoo.Problem, grid: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the grid's best setting by mean validation accuracy."""
    runs = [row for row in grid if row["problem"] == problem.name]
    return max(
        problem.grid(),
        key=lambda s: fmean([r["validation"] for r in runs if all(r[k] == v for k, v in s.items())] or [-1.0]),
    )


def row_of(problem: zoo.Problem, grid: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """Return one line of the table, run or kept."""
    file = out / f"{problem.name.replace(' ', '-')}.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    if "advice" not in kept:
        kept = {"advice": advised(problem, out), "scores": {}}
        file.write_text(json.dumps(kept))
    arms = {"default": problem.default, "best": best_point(problem, grid), "advice": kept["advice"]["setting"]}
    for setting in arms.values():
        runs = kept["scores"].setdefault(json.dumps(setting), {})
        for seed in SEEDS:
            if str(seed) not in runs:
                runs[str(seed)] = problem.run(setting, seed)["test"]
                file.write_text(json.dumps(kept))
    scores = {arm: {s: kept["scores"][json.dumps(setting)][str(s)] for s in SEEDS} for arm, setting in arms.items()}
    means = {arm: fmean(values.values()) for arm, values in scores.items()}
    gain = paired_difference(scores["advice"], scores["default"])
    worse = gain.high < 0
    return {
        "problem": problem.name, **means, "regret": means["best"] - means["advice"], "gain": str(gain),
        "room": means["best"] - means["default"], "worse than the default": worse,
        "settings": {arm: "{norm}, {lr:.3g}, {weight_decay:.3g}".format(**s) for arm, s in arms.items()},
    }  # fmt: skip


def main(grid_file: str, folder: str) -> None:
    """Run what is missing and print the table in Markdown."""
    torch.set_num_threads(1)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    grid = [json.loads(line) for line in Path(grid_file).read_text().splitlines()]
    seconds = {
        name: min(row["seconds"] for row in grid if row["problem"] == name) for name in {r["problem"] for r in grid}
    }
    rows = []
    for problem in sorted(zoo.available(), key=lambda p: seconds[p.name]):  # what is quick first
        rows.append(row_of(problem, grid, out))
        print(rows[-1], flush=True)
    print("| problem | default | best grid point | advice | regret | gain on the default |\n|---|---|---|---|---|---|")
    for r in rows:
        cells = [f"{r[arm]:.1f} ({r['settings'][arm]})" for arm in ("default", "best", "advice")]
        print(f"| {r['problem']} | {' | '.join(cells)} | {r['regret']:.1f} | {r['gain']} |")
    print(f"median regret {median(r['regret'] for r in rows):.2f} points of {len(rows)} problems; ", end="")
    print(f"room of 2 points or more on {sum(r['room'] >= 2 for r in rows)}; ", end="")
    print(f"worse than the default beyond its interval: {sum(r['worse than the default'] for r in rows)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
