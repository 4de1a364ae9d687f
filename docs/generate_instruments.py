"""Write the figures of the instruments' pages into docs/_generated/instruments/, from measurements made here.

PYTHONPATH=src python docs/generate_instruments.py [NAME ...]
"""

import sys
from pathlib import Path

import torch
from torch import nn

import normgauge as ng
from normgauge.charts import curves, panels, svg
from normgauge.lab.data import load

OUT = Path(__file__).parent / "_generated" / "instruments"
LOSS = nn.functional.cross_entropy


def digits(samples=400):
    """Return the first images of handwritten digits as rows, and their labels."""
    inputs, labels = load("digits").train
    return inputs[:samples].flatten(1).float(), labels[:samples]


def network(norm, width=48, depth=3):
    """Return an MLP with a normalizer behind every hidden layer."""
    torch.manual_seed(0)
    layers, before = [], 64
    for _ in range(depth):
        layers += [nn.Linear(before, width), *([nn.BatchNorm1d(width)] if norm else []), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, 10))


def steps_of(model, optimizer, data, steps):
    """Yield before every step of full-batch training."""
    for step in range(steps):
        yield step
        optimizer.zero_grad()
        LOSS(model(data[0]), data[1]).backward()
        optimizer.step()


def smoothing():
    """Follow the shares that BatchNorm takes from the gradient, and its curvature term, over training."""
    model, data = network(True), digits()
    objective = ng.Objective(model, LOSS, data, mode="train")
    rows = []
    for step in steps_of(model, torch.optim.SGD(model.parameters(), lr=0.2), data, 61):
        if step % 6 == 0:
            for entry in ng.smoothing(objective).layers:
                shares = {"mean": 100 * entry.mean_share, "along": 100 * entry.yhat_share}
                rows.append({"step": step, "series": f"layer {entry.layer}", **shares, "term": entry.term})
    first = [row for row in rows if row["series"] == "layer 1"]
    titles = {"mean": "% removed by the mean", "along": "% removed along yhat", "term": "curvature term"}
    return panels(first, x="step", ys=titles, x_title="step", title="First BatchNorm of a digits MLP")


def sharpness_track():
    """Follow sharpness over the threshold for two rates of full-batch gradient descent."""
    rows, data = [], digits(200)
    for rate in (0.05, 0.1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 10))
        targets = nn.functional.one_hot(data[1], 10).float()
        mean_square = lambda out, y: (out - y).square().sum(1).mean()  # noqa: E731
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        track = ng.sharpness_track(ng.Objective(model, mean_square, (data[0], targets), mode="train"), optimizer)
        for step in range(1501):
            if step % 60 == 0:
                point = track.measure(step)
                rows.append({"step": step, "series": f"rate {rate:g}", "value": point.ratio})
            optimizer.zero_grad()
            mean_square(model(data[0]), targets).backward()
            optimizer.step()
    rows += [{"step": step, "series": "edge", "value": 1.0} for step in (0, 1500)]
    return curves(rows, title="Full-batch descent goes to its edge of stability", y_title="sharpness / threshold")


def stable_rate():
    """Show the loss reached per rate of SGD with momentum."""
    model, data = network(False), digits()
    objective = ng.Objective(model, LOSS, data, mode="train")
    return ng.stable_rate(objective, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), tol=0.2).chart()


def batch_noise():
    """Show the parts of the noise of a half-trained BatchNorm network by batch size."""
    model, data = network(True), digits(256)
    for _ in steps_of(model, torch.optim.SGD(model.parameters(), lr=0.2), data, 25):
        pass
    return ng.batch_noise(ng.Objective(model, LOSS, data, mode="train"), draws=24).chart()


def density():
    """Show the whole spectrum of the same network."""
    model, data = network(True), digits(256)
    for _ in steps_of(model, torch.optim.SGD(model.parameters(), lr=0.2), data, 25):
        pass
    return ng.density(ng.Objective(model, LOSS, data, mode="train"), error=0.02).chart()


FIGURES = {make.__name__: make for make in (smoothing, sharpness_track, stable_rate, batch_noise, density)}


def main():
    """Write the figures asked for, or all."""
    OUT.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or FIGURES:
        (OUT / f"{name}.svg").write_text(svg(FIGURES[name](), FIGURES[name].__doc__) + "\n", encoding="utf-8")
        print(f"{name}.svg")


if __name__ == "__main__":
    main()
