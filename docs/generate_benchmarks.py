# ruff: noqa: E501
"""Write docs/_generated/benchmarks.md from benchmarks/results/book.json: normgauge beside its peers, losses too."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADS = {
    "curvature": "Curvature: PyHessian, curvlinops, hessian-eigenthings, BackPACK",
    "optimizers": "Steps on spheres: geoopt, AdamP",
    "doctor": "Faults: torch-audit",
    "privacy": "Mixed rows: Opacus' validator",
}
WORDS = {
    "curvature": "An eigenvalue counts as reached where its true residual, computed alike for all, is below 1e-2; a faster row that says *not converged* returned another number. Settings of the peers are those an expert would choose; their defaults are on the page of [curvature](../instruments/curvature.md).",
    "optimizers": "One call of `step` on given gradients, without the forward and backward pass.",
    "doctor": "The faults are [ours](doctor-benchmark.md), so the count favours us; torch-audit looks without running the network and is faster for it, and finds things that are not about normalization (hardware, data layout), which are not counted here.",
    "privacy": "Truth is measured: other rows of the batch are changed, and the outputs of the first ones compared. Opacus reads a list of module types; the doctor runs the network.",
}


def verdict(row):
    if row["tool"].startswith("normgauge") or row["ratio"] == 1.0:
        return ""
    low, high = row["low"], row["high"]
    if low is None:
        low = high = row["ratio"]
    if row["tool"] == "one gradient" or row["tool"].startswith("torch "):
        return "baseline"
    return "slower than us" if low > 1 else "**faster than us**" if high < 1 else "cannot tell"


def page():
    document = json.loads((ROOT / "benchmarks" / "results" / "book.json").read_text())
    sections = document["sections"]
    rows = [row for section in sections.values() for row in section["rows"]]
    words = [verdict(row) for row in rows]
    lost = [row for row, word in zip(rows, words, strict=True) if "faster" in word]
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    lines = [
        "# normgauge beside its peers",
        "",
        f"`make bench` makes an environment with the peers, runs every task interleaved and writes this page. {document['machine']}; {versions}.",
        "Times are processor seconds of one thread, a ratio is the peer's time over ours within one round: above 1 we are faster.",
        "In brackets the interval of the median ratio over rounds.",
        "",
        f"Of {sum(bool(w) and w != 'baseline' for w in words)} comparisons in time, peers are slower in {sum(w == 'slower than us' for w in words)} and faster in {len(lost)}"
        + (
            ": "
            + "; ".join(f"{row['tool']} ({row['task']}, {row['problem']}, {row['ratio']:.2g}x)" for row in lost)
            + "."
            if lost
            else "."
        ),
        "",
    ]
    for name, section in sections.items():
        lines += [
            f"## {HEADS[name]}",
            "",
            WORDS[name],
            "",
            f"*{section['date']}, load {section['load']} at the start.*",
            "",
        ]
        lines += ["| problem | task | tool | seconds | ratio | | |", "|---|---|---|---|---|---|---|"]
        for row in section["rows"]:
            span = "" if row["low"] is None else f" [{row['low']:.3g}, {row['high']:.3g}]"
            lines.append(
                f"| {row['problem']} | {row['task']} | {row['tool']} | {row['seconds']:.3g} | {row['ratio']:.3g}{span} | {verdict(row)} | {row['note']} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "_generated" / "benchmarks.md").write_text(page(), encoding="utf-8")
