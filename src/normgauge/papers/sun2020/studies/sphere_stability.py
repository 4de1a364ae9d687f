"""The second headline: over how many decades of rates does training work, free, projected, or kept on spheres?"""

import math
from statistics import fmean
from typing import Any

import torch
from torch import nn

from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.models.normalized import direction_weight, normalized_layers, rescale
from normgauge.optim import ProjectedAdam, ProjectedSGD, SphereAdam, SphereSGD
from normgauge.papers.language import Record, Spec, fit, register

#: Half decades, wide enough that at both ends nothing trains.
RATES = {"sgd": [10 ** (k / 2) for k in range(-7, 3)], "adam": [10 ** (k / 2) for k in range(-9, 1)]}
GUESS = math.log(10)  # the loss of a guess among ten classes


@register("sphere-stability")
def run(spec: Spec, record: Record) -> None:
    """Train at every rate and count those that work; `started` begins on the sphere and is free from there."""
    digits = datasets.load(spec["data"])
    rates = RATES[spec["family"]][:: int(spec.get("every", 1))]
    removed, diverged = [], []
    for rate in rates:
        network = models.build("mlp", spec["norm"], digits.shape, digits.classes, int(spec["seed"]))
        optimizer = _optimizer(spec, network, rate)
        course = fit(spec, network, digits, optimizer)
        last = min(GUESS, math.inf if course.diverged else fmean(course.losses[-10:]))
        removed.append(1 - last / GUESS)
        diverged.append(course.diverged)
        record(0, "final_loss", last, layer=f"{math.log10(rate):g}")
    # each rate counts by the share of a guess's loss that it removes, so that no threshold has to be chosen
    record(int(spec["steps"]), "usable_decades", 0.5 * sum(removed) * int(spec.get("every", 1)))
    record(int(spec["steps"]), "diverged_share", fmean(diverged))


def _optimizer(spec: Spec, network: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Scale the normalized weights, put them on unit spheres if so told, and return the optimizer of this way.

    On unit spheres the rate is the one at which a step turns the usual initial weights as far as it does free: SGD's
    turns by lr |g| / |w|^2, Adam's by lr / |w|. What no normalizer makes scale-invariant has the same rate in all ways.
    """
    parts, way, sgd = normalized_layers(network), spec["way"], spec["family"] == "sgd"
    for part in parts:
        if part.declaration.placement != "weights" and isinstance(part.layer.bias, nn.Parameter):
            part.layer.bias.requires_grad_(False)  # with a bias the scale would be free of both together only
    weights = [direction_weight(part) for part in parts]
    blocks = {"batch": len(weights[0]), "weight": len(weights[0]), "layer": 1}.get(spec["norm"])
    blocks = blocks or int(getattr(parts[0].norm, "num_groups", 1))
    norms = torch.cat([w.detach().reshape(blocks, -1).norm(dim=1) for w in weights])
    rescale(network, float(spec["scale"]))
    unit = way in ("started", "sphere")
    if unit:
        with torch.no_grad():
            for w in weights:
                w.copy_(nn.functional.normalize(w.reshape(blocks, -1)).reshape(w.shape))
    factor = float((norms ** (-2.0 if sgd else -1.0)).mean()) if unit else 1.0
    known = {id(w) for w in weights}
    rest = [p for p in network.parameters() if id(p) not in known and p.requires_grad]
    on: dict[str, Any] = {"params": weights, "lr": rate * factor}
    memory: dict[str, Any] = {"momentum": 0.9} if sgd else {}
    if way in ("free", "started"):
        groups = [on, {"params": rest}]
        return torch.optim.SGD(groups, lr=rate, **memory) if sgd else torch.optim.Adam(groups, lr=rate)
    curved = {**on, "geometry": "sphere", "granularity": blocks, **({"radius": 1.0} if way == "sphere" else {})}
    kinds = (SphereSGD, ProjectedSGD) if sgd else (SphereAdam, ProjectedAdam)
    chosen: Any = kinds[way == "projected"]
    optimizer: torch.optim.Optimizer = chosen([curved, {"params": rest, "geometry": "euclidean"}], lr=rate, **memory)
    return optimizer
