"""What the report's rows mean, by plain loops over every run and reading."""

import math


def curve(tables, metric):
    """`{(arm, setting, step): (mean, low, high, n)}` over the runs that have a finite value there."""
    found = {}
    for run in tables.runs:
        for step in {r["step"] for r in tables.readings if r["run"] == run["id"]}:
            here = [
                r["value"]
                for r in tables.readings
                if r["run"] == run["id"] and r["step"] == step and r["name"] == metric and math.isfinite(r["value"])
            ]
            if here:
                key = (run["spec"]["norm"], f"lr {run['spec']['lr']:.6g}", step)
                found.setdefault(key, []).append(sum(here) / len(here))
    return {key: (sum(v) / len(v), min(v), max(v), len(v)) for key, v in found.items()}


def final(tables, metric):
    """`{(arm, lr): (mean of last values of ok runs or None, failed, runs)}`."""
    found = {}
    for norm in {run["spec"]["norm"] for run in tables.runs}:
        for rate in {run["spec"]["lr"] for run in tables.runs}:
            runs = [r for r in tables.runs if r["spec"]["norm"] == norm and r["spec"]["lr"] == rate]
            last = []
            for run in runs:
                mine = [r for r in tables.readings if r["run"] == run["id"] and r["name"] == metric]
                mine = [r for r in mine if math.isfinite(r["value"])]
                if run["status"] == "ok" and mine:
                    last.append(max(mine, key=lambda r: r["step"])["value"])
            mean = sum(last) / len(last) if last else None
            found[norm, rate] = (mean, sum(r["status"] != "ok" for r in runs), len(runs))
    return found
