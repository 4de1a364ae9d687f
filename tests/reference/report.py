"""What the report's rows mean, by plain loops over every run and reading."""

import math


def curve(runs, metric):
    """`{(arm, setting, step): (mean, low, high, n)}` over the runs that have a finite value there."""
    values = {}
    for run in runs:
        for step in {r.step for r in run.readings}:
            here = [r.value for r in run.readings if r.step == step and r.name == metric and math.isfinite(r.value)]
            if here:
                key = (run.spec["norm"], f"lr {run.spec['lr']:.6g}", step)
                values.setdefault(key, []).append(sum(here) / len(here))
    return {key: (sum(v) / len(v), min(v), max(v), len(v)) for key, v in values.items()}


def final(runs, metric):
    """`{(arm, lr): (mean of last values of ok runs or None, failed, runs)}`."""
    rows = {}
    for norm in {run.spec["norm"] for run in runs}:
        for rate in {run.spec["lr"] for run in runs}:
            mine = [run for run in runs if run.spec["norm"] == norm and run.spec["lr"] == rate]
            last = []
            for run in mine:
                readings = [r for r in run.readings if r.name == metric and math.isfinite(r.value)]
                if run.status == "ok" and readings:
                    last.append(max(readings, key=lambda r: r.step).value)
            mean = sum(last) / len(last) if last else None
            rows[norm, rate] = (mean, sum(run.status != "ok" for run in mine), len(mine))
    return rows
