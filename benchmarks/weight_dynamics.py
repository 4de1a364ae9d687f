"""Predict norm and angle at the end of training from its first tenth, over a grid of rates and decays; write all rows.

    PYTHONPATH=src python benchmarks/weight_dynamics.py [--data digits|text] [--fresh]

rate x decay x steps is at least 5 everywhere, so that norms had time to settle. At the end means the last tenth of the
steps. Every scale-invariant block of the networks is a row, misses included. The laws were worked on with runs of
`GRID`; those of `FRESH`, with another seed, were made once, afterwards.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn

import normgauge as ng
from normgauge.lab import data, models
from normgauge.lab.runs.train import Batches
from normgauge.measure.weights.weight_dynamics import UpdateRecord

RESULTS = Path(__file__).parent / "results" / "weight_dynamics.json"
PAGE = Path(__file__).parents[1] / "docs" / "instruments" / "weight-dynamics.md"
STEPS = {"digits": 3000, "text": 3000}
GRID = {  # (rate, rate x decay x steps)
    "sgd": [(rate, share) for rate in (0.03, 0.3) for share in (15, 30)],
    "momentum": [(rate, share) for rate in (0.01, 0.1) for share in (15, 30)],
    "nesterov": [(rate, share) for rate in (0.01, 0.1) for share in (15, 30)],
    "adamw": [(rate, share) for rate in (0.003, 0.03) for share in (15, 30)],
    "muon": [(rate, share) for rate in (0.003, 0.03) for share in (15, 30)],
}
FRESH = {
    "sgd": [(0.1, 8), (0.5, 20)],
    "momentum": [(0.03, 20)],
    "nesterov": [(0.03, 8)],
    "adamw": [(0.01, 8)],
    "muon": [(0.01, 20)],
}


def network(name, norm, seed=0):
    """Return the network, its data and the size of a batch."""
    torch.manual_seed(seed)
    if name == "digits":
        layers = [nn.Flatten()]
        for _ in range(3):
            layers += [nn.Linear(64, 64, bias=False), ng.nn.registry.get(norm).layer(64, 0), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(64, 10)), data.load("digits"), 64
    text = data.text(context=32)
    made = models.gpt(norm, (32,), text.classes, width=32, depth=2, heads=2, place="sandwich", qk="rms", bias=False)
    return made, text, 16


def optimizers(name, net, rate, decay):
    """Return the recorded optimizer first; Muon has AdamW beside it for what is no hidden matrix."""
    ends = {id(p) for part in net.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    last = [part for part in net.modules() if isinstance(part, nn.Linear)][-1]
    ends |= {id(p) for p in last.parameters()}
    hidden = [p for p in net.parameters() if p.ndim == 2 and id(p) not in ends]
    rest = [p for p in net.parameters() if not any(p is q for q in hidden)]
    if name == "muon":
        return [torch.optim.Muon(hidden, lr=rate, weight_decay=decay), torch.optim.AdamW(rest, lr=3e-3, weight_decay=0)]
    groups = [{"params": hidden, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]  # gains are not decayed
    if name == "adamw":
        return [torch.optim.AdamW(groups, lr=rate)]
    return [torch.optim.SGD(groups, lr=rate, momentum=0.0 if name == "sgd" else 0.9, nesterov=name == "nesterov")]


def run(name, norm, optimizer, rate, share, symmetries, seed):
    """Train once; return a row per scale-invariant block: predicted from the first tenth, measured in the last."""
    net, dataset, batch = network(name, norm, seed)
    steps = STEPS[name]
    decay = share / steps / rate
    stepped = optimizers(optimizer, net, rate, decay)
    batches, (inputs, targets) = Batches(len(dataset.train[1]), batch, seed), dataset.train
    some = [(inputs[rows], targets[rows]) for rows in (next(batches) for _ in range(8))]
    objective = ng.Objective(net, dataset.loss, some, mode="train")
    record, losses, sums = UpdateRecord(stepped[0]), [], {}
    record.__enter__()
    for step in range(steps):
        if step == steps // 10:
            record.__exit__(None, None, None)
            told = ng.weight_dynamics(objective, stepped[0], symmetries=symmetries, record=record)
            unrecorded = ng.weight_dynamics(objective, stepped[0], symmetries=symmetries)
        rows = next(batches)
        before = {n: p.detach().double() for n, p in net.named_parameters()} if step >= 0.9 * steps else None
        for each in stepped:
            each.zero_grad()
        loss = dataset.loss(net(inputs[rows]), targets[rows])
        loss.backward()
        for each in stepped:
            each.step()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            return []
        if before is not None:
            after = {n: p.detach().double() for n, p in net.named_parameters()}
            add_step(sums, symmetries, before, after)
    rows = []
    for block in told.blocks:
        if not block.scale_invariant or not math.isfinite(block.equilibrium_norm):
            continue
        count, norm_sum, square = sums[block.parameters, block.blocks]
        law = next(
            other
            for other in unrecorded.blocks
            if other.parameters == block.parameters and other.blocks == block.blocks
        )
        rows.append({
            "data": name, "norm": norm, "optimizer": optimizer, "rate": rate, "decay": decay, "seed": seed,
            "rate x decay x steps": share, "block": ", ".join(block.parameters), "rows": block.blocks,
            "predicted norm": block.equilibrium_norm, "measured norm": float((norm_sum / count).median()),
            "predicted angle": block.equilibrium_angle, "measured angle": float((square / count).sqrt().median()),
            "norm by law": law.equilibrium_norm, "angle by law": law.equilibrium_angle, "at a tenth": block.norm,
            "loss at a tenth": sum(losses[steps // 10 - 50 : steps // 10]) / 50, "loss": sum(losses[-50:]) / 50,
        })  # fmt: skip
    return rows


def add_step(sums, symmetries, before, after):
    """Add norm and squared angle of a step of every block."""
    for family in symmetries.families:
        if family.kind == "scale" and family.status != "undecided":
            w2, moved, cross = family.gather(before, before), family.gather(after, after), family.gather(before, after)
            angle = torch.atan2((w2 * moved - cross.square()).clamp_min(0).sqrt(), cross)
            key = family.parameters, len(family)
            count, norm, square = sums.get(key, (0, 0.0, 0.0))
            sums[key] = count + 1, norm + moved.sqrt(), square + angle.square()


def tables(rows):
    """Return the summary and the table of all blocks as Markdown."""
    gap = {
        what: lambda row, what=what: row[f"predicted {what}"] / row[f"measured {what}"] - 1
        for what in ("norm", "angle")
    }
    lines = [
        "| runs | data | norm | optimizer | blocks | norm within 10 % | worst | angle within 10 % | worst |",
        "|---" * 9 + "|",
    ]
    said = []
    for runs, fresh in (("fresh", True), ("worked on", False)):
        chosen = [row for row in rows if bool(row.get("seed")) == fresh]
        groups = {}
        for row in chosen:
            groups.setdefault((row["data"], row["norm"], row["optimizer"]), []).append(row)
        for key, group in groups.items():
            cells = [runs, *key, str(len(group))]
            for find in gap.values():
                gaps = [find(row) for row in group]
                cells += [str(sum(abs(value) <= 0.1 for value in gaps)), f"{max(gaps, key=abs):+.0%}"]
            lines.append("| " + " | ".join(cells) + " |")
        norms, angles = (sum(abs(find(row)) <= 0.1 for row in chosen) for find in gap.values())
        said.append(
            f"{runs.capitalize()} runs: of {len(chosen)} blocks {norms} end within 10 % of the predicted norm, "
            f"{angles} of the predicted angle."
        )
    said = "  \n".join(said)
    names = ["data", "norm", "optimizer", "rate", "decay", "block"]
    names += [f"{how} {what}" for what in gap for how in ("predicted", "measured")]
    all_rows = ["| " + " | ".join(names) + " | norm off | angle off |", "|---" * 12 + "|"]
    for row in rows:
        cells = [f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in names]
        all_rows.append("| " + " | ".join([*cells, f"{gap['norm'](row):+.0%}", f"{gap['angle'](row):+.0%}"]) + " |")
    return "\n".join([said, "", *lines, "", "### Every block", "", *all_rows])


def write_page(rows):
    """Put the tables into the page of the instrument."""
    text = PAGE.read_text()
    begin, end = "<!-- grid: written by benchmarks/weight_dynamics.py --page -->", "<!-- /grid -->"
    head, rest = text.split(begin)
    PAGE.write_text(f"{head}{begin}\n{tables(rows)}\n{end}{rest.split(end)[1]}")


def main():
    """Run the grid; what is in the results stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits,text")
    parser.add_argument("--norms", default="batch,rms", help="of the network on digits")
    parser.add_argument("--optimizers", default=",".join(GRID))
    parser.add_argument("--fresh", action="store_true", help="the runs that judge")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write the page from the results, run nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    grid, seed = (FRESH, 1) if options.fresh else (GRID, 0)
    if options.page:
        write_page(rows)
        return
    for name in options.data.split(","):
        for norm in options.norms.split(",") if name == "digits" else ("rms",):
            net, dataset, batch = network(name, norm)
            example = (dataset.train[0][:batch], dataset.train[1][:batch])
            symmetries = ng.symmetries(ng.Objective(net, dataset.loss, example, mode="train"))
            for optimizer in options.optimizers.split(","):
                if name == "text" and optimizer in ("sgd", "momentum", "nesterov"):
                    continue  # a transformer does not train with plain SGD at one rate for all
                for rate, share in grid[optimizer]:
                    key = {
                        "data": name,
                        "norm": norm,
                        "optimizer": optimizer,
                        "rate": rate,
                        "decay": share / STEPS[name] / rate,
                        "seed": seed,
                    }
                    rows = [row for row in rows if any(row.get(k, 0) != v for k, v in key.items())]
                    new = run(name, norm, optimizer, rate, share, symmetries, seed)
                    rows += new
                    options.out.write_text(json.dumps({"rows": rows}, indent=1))
                    for row in new:
                        gaps = [row[f"predicted {what}"] / row[f"measured {what}"] - 1 for what in ("norm", "angle")]
                        law = [row[f"{what} by law"] / row[f"measured {what}"] - 1 for what in ("norm", "angle")]
                        print(
                            *key.values(), row["block"], row["rows"], *(f"{gap:+.3f}" for gap in gaps + law), flush=True
                        )


if __name__ == "__main__":
    main()
