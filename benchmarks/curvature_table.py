"""Write the tables of benchmarks/results/curvature.json into docs/instruments/curvature.md, between its two marks."""

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "instruments" / "curvature.md"

PROBLEMS = {
    "mlp": "MLP 3072-512-512-512-10 (2.1 million parameters), batch 128",
    "mlp-early": "The same MLP hardly trained: many close eigenvalues",
    "resnet": "ResNet-18 for 32x32 images (11.2 million parameters), batch 8, eval mode (peers fail in train mode)",
}
TASKS = {
    "hvp": "One Hessian product, everything prepared (ratio: to one gradient)",
    "top1": "Largest eigenvalue",
    "top5": "Five largest eigenvalues",
    "top1_once": "Largest eigenvalue, settings that ran once (an earlier state of normgauge)",
    "top5_once": "Five largest eigenvalues, settings that ran once (an earlier state of normgauge)",
    "slq": "Lanczos quadrature, 50 steps, one probe",
    "trace": "Trace, 20 probes",
    "memory": "Peak resident memory of the five largest eigenvalues",
}


def table(task, rows):
    """Return one task's rows as a Markdown table."""
    if task == "memory":
        base = rows["baseline"]["peak_mib"]
        lines = ["| tool | peak MiB | above a plain gradient's process |", "|---|---|---|"]
        return lines + [f"| {n} | {r['peak_mib']:.0f} | {r['peak_mib'] - base:.0f} |" for n, r in rows.items()]
    lines = [
        "| tool | median s | ratio | products | largest true residual | repetitions |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        worst = f"{max(row['residuals']):.1e}" if row.get("residuals") else "-"
        lines.append(
            f"| {name} | {row['median_seconds']:.3g} | {row['median_ratio']:.2f} | {row.get('products') or '-'} "
            f"| {worst} | {row['repetitions']} |"
        )
    return lines


def main():
    """Rewrite the page."""
    document = json.loads((HERE / "results" / "curvature.json").read_text())
    lines = []
    for name, title in PROBLEMS.items():
        lines += [f"#### {title}", ""]
        for task, heading in TASKS.items():
            if task in document.get(name, {}):
                lines += [f"{heading}:", "", *table(task, document[name][task]), ""]
    marked = "<!-- tables -->\n\n" + "\n".join(lines) + "\n<!-- /tables -->"
    text = re.sub(r"<!-- tables -->.*<!-- /tables -->", lambda _: marked, PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
