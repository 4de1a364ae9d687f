"""The problems on which following `ng.advise` is weighed against a grid: fixed before there was an advisor.

Each problem is a network, data, an optimizer with the setting that people start from, and a grid of rate x decay x
normalizer that holds this setting. `python -m benchmarks.advise.zoo FILE.jsonl` runs the grid, three seeds of each
point; what is in the file is not run again. Fashion-MNIST comes by `normgauge data fashion-mnist`; without it its
problems are left out.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.lab.data import load
from normgauge.lab.runs.train import train
from normgauge.nn import registry

SEEDS = 3
Split = tuple[Tensor, Tensor]


# -- data ------------------------------------------------------------------------------------------------------------


@lru_cache
def data(name: str) -> tuple[Split, Split, Split]:
    """Return training, validation and test split."""
    return {"digits": _digits, "rows": _rows, "masks": _masks, "fashion": _fashion, "text": _text}[name]()


def _digits() -> tuple[Split, Split, Split]:
    known = load("digits")
    return known.train, known.validation, known.test


def _rows() -> tuple[Split, Split, Split]:
    """Return the digits as sequences of eight rows."""
    return tuple((x.squeeze(1), y) for x, y in _digits())  # type: ignore[return-value]


def _masks() -> tuple[Split, Split, Split]:
    """Return noisy digits, and which of their pixels are ink: segmentation."""
    source = torch.Generator().manual_seed(1)
    return tuple(  # type: ignore[return-value]
        (x + 1.0 * torch.randn(x.shape, generator=source), (x.squeeze(1) > 0).long()) for x, _ in _digits()
    )


def _fashion() -> tuple[Split, Split, Split]:
    known = load("fashion-mnist:2000/500/1000")
    small = nn.functional.avg_pool2d
    return tuple((small(x, 2), y) for x, y in (known.train, known.validation, known.test))  # type: ignore[return-value]


def _text() -> tuple[Split, Split, Split]:
    """Return windows of 32 characters of English and the characters that follow: scikit-learn's own descriptions."""
    from sklearn import datasets

    names = ("breast_cancer", "diabetes", "digits", "iris", "linnerud", "wine")
    whole = "\n".join(getattr(datasets, f"load_{name}")().DESCR for name in names)
    letters = sorted(set(whole))
    codes = torch.tensor([letters.index(letter) for letter in whole])
    windows = codes[: (len(codes) - 1) // 32 * 32].view(-1, 32), codes[1 : (len(codes) - 1) // 32 * 32 + 1].view(-1, 32)
    order = torch.randperm(len(windows[0]), generator=torch.Generator().manual_seed(0))
    held = len(order) // 5
    parts = order[2 * held :], order[:held], order[held : 2 * held]
    return tuple((windows[0][part], windows[1][part]) for part in parts)  # type: ignore[return-value]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy; classes stand last for sequences, second for images."""
    if output.ndim == 3:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return nn.functional.cross_entropy(output, target)


def accuracy(network: nn.Module, split: Split) -> float:
    """Return the share of right decisions, in points."""
    network.eval()
    with torch.no_grad():
        output = network(split[0])
    classes = output.argmax(-1 if output.ndim == 3 else 1)
    return 100 * float((classes == split[1]).double().mean())


# -- networks: factory(norm) -> nn.Module ------------------------------------------------------------------------------


def _norm(norm: str, width: int, spatial: int) -> nn.Module:
    return registry.get(norm).layer(width, spatial)


def mlp(norm: str, inputs: int = 64, depth: int = 3, width: int = 64) -> nn.Module:
    """Build a ReLU network."""
    sizes = (inputs, *[width] * depth)
    hidden = [(nn.Linear(a, b), _norm(norm, b, 0), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), *itertools.chain(*hidden), nn.Linear(width, 10))


def cnn(norm: str) -> nn.Module:
    """Build four convolutions."""
    widths = (1, 12, 12, 24, 24)
    layers: list[nn.Module] = []
    for place, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(a, b, 3, padding=1), _norm(norm, b, 2), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if place % 2 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24 * 4, 10))


class Residual(nn.Module):
    """`relu(skip(x) + f(x))`."""

    def __init__(self, norm: str, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.skip = nn.Identity() if a == b else nn.Conv2d(a, b, 1, stride)
        first, second = nn.Conv2d(a, b, 3, stride, 1), nn.Conv2d(b, b, 3, 1, 1)
        self.body = nn.Sequential(first, _norm(norm, b, 2), nn.ReLU(), second, _norm(norm, b, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return torch.relu(self.skip(x) + self.body(x))


def resnet(norm: str) -> nn.Module:
    """Build a ResNet of three blocks."""
    stem = nn.Conv2d(1, 12, 3, padding=1), _norm(norm, 12, 2), nn.ReLU()
    blocks = Residual(norm, 12, 12, 1), Residual(norm, 12, 24, 2), Residual(norm, 24, 24, 1)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


class UNet(nn.Module):
    """Two levels down, two up, with skips; two classes per pixel."""

    def __init__(self, norm: str) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), _norm(norm, b, 2), nn.ReLU())

        self.down, self.middle, self.bottom = block(1, 8), block(8, 16), block(16, 16)
        self.up, self.top, self.head = block(32, 8), block(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of every pixel."""
        first = self.down(x)
        second = self.middle(nn.functional.max_pool2d(first, 2))
        third = self.bottom(nn.functional.max_pool2d(second, 2))
        back = self.up(torch.cat([nn.functional.interpolate(third, scale_factor=2.0), second], 1))
        return self.head(self.top(torch.cat([nn.functional.interpolate(back, scale_factor=2.0), first], 1)))


class Recurrent(nn.Module):
    """An LSTM with a normalizer behind it: the last state classifies rows, every state the next character."""

    def __init__(self, norm: str, letters: int = 0) -> None:
        super().__init__()
        self.read = nn.Embedding(letters, 32) if letters else nn.Identity()
        self.core = nn.LSTM(32 if letters else 8, 48, batch_first=True)
        self.norm, self.head = _norm(norm, 48, 0), nn.Linear(48, letters or 10)
        self.every = bool(letters)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        states = self.core(self.read(x))[0]
        return self.head(self.norm(states if self.every else states[:, -1]))


class Attention(nn.Module):
    """A block of a GPT: normalizer, causal attention, normalizer, two linear layers."""

    def __init__(self, norm: str, width: int) -> None:
        super().__init__()
        self.before, self.between = _norm(norm, width, 0), _norm(norm, width, 0)
        self.mix, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the block."""
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(self.before(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.back(seen.transpose(1, 2).flatten(2))
        return x + self.body(self.between(x))


class GPT(nn.Module):
    """Two blocks of width 32 over 32 characters."""

    def __init__(self, norm: str, letters: int) -> None:
        super().__init__()
        self.read, self.place = nn.Embedding(letters, 32), nn.Parameter(0.02 * torch.randn(32, 32))
        self.blocks = nn.Sequential(Attention(norm, 32), Attention(norm, 32))
        self.last, self.head = _norm(norm, 32, 0), nn.Linear(32, letters)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of every next character."""
        return self.head(self.last(self.blocks(self.read(x) + self.place)))


def deep_mlp(norm: str) -> nn.Module:
    """Build twelve layers."""
    return mlp(norm, depth=12, width=32)


def fashion_mlp(norm: str) -> nn.Module:
    """Build the ReLU network for 14x14 images."""
    return mlp(norm, inputs=196)


def lstm(norm: str) -> nn.Module:
    """Build the reader of rows."""
    return Recurrent(norm)


def text_lstm(norm: str) -> nn.Module:
    """Build the recurrent language model."""
    return Recurrent(norm, _letters())


def gpt(norm: str) -> nn.Module:
    """Build the language model."""
    return GPT(norm, _letters())


def _letters() -> int:
    return 1 + max(int(part.max()) for split in data("text") for part in split)


# -- problems ----------------------------------------------------------------------------------------------------------

_RATES = {"sgd": (0.01, 0.1, 1.0), "momentum": (0.01, 0.05, 0.25), "adam": (1e-3, 4e-3, 16e-3)}
_RATES["adamw"] = _RATES["adam"]
_DECAYS = {"sgd": (0.0, 5e-4), "momentum": (0.0, 5e-4), "adam": (0.0, 1e-4), "adamw": (0.01, 0.3)}


@dataclass(frozen=True)
class Problem:
    """A network, data and an optimizer, with the setting people start from: the grid's first rate and decay.

    Attributes:
        name: network, data and optimizer.
        data: as `data` takes it.
        factory: `factory(norm)`.
        optimizer: sgd, momentum (0.9), adam or adamw.
        norms: the grid's; the first is the default.
        steps: of a training run.
        batch: samples per step.
    """

    name: str
    data: str
    factory: Callable[[str], nn.Module] = field(repr=False)
    optimizer: str
    norms: tuple[str, ...]
    steps: int
    batch: int

    @property
    def default(self) -> dict[str, Any]:
        """The setting people start from."""
        return next(self.grid())

    def grid(self) -> Iterator[dict[str, Any]]:
        """Yield the settings, the default first."""
        for norm, rate, decay in itertools.product(self.norms, _RATES[self.optimizer], _DECAYS[self.optimizer]):
            yield {"norm": norm, "lr": rate, "weight_decay": decay}

    def build(self, norm: str, seed: int) -> nn.Module:
        """Return the network with the weights of a seed."""
        torch.manual_seed(seed)
        return self.factory(norm)

    def descent(self, parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """Return the optimizer of parameters or groups."""
        if self.optimizer in ("sgd", "momentum"):
            momentum = 0.9 if self.optimizer == "momentum" else 0.0
            return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay, momentum=momentum)
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[self.optimizer](
            parameters, lr=lr, weight_decay=weight_decay
        )

    def run(self, setting: dict[str, Any], seed: int) -> dict[str, Any]:
        """Train at a setting, and return accuracies on validation and test in points; 0 for a run that diverged."""
        train_split, validation, test = data(self.data)
        start = time.perf_counter()
        network = self.build(setting["norm"], seed)
        optimizer = self.descent(network.parameters(), setting["lr"], setting["weight_decay"])
        done = train(network, train_split, optimizer, steps=self.steps, batch=self.batch, seed=seed, loss=loss)
        scores = {"validation": 0.0, "test": 0.0}
        if not done.diverged:
            scores = {"validation": accuracy(network, validation), "test": accuracy(network, test)}
        return {"problem": self.name, **setting, "seed": seed, **scores, "seconds": time.perf_counter() - start}


_IMAGE, _LIST, _SEQUENCE = ("batch", "group", "none"), ("batch", "layer", "none"), ("layer", "rms", "none")
PROBLEMS = (
    Problem("mlp digits sgd", "digits", mlp, "sgd", _LIST, 150, 64),
    Problem("mlp digits adamw", "digits", mlp, "adamw", ("none", "batch", "layer"), 100, 64),
    Problem("deep mlp digits sgd", "digits", deep_mlp, "sgd", ("none", "batch", "layer"), 150, 64),
    Problem("deep mlp digits adam", "digits", deep_mlp, "adam", _LIST, 100, 64),
    Problem("cnn digits momentum", "digits", cnn, "momentum", _IMAGE, 100, 64),
    Problem("cnn digits batch 4", "digits", cnn, "momentum", _IMAGE, 200, 4),
    Problem("resnet digits sgd", "digits", resnet, "sgd", _IMAGE, 80, 64),
    Problem("resnet digits adamw", "digits", resnet, "adamw", ("group", "batch", "none"), 60, 64),
    Problem("unet masks adam", "masks", UNet, "adam", _IMAGE, 60, 32),
    Problem("unet masks batch 2", "masks", UNet, "momentum", _IMAGE, 120, 2),
    Problem("lstm rows sgd", "rows", lstm, "sgd", ("none", "layer", "rms"), 150, 64),
    Problem("lstm rows adam", "rows", lstm, "adam", _SEQUENCE, 80, 64),
    Problem("mlp fashion adamw", "fashion", fashion_mlp, "adamw", _LIST, 100, 64),
    Problem("mlp fashion batch 4", "fashion", fashion_mlp, "sgd", _LIST, 200, 4),
    Problem("cnn fashion momentum", "fashion", cnn, "momentum", _IMAGE, 60, 48),
    Problem("resnet fashion adam", "fashion", resnet, "adam", _IMAGE, 40, 32),
    Problem("gpt text adamw", "text", gpt, "adamw", _SEQUENCE, 80, 24),
    Problem("gpt text momentum", "text", gpt, "momentum", _SEQUENCE, 80, 24),
    Problem("lstm text adamw", "text", text_lstm, "adamw", _SEQUENCE, 80, 24),
)


def available() -> tuple[Problem, ...]:
    """Return the problems whose data are on this machine."""
    from normgauge.errors import MissingDataError

    kept = []
    for problem in PROBLEMS:
        try:
            data(problem.data)
        except MissingDataError:
            continue
        kept.append(problem)
    return tuple(kept)


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what makes a run that run."""
    return tuple(row[name] for name in ("problem", "norm", "lr", "weight_decay", "seed"))


def main(path: str) -> None:
    """Run what of the grid is missing in the file, one seed of everything before the next."""
    torch.set_num_threads(1)
    file = Path(path)
    done = {identity(json.loads(line)) for line in file.read_text().splitlines()} if file.exists() else set()
    for seed in range(SEEDS):
        for problem in available():
            for setting in problem.grid():
                if identity({"problem": problem.name, **setting, "seed": seed}) not in done:
                    with file.open("a") as out:
                        out.write(json.dumps(problem.run(setting, seed)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
