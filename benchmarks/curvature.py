"""Time normgauge's curvature against its peers, interleaved, and write the raw numbers.

    OMP_WAIT_POLICY=PASSIVE PYTHONPATH=src python benchmarks/curvature.py --problem mlp --tasks hvp,top1,top5,slq,trace

Every repetition runs all tools one after the other and takes ratios to normgauge within it, so that a busy machine
slows both sides of a ratio. Residuals of eigenpairs are computed here, in the same way for all tools. Peers are those
that are installed: pyhessian (with --no-deps), curvlinops-for-pytorch, hessian-eigenthings, backpack-for-pytorch.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from curvature_problems import problem
from curvature_tools import available

RESULTS = Path(__file__).parent / "results" / "curvature.json"


# Lanczos steps that hessian-eigenthings is told for one and five eigenvalues, about what 1e-3 needs.
STEPS = {"mlp": {1: 20, 5: 21}, "mlp-early": {1: 25, 5: 60}, "resnet": {1: 20, 5: 62}}


def timed(action):
    """Return processor seconds and result; on one thread they are steadier than wall time on a busy machine."""
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def gradient_of(model, loss, x, y):
    """Return a function that takes one plain gradient."""
    params = list(model.parameters())
    return lambda: torch.autograd.grad(loss(model(x), y), params)


def residuals(objective, values, vectors):
    """Return |H v - lambda v| / |lambda| with float64 sums."""
    with objective.hessian() as operator:
        return [
            float(((operator @ (v / v.norm())).double() - value * (v / v.norm()).double()).norm() / abs(value))
            for value, v in zip(values, vectors, strict=True)
        ]


def hvp_task(tools, model, loss, x, y, reps):
    """Time one product and one gradient, many times, interleaved."""
    gradient = gradient_of(model, loss, x, y)
    apply = {name: tool.hvp() for name, tool in tools.items()}
    vector = torch.randn(sum(p.numel() for p in model.parameters()))
    for action in apply.values():
        action(vector)
    gradient()
    rows = {name: [] for name in ["gradient", *tools]}
    for _ in range(reps):
        rows["gradient"].append(timed(gradient)[0])
        for name, action in apply.items():
            rows[name].append(timed(lambda action=action: action(vector))[0])
    return {name: {"seconds": seconds} for name, seconds in rows.items()}


def solver_task(entries, objective, reps, check):
    """Time whole computations; `entries` maps a label to (function, repetitions or None for all)."""
    rows = {label: {"seconds": [], "products": None} for label in entries}
    for rep in range(reps):
        for label, (action, limit) in entries.items():
            if limit is not None and rep >= limit:
                rows[label]["seconds"].append(None)
                continue
            seconds, (values, vectors, products) = timed(action)
            rows[label]["seconds"].append(seconds)
            rows[label]["products"] = products
            if check and "residuals" not in rows[label]:
                rows[label]["values"] = list(values)
                rows[label]["residuals"] = residuals(objective, values, vectors)
            print(f"  rep {rep} {label}: {seconds:.2f} s, {products} products", file=sys.stderr, flush=True)
    return rows


def top_entries(tools, k, slow, skip):
    """Return the labelled ways to the k largest eigenpairs; rare ones run once or, with `skip`, not at all."""
    entries = {"normgauge": (lambda: tools["normgauge"].top(k, "default"), None)}
    for name in ("pyhessian", "curvlinops", "hessian-eigenthings"):
        if name in tools:
            for setting in ("default", "tuned"):
                rare = f"{name} {setting}" in ("pyhessian tuned", "curvlinops default")
                if rare and skip:
                    continue
                if slow and (rare or f"{name} {setting}" == "hessian-eigenthings default"):
                    continue  # hours, or far from converged
                entries[f"{name} ({setting})"] = (
                    lambda name=name, setting=setting: tools[name].top(k, setting),
                    1 if rare else None,
                )
    if "hessian-eigenthings" in tools and not (slow or skip):
        entries["hessian-eigenthings (power)"] = (lambda: tools["hessian-eigenthings"].power(k), 1)
    return entries


def summarize(rows, base="normgauge"):
    """Add the median ratio to `base`, within repetitions."""
    for label, row in rows.items():
        pairs = [(s, b) for s, b in zip(row["seconds"], rows[base]["seconds"], strict=True) if s is not None]
        row["median_seconds"] = statistics.median(s for s, _ in pairs)
        row["median_ratio"] = statistics.median(s / b for s, b in pairs)
        row["repetitions"] = len(pairs)
        del label
    return rows


def memory_task(name, k):
    """Return each tool's peak resident memory for the k largest eigenpairs, each in its own process."""
    rows = {}
    for label, setting in (
        ("baseline", ""),
        ("normgauge", "default"),
        ("pyhessian", "default"),
        ("curvlinops", "tuned"),
        ("hessian-eigenthings", "tuned"),
    ):
        if label not in ("baseline", *available()):
            continue
        command = [sys.executable, __file__, "--problem", name, "--one", f"{label}:{k}:{setting}"]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows[label] = {"peak_mib": float(out.strip().splitlines()[-1])}
        print(f"  memory {label}: {rows[label]['peak_mib']:.0f} MiB", file=sys.stderr, flush=True)
    return rows


def one(name, text):
    """Run one tool once and print the peak memory of this process."""
    import resource

    model, loss, x, y = problem(name)
    label, k, setting = text.split(":")
    if label == "baseline":
        gradient_of(model, loss, x, y)()
    else:
        available()[label](model, loss, x, y).top(int(k), setting)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main():
    """Parse options, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problem", choices=["mlp", "mlp-early", "resnet"], default="mlp")
    parser.add_argument("--tasks", default="hvp,top1,top5,slq,trace,memory")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tools", default="", help="only these, separated by commas; normgauge is needed")
    parser.add_argument("--skip-rare", action="store_true", help="leave out what takes minutes and runs once anyway")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", default="", help="tool:k:setting, for the memory task's own processes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        one(options.problem, options.one)
        return
    model, loss, x, y = problem(options.problem)
    only = options.tools.split(",") if options.tools else []
    tools = {name: tool(model, loss, x, y) for name, tool in available().items() if not only or name in only}
    if "hessian-eigenthings" in tools:
        tools["hessian-eigenthings"].steps = STEPS[options.problem]
    objective = tools["normgauge"].objective
    solvers = {name: tool for name, tool in tools.items() if hasattr(tool, "slq")}
    document = json.loads(options.out.read_text()) if options.out.exists() else {}
    for task in options.tasks.split(","):
        print(f"{options.problem} {task}", file=sys.stderr, flush=True)
        if task == "hvp":
            rows = summarize(hvp_task(tools, model, loss, x, y, 5 * options.reps), "gradient")
        elif task.startswith("top"):
            rows = summarize(
                solver_task(
                    top_entries(tools, int(task[3:]), options.problem == "resnet", options.skip_rare),
                    objective,
                    options.reps,
                    True,
                )
            )
        elif task == "slq":
            rows = summarize(
                solver_task({n: (t.slq, None) for n, t in solvers.items()}, objective, options.reps, False)
            )
        elif task == "trace":
            probes = 20  # the cost is one product per probe for every tool; how many 5% takes is printed once
            print(f"  5% takes {tools['normgauge'].trace(None)[2]} probes", file=sys.stderr, flush=True)
            entries = {n: (lambda t=t, probes=probes: t.trace(probes), None) for n, t in solvers.items()}
            rows = summarize(solver_task(entries, objective, options.reps, False))
        else:
            rows = memory_task(options.problem, 5)
        document.setdefault(options.problem, {})[task] = rows
        document["machine"] = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processor": platform.machine(),
            "threads": options.threads,
        }
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
