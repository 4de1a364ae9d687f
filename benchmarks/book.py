# ruff: noqa: E501
"""Measure normgauge beside its peers, interleaved, and keep every ratio with its interval: `make bench`.

    python benchmarks/book.py [curvature] [optimizers] [doctor] [privacy] [--rounds N]

Every round runs all tools one after the other on one thread and takes ratios of processor time within the round, so
that a busy machine slows both sides. A ratio is a median over rounds with an interval of order statistics (95 % where
there are six rounds or more, else the range). Sections whose peers are missing say so; rows are written as they come.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from scipy import stats
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
RESULTS = ROOT / "benchmarks" / "results" / "book.json"
PEERS = ("pyhessian", "curvlinops-for-pytorch", "hessian-eigenthings", "backpack-for-pytorch", "geoopt", "adamp",
         "torch-audit", "opacus")  # fmt: skip
STEPS = {"mlp": {1: 20, 5: 21}, "resnet": {1: 20, 5: 62}}  # what hessian-eigenthings must be told to reach 1e-3

MISSING = "not installed"
EXPERT = {"pyhessian": "default", "curvlinops": "tuned", "hessian-eigenthings": "tuned", "normgauge": "default"}


def median_interval(ratios: list[float]) -> dict[str, float]:
    """Return the median and the two order statistics that hold it in 95 % of cases."""
    ordered, n = sorted(ratios), len(ratios)
    k = int(stats.binom.ppf(0.025, n, 0.5))
    low, high = (ordered[k - 1], ordered[n - k]) if k >= 1 else (ordered[0], ordered[-1])
    return {"ratio": float(torch.tensor(ordered).quantile(0.5)), "low": low, "high": high, "rounds": n}


def contest(actions: dict, rounds: int, base: str = "normgauge") -> dict[str, dict]:
    """Run every action once per round; return per tool its seconds and its ratio to `base`, and what it returned."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    answers = {}
    for number in range(rounds + 1):
        for name, action in actions.items():
            start = time.process_time()
            answers[name] = action()
            if number:  # the first round warms up
                seconds[name].append(time.process_time() - start)
    ratios = {name: [a / b for a, b in zip(seconds[name], seconds[base], strict=True)] for name in actions}
    return {
        name: {**median_interval(ratios[name]), "seconds": min(seconds[name]), "answer": answers[name]}
        for name in actions
    }


def curvature(rounds: int) -> Iterator[dict]:
    """Yield rows for products, eigenvalues, densities and traces, with the true residuals of what was returned."""
    from curvature import gradient_of, residuals
    from curvature_problems import problem
    from curvature_tools import available

    for name, network in (("mlp", "MLP"), ("resnet", "ResNet-18")):
        model, loss, x, y = problem(name)
        tools = {label: tool(model, loss, x, y) for label, tool in available().items()}
        if "hessian-eigenthings" in tools:
            tools["hessian-eigenthings"].steps = STEPS[name]
        vector = torch.randn(sum(p.numel() for p in model.parameters()))
        products = {label: tool.hvp() for label, tool in tools.items()}
        tasks = {"one Hessian product": {"one gradient": gradient_of(model, loss, x, y)} | {
            label: (lambda product=product, vector=vector: product(vector)) for label, product in products.items()}}  # fmt: skip
        solvers = {label: tool for label, tool in tools.items() if hasattr(tool, "slq")}
        for k in (1, 5) if name == "mlp" else ():  # on the ResNet a product says it all, and takes seconds
            tasks[f"top-{k} eigenvalues"] = {
                label: (lambda tool=tool, k=k, setting=EXPERT[label]: tool.top(k, setting))
                for label, tool in solvers.items()
            }
        if name == "mlp":
            tasks["density, 50 steps"] = {label: tool.slq for label, tool in solvers.items()}
            tasks["trace, 20 probes"] = {label: (lambda tool=tool: tool.trace(20)) for label, tool in solvers.items()}
        for task, actions in tasks.items():
            print(f"{network}: {task}", file=sys.stderr, flush=True)
            for tool, row in contest(actions, rounds).items():
                answer, note = row.pop("answer"), ""
                if task.startswith("top"):
                    worst = max(residuals(tools["normgauge"].objective, answer[0], answer[1]))
                    note = f"residual {worst:.1e}" + (", not converged" if worst > 1e-2 else "")
                yield {"section": "curvature", "problem": network, "task": task, "tool": tool, **row, "note": note}


def optimizers(rounds: int) -> list[dict]:
    """Return rows for one step on spheres and its peers."""
    from optimizers import AGAINST, PROBLEMS, contestants

    rows = []
    for network, shapes in PROBLEMS.items():
        steps, before = contestants(shapes)
        pairs = [(ours, peer) for ours, (peer, _) in AGAINST.items() if peer in steps and ours not in before]
        for ours, peer in pairs:
            base = "torch SGD fused" if "SGD" in ours else "torch Adam fused"
            actions = {ours: steps[ours], peer: steps[peer], base: steps[base]}
            for tool, row in contest(actions, rounds, base=ours).items():
                row.pop("answer")
                rows.append({"section": "optimizers", "problem": network, "task": f"one step of {ours}", "tool": tool, **row, "note": ""})  # fmt: skip
    return rows


def doctor(rounds: int) -> list[dict]:
    """Return what torch-audit and normgauge see of the seeded faults; seen = a finding the repaired twin has not."""
    from torch_audit import audit

    from benchmarks.doctor import faults  # noqa: F401
    from benchmarks.doctor.cases import CASES
    from benchmarks.doctor.run import look

    def theirs(arguments: dict) -> set:
        return {(finding.rule_id, finding.module_path) for phase in ("static", "init") for finding in audit(
            arguments["model"], batch=arguments["batch"], optimizer=arguments.get("optimizer"), phase=phase,
            suppress_internal_errors=True).findings}  # fmt: skip

    def ours(arguments: dict) -> set:
        return {(finding.id, finding.where) for finding in look(arguments)}

    del rounds
    rows = []
    for tool, see in (("normgauge", ours), ("torch-audit", theirs)):
        seen, spent, failed = 0, 0.0, 0
        for case in CASES.values():
            sick, well = case.make(True), case.make(False)
            start = time.process_time()
            try:
                seen += bool(see(sick) - see(well))
            except Exception as error:  # noqa: BLE001 - a peer that falls over is a result too
                failed += 1
                print(f"{tool} on {case.name}: {type(error).__name__}: {error}", file=sys.stderr)
            spent += time.process_time() - start
        note = f"sees {seen} of {len(CASES)}" + (f", fails on {failed}" if failed else "")
        rows.append({"section": "doctor", "problem": f"{len(CASES)} seeded faults", "task": "tell the sick network from its repaired twin",
                     "tool": tool, "seconds": spent, "note": note})  # fmt: skip
    for row in rows:
        row |= {"ratio": row["seconds"] / rows[0]["seconds"], "low": None, "high": None, "rounds": 1}
    return rows


class BatchMean(nn.Module):
    """A norm nobody knows, over the batch."""

    def forward(self, x):
        """Take the batch's mean away."""
        return x - x.mean(0, keepdim=True)


def privacy(rounds: int) -> list[dict]:
    """Return how often Opacus' validator and normgauge say rightly whether training mixes the rows of a batch."""
    from opacus.validators import ModuleValidator

    import normgauge as ng

    def net(norm: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).train()

    cases = {"BatchNorm": net(nn.BatchNorm2d(8)), "GroupNorm": net(nn.GroupNorm(2, 8)), "none": net(nn.Identity()),
             "InstanceNorm": net(nn.InstanceNorm2d(8, affine=True)), "mean over the batch, own module": net(BatchMean()),
             "BatchNorm in eval, weights trained": net(nn.BatchNorm2d(8).eval()),
             "LayerNorm": net(nn.LayerNorm([8, 6, 6])), "ghost BatchNorm": net(ng.nn.GhostBatchNorm(8, ghost_size=4))}  # fmt: skip
    cases["BatchNorm in eval, weights trained"][1].eval()
    x, y = torch.randn(16, 3, 8, 8), torch.randint(4, (16,))
    other = x.clone()
    other[8:] = torch.randn(8, 3, 8, 8)

    def ours(model: nn.Module) -> bool:
        ids = {finding.id for finding in ng.checkup(model, (x, y))}
        return bool(ids & {"NG20", "NG48"})

    verdicts = {"normgauge": ours, "opacus": lambda model: not ModuleValidator.is_valid(model)}
    del rounds
    rows = []
    for tool, says in verdicts.items():
        wrong, start = [], time.process_time()
        for name, model in cases.items():
            flags = {module: module.training for module in model.modules()}
            said = says(model)
            for module, flag in flags.items():
                module.training = flag
            truth = bool((model(x)[:8] - model(other)[:8]).abs().max() > 1e-5)
            wrong += [] if said == truth else [f"{name} ({'says' if said else 'denies'} mixing)"]
        spent = time.process_time() - start
        note = f"{len(cases) - len(wrong)} of {len(cases)} right" + (f"; wrong: {', '.join(wrong)}" if wrong else "")
        rows.append({"section": "privacy", "problem": f"{len(cases)} small networks", "task": "are the rows of a batch mixed in training?",
                     "tool": tool, "seconds": spent, "note": note})  # fmt: skip
    for row in rows:
        row |= {"ratio": row["seconds"] / rows[0]["seconds"], "low": None, "high": None, "rounds": 1}
    return rows


SECTIONS = {"curvature": curvature, "optimizers": optimizers, "doctor": doctor, "privacy": privacy}


def version(name: str) -> str:
    """Return the installed version of a package, or that there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def save(name: str, rows: list[dict], load: float) -> None:
    """Write what a section has measured so far."""
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"sections": {}}
    document["sections"][name] = {"date": datetime.date.today().isoformat(), "load": round(load, 1), "rows": rows}
    document["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, one thread, Python {platform.python_version()}"
    )
    before = document.get("versions", {})  # of peers in sections that were run elsewhere
    found = {peer: version(peer) for peer in PEERS}
    found = {peer: before.get(peer, said) if said == MISSING else said for peer, said in found.items()}
    document["versions"] = {"torch": torch.__version__, **found}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the wanted sections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="section", choices=[*SECTIONS, []])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in options.sections or SECTIONS:
        torch.manual_seed(0)
        busy = os.getloadavg()[0]
        rows: list[dict] = []
        try:
            for row in SECTIONS[name](options.rounds):
                rows.append(row)
                save(name, rows, busy)
        except ImportError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
