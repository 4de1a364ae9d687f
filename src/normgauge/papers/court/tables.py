"""Reading study tables: one flat row per run (knobs, `seed`, readings) becomes one number per seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from normgauge.errors import DataError, explain

Rows = Sequence[Mapping[str, Any]]
Margins = Mapping[str, Sequence[float]]


def by_seed(rows: Rows, reading: str, **knobs: Any) -> dict[int, float]:
    """Return `reading` per seed among the rows whose knobs have these values.

    Raises:
        DataError: when two rows answer for the same seed: then a knob is missing from the question.

    Examples:
        >>> rows = [{"norm": "batch", "seed": 0, "loss": 0.5}, {"norm": "none", "seed": 0, "loss": 1.0}]
        >>> by_seed(rows, "loss", norm="none")
        {0: 1.0}
    """
    found: dict[int, float] = {}
    for row in rows:
        if all(row.get(name) == value for name, value in knobs.items()) and row.get(reading) is not None:
            if row["seed"] in found:
                raise DataError(
                    explain(
                        f"reading {reading!r}", "one row per seed", f"two for seed {row['seed']}", "Name more knobs"
                    )
                )
            found[row["seed"]] = float(row[reading])
    return found


def paired(rows: Rows, reading: str, left: str, right: str, *, knob: str = "norm", **where: Any) -> list[float]:
    """Return `reading(left) - reading(right)` on every seed both arms have.

    Examples:
        >>> rows = [{"norm": n, "seed": s, "loss": s + (n == "none")} for n in ("batch", "none") for s in (0, 1)]
        >>> paired(rows, "loss", "none", "batch")
        [1.0, 1.0]
    """
    a = by_seed(rows, reading, **{knob: left}, **where)
    b = by_seed(rows, reading, **{knob: right}, **where)
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]


def paired_log10(rows: Rows, reading: str, left: str, right: str, *, knob: str = "norm", **where: Any) -> list[float]:
    """Return `log10(reading(left) / reading(right))` on every seed both arms have: orders of magnitude between them."""
    logs = [{**row, reading: math.log10(row[reading])} for row in rows if row.get(reading) is not None]
    return paired(logs, reading, left, right, knob=knob, **where)


def best_by_seed(rows: Rows, knob: str, *, by: str, **knobs: Any) -> dict[int, Any]:
    """Return, per seed, the value of `knob` whose run has the best `by`, among the rows whose knobs have these values.

    For claims about the best value itself; `at_best` tunes a knob away. Failed runs are left out, and of equals the
    smallest value is taken, whatever the order of the rows.

    Args:
        rows: one per run.
        knob: what is asked for.
        by: the reading it is chosen by, larger is better; of validation data, so that the test stays a test.
        **knobs: which rows.

    Examples:
        >>> rows = [{"decay": d, "seed": s, "fit": -abs(d - s)} for d in (2, 1, 0) for s in (0, 1)]
        >>> best_by_seed(rows, "decay", by="fit")
        {0: 0, 1: 1}
    """
    asked = [row for row in rows if all(row.get(name) == value for name, value in knobs.items())]
    whole = [row for row in asked if row.get("status", "ok") == "ok" and row.get(by) is not None]
    best: dict[int, Mapping[str, Any]] = {}
    for row in sorted(whole, key=lambda row: (row["seed"], row[knob])):
        if row["seed"] not in best or row[by] > best[row["seed"]][by]:
            best[row["seed"]] = row
    return {seed: row[knob] for seed, row in best.items()}


def at_best(rows: Rows, knob: str, *, by: str, within: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the rows whose `knob` has the value with the best mean of `by`, chosen apart for each cell of `within`.

    So a knob that was compared answers as one that was tuned. A failed run counts as worst; of equal values the first
    in sorted order wins, whatever run finished first.

    Args:
        rows: one per run.
        knob: what is tuned.
        by: the reading it is tuned by, larger is better; of validation data, so that the test stays a test.
        within: the knobs whose combinations are the cells.

    Examples:
        >>> rows = [{"norm": "none", "lr": r, "seed": s, "fit": r * (s + 1)} for r in (1, 2) for s in (0, 1)]
        >>> [(row["lr"], row["seed"]) for row in at_best(rows, "lr", by="fit", within=["norm"])]
        [(2, 0), (2, 1)]
    """
    scores: dict[tuple[Any, ...], dict[Any, list[float]]] = {}
    for row in rows:
        failed = row.get("status", "ok") != "ok" or row.get(by) is None
        cell = scores.setdefault(tuple(row.get(name) for name in within), {})
        cell.setdefault(row.get(knob), []).append(-math.inf if failed else float(row[by]))
    best = {}
    for name, settings in scores.items():
        means = {setting: fmean(values) for setting, values in settings.items()}
        best[name] = max(sorted(means, key=repr), key=means.__getitem__)
    return [row for row in rows if row.get(knob) == best[tuple(row.get(name) for name in within)]]
