"""`ng.translate` weighed: is the translated optimizer as good as the one it came from, and better than untranslated?

Fixed before the first run: a translation counts as equivalent where the mean score over five seeds is within MARGIN of
that of the settings it came from (digits: 2 points of test accuracy; text: 0.15 nats of test loss), and as useful
where it is nearer to it than the same numbers of rate and decay given to the other optimizer as they are.
`python -m benchmarks.advise.translation FILE.jsonl` runs what is missing and prints the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

import normgauge as ng
from normgauge.lab.data import Dataset, load
from normgauge.lab.models import build
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.recipe import Joined
from normgauge.lab.runs.train import train

MARGIN = {"digits": 2.0, "text": 0.15}
SEEDS = 5
Make = Callable[[nn.Module], torch.optim.Optimizer]


def _sgd(lr: float, momentum: float = 0.0, decay: float = 5e-4) -> Make:
    return lambda m: torch.optim.SGD(m.parameters(), lr=lr, momentum=momentum, weight_decay=decay)


def _adamw(lr: float, decay: float = 0.05) -> Make:
    return lambda m: torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=decay)


# data, model, norm, steps, batch, source, target: sources are settings that train well
CASES: dict[str, tuple[str, str, str, int, int, Make, str]] = {
    "digits mlp batch: SGD to AdamW": ("digits", "mlp", "batch", 200, 64, _sgd(0.1), "adamw"),
    "digits mlp none: momentum to AdamW": ("digits", "mlp", "none", 200, 64, _sgd(0.02, 0.9), "adamw"),
    "digits vgg batch: momentum to SGD": ("digits", "vgg", "batch", 100, 64, _sgd(0.05, 0.9), "sgd"),
    "digits mlp batch: AdamW to momentum": ("digits", "mlp", "batch", 200, 64, _adamw(3e-3), "momentum"),
    "digits mlp layer: AdamW to Muon": ("digits", "mlp", "layer", 200, 64, _adamw(3e-3), "muon"),
    "text gpt layer: AdamW to Muon": ("text", "gpt", "layer", 150, 16, _adamw(3e-3), "muon"),
    "text gpt layer: momentum to AdamW": ("text", "gpt", "layer", 150, 16, _sgd(0.1, 0.9, 1e-4), "adamw"),
    "text gpt layer: AdamW to momentum": ("text", "gpt", "layer", 150, 16, _adamw(3e-3), "momentum"),
}


def _score(network: nn.Module, data: Dataset, diverged: bool) -> float:
    result = evaluate(network, data, "test", limit=400)
    if data.name.startswith("text"):
        return 10.0 if diverged else result.loss
    return 0.0 if diverged else 100 * result.accuracy


def run(case: str, arm: str, seed: int) -> dict[str, Any]:
    """Train one arm (source, translated or untranslated) of a case."""
    name, model, norm, steps, batch, source, to = CASES[case]
    data = load(name)
    network = build(model, norm, data.shape, data.classes, seed)
    optimizer, said = source(network), ""
    if arm == "translated":
        rows = torch.randperm(len(data.train[1]), generator=torch.Generator().manual_seed(seed)).split(batch)[:8]
        objective = ng.Objective(network, data.loss, [(data.train[0][r], data.train[1][r]) for r in rows], mode="train")
        translation = ng.translate(optimizer, to=to, objective=objective)
        optimizer, said = translation.optimizer, translation.meaning()
    elif arm == "untranslated":
        optimizer = _same_numbers(optimizer, to, network)
    done = train(network, data, optimizer, steps=steps, batch=batch, seed=seed)
    return {"case": case, "arm": arm, "seed": seed, "score": _score(network, data, done.diverged), "said": said}


def _same_numbers(optimizer: torch.optim.Optimizer, to: str, network: nn.Module) -> torch.optim.Optimizer:
    """Return the other optimizer with the first one's rate, decay and memory as they are."""
    group, named = optimizer.param_groups[0], list(network.parameters())
    memory = group.get("momentum") or group.get("betas", (0.0,))[0]
    same = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    if to == "muon":
        matrices, rest = [p for p in named if p.ndim == 2], [p for p in named if p.ndim != 2]
        return Joined(torch.optim.Muon(matrices, momentum=memory, **same), torch.optim.AdamW(rest, **same))
    if to == "adamw":
        return torch.optim.AdamW(named, betas=(memory, 0.999), **same)
    return torch.optim.SGD(named, momentum=0.0 if to == "sgd" else memory or 0.9, **same)


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per case: the three means, and whether margin and use are met."""
    lines = []
    for case in CASES:
        scores = {arm: {r["seed"]: r["score"] for r in rows if (r["case"], r["arm"]) == (case, arm)} for arm in ARMS}
        seeds = set.intersection(*(set(values) for values in scores.values()))
        if seeds:
            means = {arm: fmean(values[seed] for seed in seeds) for arm, values in scores.items()}
            off = {arm: abs(means[arm] - means["source"]) for arm in ARMS}
            met = off["translated"] <= MARGIN[CASES[case][0]]
            line = {"equivalent": met, "nearer": off["translated"] < off["untranslated"], "seeds": len(seeds)}
            lines.append({"case": case, **means, **line})
    return lines


ARMS = ("source", "translated", "untranslated")


def main(path: str) -> None:
    """Run what is missing and print the table."""
    torch.set_num_threads(1)
    file = Path(path)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["case"], row["arm"], row["seed"]) for row in rows}
    for seed in range(SEEDS):
        for case in CASES:
            for arm in ARMS:
                if (case, arm, seed) not in done:
                    rows.append(run(case, arm, seed))
                    with file.open("a") as out:
                        out.write(json.dumps(rows[-1]) + "\n")
    for line in table(rows):
        print(line)


if __name__ == "__main__":
    main(sys.argv[1])
