"""Write docs/explore/data.js: the points of the explorable page, and what normgauge measured where it computes.

PYTHONPATH=src python docs/generate_explore.py
"""

import json
from pathlib import Path

import torch
from torch import nn

import normgauge as ng
from normgauge.lab.data import load
from normgauge.theory.norm_growth import after_sgd_step

OUT = Path(__file__).parent / "explore" / "data.js"
GAMMA, STEPS, START = 3.0, 60, (0.8, 0.6)
# What each button of the page sets: `text` is what it shows, in order.
SCENES = [
    {
        "name": "A ray",
        "text": "Drag the tip of the arrow outwards and inwards: BatchNorm divides by the deviation of the unit, so "
        "every point of a ray gives the same outputs and the same loss. Whatever the length, the gradient (and so the "
        "step) stands at a right angle to the weight.",
    },
    {
        "name": "It grows",
        "rate": 0.8,
        "batch": 16,
        "text": "Press Play. A step at a right angle can only lengthen a vector: the squared length grows by rate² "
        "gradient² at every step. The effective rate, rate / length², falls, and training slows down although nobody "
        "lowered the learning rate. On the sphere the length stays, and so does the rate.",
    },
    {
        "name": "Decay",
        "rate": 0.8,
        "batch": 16,
        "decay": 0.08,
        "text": "Weight decay cannot regularize a direction: the loss does not see the length. It shrinks the length "
        "until growth and decay balance (dashed line) and so sets the effective rate. Under gradient flow the "
        "length would go to zero (claim S0-WD of the ledger: at twice the printed rate); steps of finite size stop it.",
    },
    {
        "name": "eps",
        "eps": 1.0,
        "text": "A large eps is added to the variance: short weights are no longer normalized, the loss is not "
        "constant along the ray, and the gradient is not at a right angle any more. What is left, ⟨w, gradient⟩ = "
        "gamma ⟨g, ŷ⟩ eps / s², has a closed form.",
    },
    {
        "name": "Two samples",
        "batch": 2,
        "text": "With a batch of two BatchNorm gives +1 and -1 whatever the weights are: but for what eps lets "
        "through, the gradient is zero, and this unit learns nothing.",
    },
    {
        "name": "Eval mode",
        "normalizer": "eval",
        "text": "In eval mode BatchNorm uses stored statistics: it is a linear map, the length of the weight matters "
        "again, and loss, gradient and curvature are those of another function.",
    },
]
DEFAULTS = {"normalizer": "batch", "rate": 1.0, "decay": 0.0, "batch": 64, "eps": 1e-8}  # torch refuses eps = 0


def points():
    """Return 64 handwritten digits (1 or 8) as two coordinates each, labels, and a fixed order of them."""
    images, labels = load("digits").train
    chosen = (labels == 1) | (labels == 8)
    rows = images[chosen].flatten(1).double()[:64]
    rows = rows - rows.mean(0)
    _, _, axes = torch.linalg.svd(rows, full_matrices=False)
    plane = rows @ axes[:2].T
    plane = (plane / plane.std()).mul(1000).round() / 1000
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    return plane, labels[chosen][:64].eq(8).double() * 2 - 1, order


class Unit(nn.Module):
    """One unit behind a normalizer of torch, with the gain fixed."""

    def __init__(self, scene, plane):
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        self.linear.weight.data = torch.tensor([START], dtype=torch.float64)
        self.normalizer = scene["normalizer"]
        self.norm = nn.BatchNorm1d(1, eps=scene["eps"], affine=False, dtype=torch.float64)
        y = plane @ self.linear.weight.detach().squeeze()
        self.norm.running_mean[:], self.norm.running_var[:] = y.mean(), y.var(correction=0)
        if self.normalizer == "weight":
            self.linear = nn.utils.parametrizations.weight_norm(self.linear, dim=0)
            self.linear.parametrizations.weight.original0.data.fill_(1.0).requires_grad_(False)

    def forward(self, x):
        y = self.linear(x)
        return GAMMA * (self.norm(y) if self.normalizer in ("batch", "eval") else y).squeeze(-1)

    @property
    def weight(self):
        return dict(self.linear.named_parameters())[
            "parametrizations.weight.original1" if self.normalizer == "weight" else "weight"
        ]


def measure(scene, data, optimizer):
    """Train and return length and loss (on all points) before every step, measured by an Objective."""
    plane, targets, order = data
    model = Unit(scene, plane)
    model.norm.train(scene["normalizer"] == "batch")
    logistic = lambda z, t: nn.functional.softplus(-t * z).mean()  # noqa: E731
    mode = "train" if scene["normalizer"] == "batch" else "eval"
    whole = ng.Objective(model, logistic, (plane, targets), mode=mode)
    optimizer = optimizer([model.weight], scene)
    rows = []
    for step in range(STEPS + 1):
        rows.append([round(model.weight.norm().item(), 5), round(whole.loss().item(), 5)])
        chosen = order[torch.arange(step * scene["batch"], (step + 1) * scene["batch"]) % len(order)]
        optimizer.zero_grad()
        logistic(model(plane[chosen]), targets[chosen]).backward()
        optimizer.step()
    return rows


def plain(params, scene):
    return torch.optim.SGD(params, lr=scene["rate"], weight_decay=scene["decay"])


def sphere(params, scene):
    return ng.optim.SphereSGD(params, lr=scene["rate"])


def network(decay):
    """Train a BatchNorm network on digits; return the mean squared row norm of a layer and what the law predicts."""
    torch.manual_seed(0)
    images, labels = load("digits").train
    images, labels = images.flatten(1).double(), labels
    layers = [nn.Linear(64, 48, bias=False), nn.BatchNorm1d(48, eps=1e-8), nn.ReLU(), nn.Linear(48, 10)]
    model = nn.Sequential(*layers).double()
    weight, rate = model[0].weight, 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=decay)
    rows, law = [], weight.detach().square().sum(1).mean().item()
    for step in range(301):
        chosen = torch.randint(len(images), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        if step % 6 == 0:
            rows.append([step, round(weight.detach().square().sum(1).mean().item(), 5), round(law, 5)])
        law = after_sgd_step((1 - rate * decay) ** 2 * law, weight.grad.square().sum(1).mean().item(), rate)
        optimizer.step()
    return rows


def document():
    plane, targets, order = data = points()
    scenes = []
    for entry in SCENES:
        scene = {**DEFAULTS, **entry}
        scenes.append({**scene, "plain": measure(scene, data, plain), "sphere": measure(scene, data, sphere)})
    decays = (0.0, 0.001, 0.01, 0.03)
    return {
        "gamma": GAMMA,
        "start": START,
        "points": [{"x": x, "t": t} for x, t in zip(plane.tolist(), targets.int().tolist(), strict=True)],
        "order": order.tolist(),
        "scenes": scenes,
        "network": {f"{decay:g}": network(decay) for decay in decays},
    }


if __name__ == "__main__":
    text = json.dumps(document(), separators=(",", ":"), ensure_ascii=False)
    OUT.write_text(f"// Written by docs/generate_explore.py\nconst measured = {text};\n", encoding="utf-8")
