"""Accuracy under attack next to foolbox and torchattacks: same model, same samples, same settings.

Run with `python benchmarks/robustness.py` in an environment of its own that has normgauge[lab], foolbox and
torchattacks (`pip install --no-deps torchattacks`: its pins are older than ours); writes
benchmarks/results/robustness.json. The model is a small convolutional net with batch norm trained here on
scikit-learn's digits. Accuracies are to agree within 0.5 points. Attacks with random starts cannot share a seed across
tools, so their accuracies are means over seeds; torchattacks draws l2 starts by another law (a uniform radius, not a
uniform point of the ball), so there the comparison is with foolbox.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import normgauge as ng
from normgauge.records import format_table

LIMIT = 0.005
SEEDS = 8
SETTINGS = {
    # name: (attack, radius, steps, step as a share of the radius, random start)
    "fgsm": ("fgsm", 0.15, 1, 1.0, False),
    "bim": ("bim", 0.1, 10, 0.25, False),
    "pgd linf": ("pgd", 0.1, 20, 0.1, False),
    "pgd l2": ("pgd_l2", 0.8, 20, 0.1, False),
    "pgd linf, random start": ("pgd", 0.1, 20, 0.1, True),
    "pgd l2, random start": ("pgd_l2", 0.8, 20, 0.1, True),
}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training and test images in [0, 1] with their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images / 16, dtype=torch.float32)[:, None]
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1197]], y[order[:1197]], x[order[1197:]], y[order[1197:]]


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """Return a net with batch norm after a few epochs."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(6):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


def with_torchattacks(model: nn.Module, x: Tensor, y: Tensor, name: str, seed: int) -> float:
    """Return the accuracy torchattacks leaves."""
    import torchattacks

    attack, radius, steps, step, start = SETTINGS[name]
    made: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
        "fgsm": lambda: torchattacks.FGSM(model, eps=radius),
        "bim": lambda: torchattacks.BIM(model, eps=radius, alpha=step * radius, steps=steps),
        "pgd": lambda: torchattacks.PGD(model, eps=radius, alpha=step * radius, steps=steps, random_start=start),
        "pgd_l2": lambda: torchattacks.PGDL2(model, eps=radius, alpha=step * radius, steps=steps, random_start=start),
    }
    torch.manual_seed(seed)
    changed = made[attack]()(x, y)
    with torch.no_grad():
        return float((model(changed).argmax(1) == y).double().mean())


def with_foolbox(model: nn.Module, x: Tensor, y: Tensor, name: str, seed: int) -> float:
    """Return the accuracy foolbox leaves."""
    import foolbox

    attack, radius, steps, step, start = SETTINGS[name]
    options = {"rel_stepsize": step, "steps": steps, "random_start": start}
    made = {
        "fgsm": lambda: foolbox.attacks.LinfFastGradientAttack(),
        "bim": lambda: foolbox.attacks.LinfBasicIterativeAttack(**options),
        "pgd": lambda: foolbox.attacks.LinfPGD(**options),
        "pgd_l2": lambda: foolbox.attacks.L2PGD(**options),
    }
    torch.manual_seed(seed)
    seen = foolbox.PyTorchModel(model, bounds=(0, 1))
    return 1 - float(made[attack]()(seen, x, y, epsilons=radius)[2].double().mean())


def with_normgauge(model: nn.Module, x: Tensor, y: Tensor, name: str, seed: int) -> float:
    """Return the accuracy ours leaves."""
    attack, radius, steps, step, start = SETTINGS[name]
    options = {"steps": steps, "step": step, "restarts": int(start), "seed": seed}
    return ng.robustness(model, (x, y), attack=attack, radius=radius, bounds=(0, 1), **options).accuracy


TOOLS = {"normgauge": with_normgauge, "torchattacks": with_torchattacks, "foolbox": with_foolbox}


def main() -> None:
    """Compare every attack, print the table, write the JSON."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    train_x, train_y, x, y = digits()
    model = trained(train_x, train_y)
    with torch.no_grad():
        clean = float((model(x).argmax(1) == y).double().mean())
    rows = []
    for name in SETTINGS:
        row: dict[str, object] = {"attack": name}
        numbers = {}
        seeds = range(SEEDS if SETTINGS[name][4] else 1)
        for tool, run in TOOLS.items():
            begin = time.perf_counter()
            found = [run(model, x, y, name, seed) for seed in seeds]
            numbers[tool] = row[tool] = statistics.fmean(found)
            row[f"{tool}_s"] = (time.perf_counter() - begin) / len(found)
        others = ("foolbox",) if name == "pgd l2, random start" else ("torchattacks", "foolbox")
        apart = max(abs(numbers["normgauge"] - numbers[tool]) for tool in others)
        rows.append({**row, "compared_with": " and ".join(others), "apart": apart, "met": apart <= LIMIT})
        print(rows[-1], flush=True)
    note = f"{len(x)} samples, clean accuracy {clean:.4f}, {platform.machine()}, torch {torch.__version__}"
    print(format_table(rows, title="accuracy under attack", footer=note))
    path = Path(__file__).parent / "results" / "robustness.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"note": note, "limit": LIMIT, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
