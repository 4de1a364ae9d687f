"""Cost of `ng.symmetries`: gradient evaluations, seconds and peak memory against one training step.

Run: `PYTHONPATH=src python benchmarks/symmetry.py [--only NAME]`; writes benchmarks/results/symmetry.json.
Each case runs in a process of its own, so that peak memory is its own: what it takes with the model, beyond an idle
process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import normgauge as ng

RESULTS = Path(__file__).parent / "results" / "symmetry.json"
PARTS = ("step", "sgd", "symmetries")  # a training step with AdamW, one with plain SGD, and what is measured
LIMITS = {"resnet18": 16, "gpt12": 30, "gpt2_small": 40, "llama_100m": 40}  # passes over the batch


class BasicBlock(nn.Module):
    """Two convolutions with batch normalization and a shortcut."""

    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Sequential()
        if stride > 1 or wide != out:
            self.short = nn.Sequential(nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.short(x))


def resnet18() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """ResNet-18 for 32 x 32 images, batch 64."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    wide = 64
    for out, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(BasicBlock(wide, out, stride))
        wide = out
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return net, torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))


class Layer(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream after the block."""
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """Twelve blocks of width 256."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(300, 256), nn.Embedding(64, 256)
        self.blocks = nn.ModuleList(Layer(256, 4) for _ in range(12))
        self.ln, self.head = nn.LayerNorm(256), nn.Linear(256, 300, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        h = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.ln(h))


def gpt12() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """GPT of 12 blocks, width 256, batch 32 x 64 tokens."""
    tokens = torch.randint(0, 300, (32, 64))
    return GPT(), tokens, tokens


class Logits(nn.Module):
    """A Hugging Face language model that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def gpt2_small() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """GPT-2 small, 124M parameters, tied head, one sequence of 32 tokens."""
    import transformers

    config = transformers.GPT2Config()
    tokens = torch.randint(0, config.vocab_size, (1, 32))
    return Logits(transformers.GPT2LMHeadModel(config)), tokens, tokens


def llama_100m() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A Llama with grouped queries, 100M parameters, one sequence of 32 tokens."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    tokens = torch.randint(0, config.vocab_size, (1, 32))
    return Logits(transformers.LlamaForCausalLM(config)), tokens, tokens


LANGUAGE = ("gpt2_small", "llama_100m")  # asked in eval mode: their dropout is no part of the question
CASES = {"resnet18": resnet18, "gpt12": gpt12, "gpt2_small": gpt2_small, "llama_100m": llama_100m}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _step(net: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    out = net(inputs)
    F.cross_entropy(out.reshape(-1, out.shape[-1]), targets.reshape(-1)).backward()
    optimizer.step()
    return time.perf_counter() - start


def run(name: str, what: str) -> dict[str, object]:
    """Measure one case; `what` is one of `PARTS`."""
    torch.manual_seed(0)
    if name in LANGUAGE:
        import transformers  # noqa: F401  its memory is no model's
    idle = _peak()
    net, inputs, targets = CASES[name]()
    if what != "symmetries":
        optimizer = torch.optim.SGD(net.parameters(), 0.1) if what == "sgd" else torch.optim.AdamW(net.parameters())
        seconds = _step(net, inputs, targets, optimizer)
        return {"seconds": seconds, "memory_mb": _peak() - idle}
    mode = "eval" if name in LANGUAGE else "train"
    objective = ng.Objective(net, lambda out, y: out.square().mean(), (inputs, targets), mode=mode)  # type: ignore[arg-type]
    start, busy = time.perf_counter(), time.process_time()
    result = ng.symmetries(objective)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - busy,
        "memory_mb": _peak() - idle,
        "gradients": result.cost.gradients,
        "forwards": result.cost.forwards,
        "cost": result.cost.gradients_worth,
        "bytes_per_parameter": 2**20 * (_peak() - idle) / sum(p.numel() for p in net.parameters()),
        "dimension": result.dimension,
        "matrix_dimension": result.matrix_dimension,
        "families": len(result.families),
        "undecided": sum(len(f) for f in result.families if f.status == "undecided"),
        "table": str(result),
        "sentences": len(result.explain().splitlines()),
    }


def main() -> None:
    """Run every case, or one part of one case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--part", choices=PARTS)
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(run(arguments.only, arguments.part)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in [arguments.only] if arguments.only else CASES:
        parts = {}
        for part in PARTS:
            command = [sys.executable, __file__, "--only", name, "--part", part]
            parts[part] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        table = parts["symmetries"].pop("table")
        ratio, plain = (parts["symmetries"]["memory_mb"] / parts[step]["memory_mb"] for step in ("step", "sgd"))
        results[name] = {
            **parts["symmetries"],
            "limit": LIMITS[name],
            "training_step": parts["step"],
            "sgd_step": parts["sgd"],
            "memory_ratio": ratio,
            "memory_ratio_sgd": plain,
            "torch": torch.__version__,
        }
        print(table)
        print(f"{name}: cost {results[name]['cost']:.1f} (limit {LIMITS[name]}), memory {ratio:.2f} of AdamW's step,")
        print(f"{plain:.2f} of SGD's; {results[name]['cpu_seconds']:.0f} CPU seconds\n")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
