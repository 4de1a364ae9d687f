"""GDNP on networks against SGD, AdamW and Shampoo, at equal numbers of gradient evaluations.

`python benchmarks/gdnp_networks.py [--cifar] [--seeds N]` writes benchmarks/results/gdnp_networks.json and draws
docs/optim/gdnp-networks.svg; without `--cifar` (after `normgauge data cifar10`) only the digits are run. Every
optimizer gets three rates and the same seeds, which fix initial weights and the order of the data; the rate is chosen
by the mean training loss at the end of the budget. `--only NAME` runs one optimizer and keeps the others' rows. A
gradient evaluation is one forward and backward pass over a batch:
GDNP makes two or more per step, three or more where its gain is searched.
The Shampoo here is the plain one: L^-1/4 G R^-1/4 with running factors, momentum 0.9 and the gradient's own size.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.lab.data.catalogue import open_known
from normgauge.records import format_table

HERE = Path(__file__).parent
Split = tuple[Tensor, Tensor, Tensor, Tensor]


class Shampoo(torch.optim.Optimizer):
    """Kronecker-factored preconditioning of matrices; other parameters get momentum SGD."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, every: int = 10) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Do one step."""
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state, g = self.state[p], p.grad
                if p.ndim > 1:
                    g = self._precondition(state, p.grad.flatten(1), group["every"]).reshape(p.shape)
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                p.sub_(buffer.mul_(group["momentum"]).add_(g), alpha=group["lr"])
        return loss

    @staticmethod
    def _precondition(state: dict[str, Any], g: Tensor, every: int) -> Tensor:
        sides = (g @ g.T, g.T @ g)
        if not state.get("sides"):
            state.update(sides=[torch.zeros_like(s) for s in sides], roots=[None, None], step=0)
        for i, side in enumerate(sides):
            state["sides"][i].mul_(0.95).add_(side, alpha=0.05)
            if state["step"] % every == 0:
                values, vectors = torch.linalg.eigh(state["sides"][i])
                values = (values.clamp_min(0) + 1e-4 * values[-1] + 1e-30) ** -0.25
                state["roots"][i] = (vectors * values) @ vectors.T
        state["step"] += 1
        turned = state["roots"][0] @ g @ state["roots"][1]
        return turned * (g.norm() / turned.norm().clamp_min(1e-30))


MAKERS: dict[str, tuple[tuple[float, ...], Callable[[nn.Module, float], torch.optim.Optimizer]]] = {
    "SGD": ((0.03, 0.1, 0.3), lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9)),
    "AdamW": ((1e-3, 3e-3, 1e-2), lambda m, lr: torch.optim.AdamW(m.parameters(), lr=lr)),
    "Shampoo": ((0.03, 0.1, 0.3), lambda m, lr: Shampoo(m.parameters(), lr)),
    "GDNP": ((0.1, 0.3, 1.0), lambda m, lr: ng.optim.GDNP(m, lr, gain="newton")),
    "GDNP, search": ((0.1, 0.3, 1.0), lambda m, lr: ng.optim.GDNP(m, lr, gain="search")),
}


def mlp(norm: bool) -> nn.Module:
    """Return a network for the digits."""
    norms = [nn.BatchNorm1d(64)] if norm else []
    layers = [nn.Linear(64, 64), *norms, nn.ReLU(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, *([nn.BatchNorm1d(64)] if norm else []), nn.ReLU(), nn.Linear(64, 10))


def cnn(norm: bool) -> nn.Module:
    """Return a small network for CIFAR-10."""
    layers: list[nn.Module] = []
    for a, b in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(a, b, 3, stride=2, padding=1), *([nn.BatchNorm2d(b)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def digits() -> Split:
    """Return training and test digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs, labels = inputs[order], labels[order]
    return inputs[:1297], labels[:1297], inputs[1297:], labels[1297:]


def cifar() -> Split:
    """Return 10,000 training and 2,000 test images of CIFAR-10, standardized."""
    images = open_known("cifar10")
    parts = [images.rows[first : first + count] for first, count in ((0, 10_000), (images.train, 2_000))]
    inputs = [(torch.tensor(part["pixels"]).float() / 255 - 0.45) / 0.25 for part in parts]
    labels = [torch.tensor(part["label"].astype("int64")) for part in parts]
    return inputs[0], labels[0], inputs[1], labels[1]


def batches(inputs: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random batches for ever."""
    while True:
        for part in torch.randperm(len(labels)).split(size):
            if len(part) == size:
                yield inputs[part], labels[part]


def train(make: Callable[[], nn.Module], data: Split, name: str, lr: float, seed: int, budget: int) -> dict[str, Any]:
    """Train until the budget of gradient evaluations is spent; return losses over it and the accuracy."""
    torch.manual_seed(seed)
    model = make()
    optimizer = MAKERS[name][1](model, lr)
    source = batches(data[0], data[1], 128)
    spent, curve, started = 0, [], time.process_time()
    while spent < budget:
        x, y = next(source)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            nonlocal spent
            spent += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = float(torch.as_tensor(optimizer.step(closure)).detach())
        curve.append((spent, loss))
        if not math.isfinite(loss):
            break
    seconds = time.process_time() - started
    tail = [loss for _, loss in curve[-max(1, len(curve) // 10) :]]
    model.eval()
    with torch.no_grad():
        accuracy = 100 * float((model(data[2]).argmax(1) == data[3]).float().mean())
    end = sum(tail) / len(tail)
    return {"loss": end if math.isfinite(end) else math.inf, "accuracy": accuracy, "seconds": seconds, "curve": curve}


def main() -> None:
    """Run, print, store, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="one optimizer")
    parser.add_argument("--damping", action="store_true", help="the digits at rate 1 for four dampings, nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.damping:
        dampings(options.seeds)
        return
    tasks: dict[str, tuple[Callable[[], nn.Module], Split, int]] = {}
    for norm in (True, False):
        tasks[f"digits, MLP, {'BatchNorm' if norm else 'no norm'}"] = (lambda norm=norm: mlp(norm), digits(), 200)
    if options.cifar:
        images = cifar()
        for norm in (True, False):
            tasks[f"CIFAR-10, CNN, {'BatchNorm' if norm else 'no norm'}"] = (lambda norm=norm: cnn(norm), images, 100)
    results, rows, curves = HERE / "results" / "gdnp_networks.json", [], []
    if options.only:
        kept = json.loads(results.read_text(encoding="utf-8"))
        rows = [row for row in kept["rows"] if row["optimizer"] != options.only]
        curves = [row for row in kept["curves"] if row["series"] != options.only]
    for task, (make, data, budget) in tasks.items():
        seeds = options.seeds if task.startswith("digits") else 1
        for name, (grid, _) in MAKERS.items():
            if options.only not in (None, name):
                continue
            runs = {lr: [train(make, data, name, lr, seed, budget) for seed in range(seeds)] for lr in grid}
            best = min(runs, key=lambda lr: sum(run["loss"] for run in runs[lr]))
            mean = {k: sum(run[k] for run in runs[best]) / seeds for k in ("loss", "accuracy", "seconds")}
            spread = max(run["accuracy"] for run in runs[best]) - min(run["accuracy"] for run in runs[best])
            rows.append({"task": task, "optimizer": name, "lr": best, "gradients": budget, **mean, "spread": spread})
            curves += [
                {"task": task, "series": name, "gradients": spent, "value": loss}
                for spent, loss in runs[best][0]["curve"][:: max(1, len(runs[best][0]["curve"]) // 40)]
            ]
            print(rows[-1], flush=True)
    footer = f"3 rates x {options.seeds} seeds each (CIFAR-10: one), batch 128, rate by training loss, accuracy in %"
    print(format_table(rows, title="GDNP on networks", footer=footer))
    document = {"settings": footer, "rows": rows, "curves": curves}
    results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(curves)


def dampings(seeds: int) -> None:
    """Print training loss and test accuracy of GDNP on the digits at rate 1, by damping."""
    data, rows = digits(), []
    for damping in (0.001, 0.01, 0.1, 1.0):
        MAKERS["GDNP"] = ((1.0,), lambda m, lr, damping=damping: ng.optim.GDNP(m, lr, damping=damping))
        row: dict[str, Any] = {"damping": damping}
        for norm in (True, False):
            runs = [train(lambda norm=norm: mlp(norm), data, "GDNP", 1.0, seed, 200) for seed in range(seeds)]
            for key in ("loss", "accuracy"):
                row[f"{key}, {'BatchNorm' if norm else 'no norm'}"] = sum(run[key] for run in runs) / seeds
        rows.append(row)
    print(
        format_table(rows, title="GDNP by damping", footer=f"digits, rate 1, {seeds} seeds, 200 gradient evaluations")
    )


def draw(curves: list[dict[str, Any]]) -> None:
    """Draw the losses over gradient evaluations, one panel per task."""
    import altair as alt
    import pandas as pd

    from normgauge.charts import svg, themed

    chart = (
        alt.Chart(pd.DataFrame(curves))
        .mark_line()
        .encode(
            x=alt.X("gradients", title="gradient evaluations"),
            y=alt.Y("value", title="training loss of the batch", scale=alt.Scale(type="log")),
            color=alt.Color("series", title=None),
            facet=alt.Facet("task", columns=2, title=None),
        )
        .properties(width=300, height=170)
        .resolve_scale(y="independent", x="independent")
    )
    picture = svg(themed(chart), "Training loss over gradient evaluations")
    (HERE.parent / "docs" / "optim" / "gdnp-networks.svg").write_text(picture + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
