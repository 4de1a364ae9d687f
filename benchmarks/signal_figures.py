"""Draw docs/instruments/trainable-depth.svg and docs/instruments/theorem-20.svg from measurements made here.

PYTHONPATH=src python benchmarks/signal_figures.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import torch
from torch import Tensor, nn

import normgauge as ng
from normgauge.charts import svg, themed

OUT = Path(__file__).parent.parent / "docs" / "instruments"
WIDTH, LAYERS = 192, 40


class Skip(nn.Module):
    """x + body(x)."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the block."""
        return x + self.body(x)


def networks() -> dict[str, nn.Module]:
    """Return four networks of the same depth."""
    w, c = WIDTH, 32
    plain = [m for _ in range(LAYERS) for m in (nn.Linear(w, w), nn.BatchNorm1d(w), nn.ReLU())]
    conv = [m for i in range(LAYERS) for m in (nn.Conv2d(c if i else 3, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())]
    residual = [Skip(nn.BatchNorm1d(w), nn.ReLU(), nn.Linear(w, w)) for _ in range(LAYERS - 1)]
    block = [Skip(nn.LayerNorm(w), nn.Linear(w, w), nn.GELU(), nn.Linear(w, w)) for _ in range(LAYERS // 2)]
    return {
        "MLP, BatchNorm, ReLU": nn.Sequential(*plain, nn.Linear(w, 10)),
        "convolutions, BatchNorm, ReLU": nn.Sequential(*conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10)),
        "residual, BatchNorm, ReLU": nn.Sequential(nn.Linear(w, w), *residual, nn.Linear(w, 10)),
        "pre-norm, LayerNorm, GELU": nn.Sequential(nn.Linear(w, w), *block, nn.Linear(w, 10)),
    }


def depth_rows() -> list[dict[str, Any]]:
    """Return measured and predicted squared gradients over depth."""
    rows = []
    torch.manual_seed(0)
    for name, model in networks().items():
        inputs = torch.randn(8, 3, 8, 8) if name.startswith("conv") else torch.randn(64, WIDTH)
        found = ng.trainable_depth(model, inputs)
        print(name, found.depth, found.predicted, found.growth, found.correlation, flush=True)
        middle = [sum(map(math.log, values)) / len(values) for values in (found.gradients, found.theory)]
        for series, values, level in zip(("measured", "theory"), (found.gradients, found.theory), middle, strict=True):
            rows += [
                {"network": name, "series": series, "layer": i, "value": math.exp(math.log(value) - level)}
                for i, value in enumerate(values)
            ]
    return rows


def partition_rows() -> list[dict[str, Any]]:
    """Return the bound of S2 Theorem 20 over the number of centres, on two clusters."""
    source = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (20_000,), generator=source)
    inputs = (2.0 * labels - 1)[:, None] + 0.01 * torch.randn(20_000, 1, generator=source)
    model = nn.Linear(1, 2, bias=False)
    model.weight.data.copy_(torch.tensor([[-2.0], [2.0]]))
    rows = []
    for count in (1, 2, 5, 13, 30, 80):
        bound = ng.generalization(model, (inputs, labels), partition=count)["S2 Theorem 20"]
        rows.append({"centres": count, "bound": min(bound.upper, 1.0)})
    chosen = ng.generalization(model, (inputs, labels))["S2 Theorem 20"].upper
    print(rows, chosen, flush=True)
    return [
        *({**row, "series": "one partition"} for row in rows),
        *({"centres": c, "bound": chosen, "series": "best of four"} for c in (1, 80)),
    ]


def write(name: str, chart: Any, title: str) -> None:
    """Write a picture as every page has it: themed, for light and dark."""
    (OUT / name).write_text(svg(themed(chart), title) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and draw."""
    base = alt.Chart(pd.DataFrame(depth_rows())).encode(
        x=alt.X("layer", title="affine layer, from the input"),
        y=alt.Y(
            "value", title="squared gradient", scale=alt.Scale(type="log"), axis=alt.Axis(format=".0e", tickCount=5)
        ),
        color=alt.Color("network", title=None, legend=alt.Legend(labelLimit=260)),
    )
    dots = base.mark_point(size=14, filled=True, opacity=0.6).transform_filter("datum.series == 'measured'")
    lines = base.mark_line().transform_filter("datum.series == 'theory'")
    title = "Squared gradients over depth: measured (dots) and predicted at infinite width (lines)"
    write("trainable-depth.svg", alt.layer(lines, dots).properties(width=420, height=240, title=title), title)
    chart = alt.Chart(pd.DataFrame(partition_rows())).mark_line(point=True)
    chart = chart.encode(
        x=alt.X("centres", scale=alt.Scale(type="log"), title="centres of the partition"),
        y=alt.Y("bound", title="bound of the expected loss"),
        color=alt.Color("series", title=None),
    )
    title = "S2 Theorem 20 on two clusters of 20,000 samples"
    write("theorem-20.svg", chart.properties(width=380, height=200, title=title), title)


if __name__ == "__main__":
    main()
