"""Peak memory of curvature against that of a training step: ResNet-18 for 32x32 images in train mode.

    PYTHONPATH=src python benchmarks/curvature_memory.py [--batch 32] [--products 19]

Each task runs in a process of its own, whose allocator gives freed memory back at once. Printed and written to
benchmarks/results/curvature_memory.json: the peak of resident memory above that of the process with model and data,
processor seconds of the last of three products, and what the vectors take that Lanczos keeps (its basis, and five
eigenvectors). "top 5" is the call `ng.spectrum(objective, top=5)` as it is; with `memory=` of 2 GiB the graph is kept.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from curvature_problems import resnet18
from torch import nn

TASKS = ("step", "product, graph kept", "product, blocks again", "top 5", "top 5, graph kept")


def peak():
    """Return MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(task, batch, products):
    """Run a task; return its peak above model and data, seconds of a product, and MiB of stored vectors."""
    import normgauge as ng
    from normgauge.objective import HessianOperator

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, loss = resnet18(), nn.functional.cross_entropy
    data = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    small = ng.Objective(nn.Linear(3, 2), loss, (torch.randn(4, 3), torch.randint(0, 2, (4,))), mode="train")
    ng.spectrum(small, top=1)  # loads what is loaded once
    before, seconds, vectors = peak(), 0.0, 0.0
    if task == "step":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss(model(data[0]), data[1]).backward()
            optimizer.step()
        return peak() - before, seconds, vectors
    objective = ng.Objective(model, loss, data, mode="train")
    size = objective.dimension * 4 / 2**20
    memory = 2 << 30 if "kept" in task else None
    if task.startswith("product"):
        with HessianOperator(objective, memory=memory or 1) as operator:
            vector = torch.randn(objective.dimension)
            for _ in range(3):
                begin = time.process_time()
                operator @ vector
                seconds = time.process_time() - begin
        return peak() - before - size, seconds, vectors
    found = ng.spectrum(objective, top=5, max_products=products, memory=memory)
    room = 2**30 if memory is None else memory
    return peak() - before, seconds, size * (min(found.matvecs - 5, room // 2**20 // size) + 5)


def main():
    """Run all tasks, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--products", type=int, default=19)
    parser.add_argument("--task", default="")
    options = parser.parse_args()
    if options.task:
        print(json.dumps(run(options.task, options.batch, options.products)))
        return
    rows, step = {}, None
    for task in TASKS:
        command = [sys.executable, __file__, "--task", task, "--batch", options.batch, "--products", options.products]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, env=environment)
        out = done.stdout
        mib, seconds, vectors = json.loads(out.splitlines()[-1])
        step = step or mib
        rows[task] = {"peak_mib": mib, "vectors_mib": vectors, "over_step": (mib - vectors) / step, "seconds": seconds}
        print(task, {key: round(value, 2) for key, value in rows[task].items()}, flush=True)
    document = {"batch": options.batch, "products": options.products, "torch": torch.__version__, "tasks": rows}
    (Path(__file__).parent / "results" / "curvature_memory.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
