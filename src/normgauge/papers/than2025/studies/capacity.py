"""S2 Corollaries 10 and 11, Theorems 6 and 9: brackets of the Lipschitz constant beside the printed products."""

import math

import torch
from torch import Tensor, nn

from normgauge.lab import models
from normgauge.measure.lipschitz.lipschitz import lipschitz
from normgauge.nn import cascade
from normgauge.papers.language import Record, Spec, register
from normgauge.papers.than2025.studies._printed_products import printed_products, train_network
from normgauge.rng import generator

RADIUS = 0.1  # of the balls around the data, as a share of the radius of the ball that holds the data
SENSES = ("steepest", "at_data", "on_ball", "everywhere", "printed")


@register("capacity")
def run(spec: Spec, record: Record) -> None:
    """Bracket the network at its start, where all arms have the same weights, and after training."""
    training = train_network(spec, record)
    data = training.dataset.train[0][: int(spec["samples"])]
    last = int(spec["steps"])
    for step, prefix, network in ((0, "first_", training.start), (last, "", training.end)):
        for name, value in measure_capacity(network, data, training.reach).items():
            record(last, f"{prefix}log10_{name}", value)
            if name in SENSES and step != last:
                record(step, f"log10_{name}", value)
    sizes = [10**value for value in printed_products(training.end, data).weights]
    chain = cascade([4] * (len(sizes) + 1), sizes, dtype=torch.float64)
    attained = lipschitz(chain, torch.ones(1, 4).double(), climbs=0)
    record(last, "theorem_6_misfit", abs(attained.log10_lower - sum(map(math.log10, sizes))))


def measure_capacity(network: nn.Module, data: Tensor, reach: float = 1.0) -> dict[str, float]:
    """Return log10 of the bracket's ends in three senses, and of the printed products."""
    ball = lipschitz(network, data, radius=RADIUS * reach, climbs=3)
    anywhere = lipschitz(network, torch.cat([data, suspects(network, data)]), climbs=3)
    printed = printed_products(network, data)
    assert ball.log10_on_ball is not None  # it was asked for with a radius
    return {
        "steepest": max(anywhere.log10_lower, ball.log10_lower),
        "steepest_on_ball": ball.log10_lower,
        "at_data": ball.log10_at_data,
        "on_ball": ball.log10_on_ball,
        "everywhere": anywhere.log10_global,
        "weight_product": printed.weight_product,
        "normalizers": printed.normalizers,
        "printed": printed.bound,
        "printed_power": printed.power,
        "printed_defined": printed.defined,
        "printed_scaled": printed.scaled,
    }


def suspects(network: nn.Module, data: Tensor) -> Tensor:
    """Return inputs where a normalizer by sample divides by little: near 0, and where the first layer is constant.

    All arms get them. A trained bias moves the steep point away from 0; `P (W x + b) = 0`, P the projection that
    takes the mean off, has a solution where W has as many columns as rows.
    """
    noise = torch.randn((4, *data.shape[1:]), generator=generator(0)).to(data)
    points = [1e-5 * noise[:3]]
    first = next(part.layer for part in network.modules() if isinstance(part, models.Normalized))
    if isinstance(first, nn.Linear):
        weight = first.weight.detach().double()
        bias = torch.zeros(len(weight)).double() if first.bias is None else first.bias.detach().double()
        point = -torch.linalg.pinv(weight - weight.mean(0)) @ (bias - bias.mean())
        points.append(point.to(data).reshape(1, *data.shape[1:]) + 1e-6 * noise[3:])
    return torch.cat(points)
