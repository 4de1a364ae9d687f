"""Small fully connected networks of stated sizes under a normalizer, and the data they learn."""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import nn

from normgauge.lab import data
from normgauge.lab.models import Normalized
from normgauge.nn import init


def relu_network(
    sizes: Sequence[int], norm: str, seed: int, *, bias: bool = True, dtype: torch.dtype = torch.float64
) -> nn.Sequential:
    """Build linear layers of these sizes with normalizer and ReLU between them, He weights drawn from the seed.

    The weights do not depend on the normalizer, so that arms can be paired; the last layer is not normalized. `sizes`
    are inputs, hidden widths, outputs.
    """
    pairs = itertools.pairwise(sizes[:-1])
    hidden = [Normalized(nn.Linear(fan_in, fan_out, bias=bias), norm, 0) for fan_in, fan_out in pairs]
    layers = [part for layer in hidden for part in (layer, nn.ReLU())]
    network = nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-2], sizes[-1])).to(dtype)
    init.he(network, seed=seed)
    for layer in hidden:
        layer.wrap_weights()
    return network


@functools.lru_cache(maxsize=2)
def dataset(name: str) -> data.Dataset:
    """Return `data.load(name)`, read once per process: a sweep of tiny runs would spend its time reading."""
    return data.load(name)
