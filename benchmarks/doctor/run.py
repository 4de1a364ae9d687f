"""Measure recall on seeded and historical faults, and false alarms on twins and on the clean zoo.

Usage: python -m benchmarks.doctor.run [faults] [zoo]; writes benchmarks/results/doctor.json and the table of the docs.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import normgauge as ng
from benchmarks.doctor import faults  # noqa: F401
from benchmarks.doctor.cases import CASES


def look(arguments):
    """Return the findings of a case."""
    arguments = dict(arguments)
    return ng.checkup(arguments.pop("model"), arguments.pop("batch"), **arguments)


def run_faults(names=None):
    """Return one row per case: found with its cause, and what the twin raised."""
    rows = []
    for name, case in CASES.items():
        if names and name not in names:
            continue
        sick, well = look(case.make(True)), look(case.make(False))
        hits = [f for f in sick if f.id == case.cause]
        rows.append({
            "case": name, "cause": case.cause, "historical": case.historical, "found": bool(hits),
            "severity": hits[0].severity if hits else "", "others": sorted({f.id for f in sick if f.severity != "info"} - {case.cause}),
            "twin_quiet": not any(f.id == case.cause for f in well),
            "twin_alarms": [f"{f.id} {f.severity} {f.where}: {f.evidence}" for f in well if f.severity != "info"],
        })  # fmt: skip
    return rows


def run_zoo(names=None):
    """Return one row per clean model: its errors and warnings."""
    from benchmarks.doctor.zoo import zoo

    rows = []
    for name, make in zoo().items():
        if names and name not in names:
            continue
        arguments = make()
        subject = arguments.pop("objective", None)
        found = ng.checkup(subject, **arguments) if subject is not None else look(arguments)
        alarms = [f for f in found if f.severity != "info"]
        rows.append({
            "model": name, "errors": sum(f.severity == "error" for f in alarms),
            "warnings": len({f.id for f in alarms if f.severity == "warning"}), "cost": found.cost.gradients_worth,
            "alarms": [f"{f.id} {f.severity} {f.where}: {f.evidence}" for f in alarms], "notes": sorted({f.id for f in found} - {f.id for f in alarms}),
        })  # fmt: skip
        sys.stderr.write(f"{rows[-1]}\n")
    return rows


def summary(faults_, models):
    """Return the headline numbers."""
    return {
        "faults": len(faults_),
        "historical": sum(bool(r["historical"]) for r in faults_),
        "recall": sum(r["found"] for r in faults_) / max(len(faults_), 1),
        "missed": [r["case"] for r in faults_ if not r["found"]],
        "twins_quiet": sum(r["twin_quiet"] for r in faults_),
        "models": len(models),
        "models_with_error": [r["model"] for r in models if r["errors"]],
        "models_with_two_warnings": [r["model"] for r in models if r["warnings"] > 1],
        "models_without_alarm": sum(not r["alarms"] for r in models),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    wanted = sys.argv[1:] or ["faults", "zoo"]
    path = Path("benchmarks/results/doctor.json")
    document = json.loads(path.read_text()) if path.exists() else {"faults": [], "zoo": []}
    if "faults" in wanted:
        document["faults"] = run_faults()
    if "zoo" in wanted:
        document["zoo"] = run_zoo()
    document["summary"] = summary(document["faults"], document["zoo"])
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["summary"], indent=1))
