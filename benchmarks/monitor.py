"""What `ng.Monitor` costs: training with and without it in alternating blocks, and full histograms beside it.

    python benchmarks/monitor.py [--steps 1000] [--batch 32] [--tokens 64] [--only transformer]

Times are those of the processor, which other work on the machine hardly moves. Prints the ratios and writes them to
benchmarks/results/monitor.json. Slow beats are included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import normgauge as ng
from normgauge.lab.models.published import resnet18


def make_transformer() -> nn.Module:
    """Return a small pre-norm encoder with a head over 256 tokens."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True, dropout=0.0)
    return nn.Sequential(
        nn.Embedding(256, 128), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 256)
    )


def cases(batch: int, tokens: int = 64):
    """Yield name, model, batch and loss."""
    source = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 32, 32, generator=source), torch.randint(10, (batch,), generator=source)
    text = torch.randint(256, (batch // 2, tokens), generator=source)
    yield "ResNet-18", resnet18("batch", (3, 32, 32), 10), images, nn.functional.cross_entropy
    yield (
        "transformer 4x128",
        make_transformer(),
        (text, text),
        lambda o, t: nn.functional.cross_entropy(o.flatten(0, 1), t.flatten()),
    )


def histograms(model):
    """What watchers of all gradients and weights do at each of their beats."""
    for value in model.parameters():
        torch.histc(value.detach().float(), 64)
        if value.grad is not None:
            torch.histc(value.grad.float(), 64)


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    out = Path(__file__).parent / "results" / "monitor.json"
    torch.set_num_threads(1)
    document = json.loads(out.read_text()) if out.exists() else {}
    for name, model, batch, loss in cases(options.batch, options.tokens):
        if options.only not in name:
            continue
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def loss_of(model, batch, loss=loss):
            return loss(model(batch[0]), batch[1])

        monitor = ng.Monitor(model, optimizer, batch=batch, loss=loss_of, every=50)  # with the edge of stability

        def step(after, model=model, optimizer=optimizer, batch=batch, loss=loss):
            begin = time.process_time()
            optimizer.zero_grad()
            value = loss(model(batch[0]), batch[1])
            value.backward()
            optimizer.step()
            after(value)
            return time.process_time() - begin

        times = {"plain": [], "monitor": [], "histograms every step": []}
        for block in range(options.steps // 50):
            monitor.start()
            times["monitor"].append(sum(step(monitor.step) for _ in range(50)))
            monitor.close()
            times["plain"].append(sum(step(lambda value: None) for _ in range(50)))
            if block % 5 == 0:
                few = sum(step(lambda value, model=model: histograms(model)) for _ in range(10))
                times["histograms every step"].append(5 * few)
        plain = statistics.median(times["plain"])
        ratios = {kind: statistics.median(values) / plain for kind, values in times.items()}
        ratios["monitor, total"] = sum(times["monitor"]) / sum(times["plain"])
        print(name, {key: round(value, 3) for key, value in ratios.items()}, flush=True)
        size = f"{options.batch // 2} x {options.tokens} tokens" if "transformer" in name else f"batch {options.batch}"
        document[f"{name}, {size}"] = {"steps": options.steps, "torch": torch.__version__, "ratios": ratios}
        out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
