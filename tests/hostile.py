"""Models whose forward writes where it should not; each is a legal torch model that somebody trains."""

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint

from normgauge import Objective
from reference.tracks import Kept


class Net(nn.Module):
    """A small network; subclasses add a vice."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.set_up()

    def set_up(self):
        pass

    def vice(self, x):
        return x

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(self.vice(x)))))


class WritesInput(Net):
    def vice(self, x):
        return x.mul_(0.9)


class WritesParameter(Net):
    def vice(self, x):
        with torch.no_grad():
            self.first.weight.clamp_(-100.0, 100.0)  # a write that changes nothing
        return x


class NestedContainers(Net):
    def set_up(self):
        self.memory = {"deep": [{"mean": torch.zeros(4)}, (torch.zeros(2), [])], "queue": deque(maxlen=2)}

    def vice(self, x):
        self.memory["deep"][0]["mean"].add_(x.detach().mean(0))
        self.memory["deep"][1][0].data.add_(1.0)
        self.memory["deep"][1][1].append(len(x))
        self.memory["queue"].append(x.sum())
        self.memory["new"] = 1
        return x + 0 * self.memory["deep"][0]["mean"]


class NumpyAttribute(Net):
    def set_up(self):
        self.count, self.history = np.zeros(3), [np.arange(4.0)]

    def vice(self, x):
        self.count += 1
        self.history[0][0] = 7
        return x * float(self.count[0])


class OwnGenerators(Net):
    def set_up(self):
        self.source = torch.Generator().manual_seed(3)
        self.more = {"numpy": np.random.default_rng(0), "python": [random.Random(0)]}

    def vice(self, x):
        shift = self.more["numpy"].normal() + self.more["python"][0].random()
        return x + torch.rand(x.shape[-1:], generator=self.source) + shift


class GlobalStreams(Net):
    def vice(self, x):
        return x + float(np.random.rand()) + random.random() + torch.rand(())


class LazyBuffer(Net):
    def set_up(self):
        self.register_buffer("later", None)

    def vice(self, x):
        if "scale" not in self._buffers:
            self.register_buffer("scale", x.detach().std(0))
            self.later = torch.ones(1)
            self.extra = nn.Identity()
        return x / self.scale


class PlainObjects(Net):
    def set_up(self):
        self.state, self.kept = SimpleNamespace(calls=0), Kept(calls=0, seen=[torch.zeros(1)])

    def vice(self, x):
        self.state.calls += 1
        self.kept.calls += 1
        self.kept.seen[0].add_(1)
        self.kept.new = 1
        return x * self.kept.calls * self.state.calls


class HiddenModule(Net):
    def set_up(self):
        self.helpers = [nn.BatchNorm1d(4)]

    def vice(self, x):
        return self.helpers[0](x.detach()) + x


class KeptTwice(Net):
    """Reads its parameters from a list and a dict of its own."""

    def set_up(self):
        self.weights, self.more = [self.first.weight], {"deep": [self.last.bias]}

    def forward(self, x):
        return torch.tanh(self.norm(x @ self.weights[0].T)) @ self.last.weight.T + self.more["deep"][0]


class Checkpointed(Net):
    reentrant = False

    def set_up(self):
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2))

    def vice(self, x):
        x = x if x.requires_grad else x.clone().requires_grad_(torch.is_grad_enabled())
        return checkpoint.checkpoint(self.middle, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class SpectralTrain(Net):
    def set_up(self):
        nn.utils.parametrizations.spectral_norm(self.first)


class ClippedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(4, 5, max_norm=1.0), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.embedding(x.argmax(1))))


HOSTILE = [
    WritesInput,
    WritesParameter,
    NestedContainers,
    NumpyAttribute,
    OwnGenerators,
    GlobalStreams,
    LazyBuffer,
    PlainObjects,
    HiddenModule,
    KeptTwice,
    Checkpointed,
    CheckpointedReentrant,
    SpectralTrain,
    ClippedEmbedding,
]


def hostile_objective(kind, mode, dtype=None):
    torch.manual_seed(0)
    dtype = dtype or torch.get_default_dtype()
    model = kind().to(dtype)
    data = (torch.randn(12, 4, dtype=dtype), torch.randint(3, (12,)))
    return Objective(model, F.cross_entropy, data, mode=mode)
