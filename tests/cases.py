"""Small models of every kind, each with data and a loss, on which guarantees are tested."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from normgauge import Objective


@dataclass(frozen=True)
class Case:
    """A way to make an Objective afresh: `make(mode)`."""

    name: str
    make: Callable[[str], Objective]

    def __str__(self) -> str:
        return self.name


def classification(model: nn.Module, *shape: int, classes: int = 3, samples: int = 12) -> Callable[[str], Objective]:
    inputs = torch.randn(samples, *shape, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(classes, (samples,), generator=torch.Generator().manual_seed(2))
    return lambda mode: Objective(model, F.cross_entropy, (inputs, targets), mode=mode)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, padding=1)
        self.body = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1))
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.body(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.block(x).mean(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens).mean(1)))


class Players(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        self.critic = nn.Sequential(nn.Linear(2, 4), nn.LeakyReLU(), nn.Linear(4, 1))


class Secretive(nn.Module):
    """Keeps state outside buffers: a counter, a list, a plain tensor changed in place, a new attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls, self.seen, self.average = 0, [], torch.zeros(3)

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape)
        self.average.add_(x.detach().mean(0))
        self.last = x
        return self.linear(x) + torch.rand(3)


def gan_player(mode: str) -> Objective:
    model = Players()
    batch = {
        "noise": torch.randn(8, 2, generator=torch.Generator().manual_seed(3)),
        "real": torch.randn(8, 2, generator=torch.Generator().manual_seed(4)),
    }

    def step(m, b):
        fake = m.generator(b["noise"])
        return {"adversarial": -m.critic(fake).mean(), "moments": (fake.mean(0) - b["real"].mean(0)).square().sum()}

    return Objective.from_step(
        model, step, batch, mode=mode, parameters="generator.*", outputs=lambda m, b: m.generator(b["noise"])
    )


def tied(mode: str) -> Objective:
    tokens = torch.randint(5, (10, 4), generator=torch.Generator().manual_seed(5))
    return Objective(Tied(), F.cross_entropy, (tokens, tokens[:, 0]), mode=mode)


def mapping_inputs(mode: str) -> Objective:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, *, left, right):
            return self.left(left) * self.right(right)

    source = torch.Generator().manual_seed(6)
    inputs = {"left": torch.randn(6, 3, generator=source), "right": torch.randn(6, 2, generator=source)}
    return Objective(Keyword(), F.mse_loss, (inputs, torch.randn(6, 2, generator=source)), mode=mode)


def frozen_layer(mode: str) -> Objective:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    return classification(model, 3)(mode)


def several_batches(mode: str) -> Objective:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    source = torch.Generator().manual_seed(7)
    data: list[Any] = [
        (torch.randn(n, 3, generator=source), torch.randint(3, (n,), generator=source)) for n in (8, 5, 3)
    ]
    return Objective(model, F.cross_entropy, data, mode=mode)


def _hooked_weight_norm() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's older weight_norm keeps `weight` as a plain attribute: worth a case
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 3))


def _parametrized() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(27, 3)
    )


CASES = [
    Case("mlp", lambda mode: classification(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), 3)(mode)),
    Case("cnn_batchnorm_dropout", lambda mode: classification(_cnn(), 1, 5, 5)(mode)),
    Case("resnet", lambda mode: classification(Residual(), 1, 5, 5)(mode)),
    Case("lstm", lambda mode: classification(Recurrent(), 5, 3)(mode)),
    Case("transformer", lambda mode: classification(Transformer(), 5, 4)(mode)),
    Case("tied_embedding", tied),
    Case("weight_norm_parametrized", lambda mode: classification(_parametrized(), 3)(mode)),
    Case("weight_norm_hooks", lambda mode: classification(_hooked_weight_norm(), 3)(mode)),
    Case("gan_player", gan_player),
    Case("mapping_inputs", mapping_inputs),
    Case("frozen_layer", frozen_layer),
    Case("several_batches", several_batches),
    Case("secretive_state", lambda mode: classification(Secretive(), 3)(mode)),
]
