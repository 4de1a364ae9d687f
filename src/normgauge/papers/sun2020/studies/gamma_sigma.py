"""Fig. 2: do gamma and beta become deviation and mean of the batch? The curves, the ellipsoid, the gauge test."""

import math

import torch
from torch import Tensor, nn

from normgauge.lab.models import Normalized
from normgauge.lab.models.normalized import normalized_layers
from normgauge.lab.runs.evaluate import evaluate
from normgauge.papers.language import Record, Spec, build, fit, register
from normgauge.theory.effective_weights import covariance

WATCHED = 1  # the first normalizer of the first residual block, as in the paper
RANK_TOLERANCE = 1e-6


@register("gamma-sigma")
def run(spec: Spec, record: Record) -> None:
    """Train, following gamma, sigma, beta, mu and the watched layer's ellipsoid."""
    (network, dataset), steps = build(spec, norm="batch"), int(spec["steps"])
    batch = (dataset.train[0][: int(spec["batch"])], dataset.train[1][: int(spec["batch"])])

    def watch(step: int, network: nn.Module) -> None:
        layers = _look(network, batch[0])
        for name, (gamma, beta, mean, deviation, inputs) in layers.items():
            if name == WATCHED:
                for kind, off in (("gamma", (gamma**2 - deviation**2).abs()), ("beta", (beta - mean).abs())):
                    record(step, f"{kind}_distance", _median(off))
                    record(step, f"one_{kind}_distance", float(off[0]))
                _ellipsoid(record, step, inputs, gamma)
        gammas = torch.cat([(g**2 - s**2).abs() / s.square() for g, _, _, s, _ in layers.values()])
        betas = torch.cat([(b - m).abs() / s for _, b, m, s, _ in layers.values()])
        record(step, "relative_gamma_distance", _median(gammas))
        record(step, "relative_beta_distance", _median(betas))

    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    at = sorted({round(steps * k / 20) for k in range(21)})
    fit(spec, network, dataset, optimizer, at=at, watch=watch).whole()
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)


def _look(network: nn.Module, inputs: Tensor) -> dict[int, tuple[Tensor, ...]]:
    """Return per normalized layer gamma, beta, and mean and deviation of its pre-activations on a batch, its inputs."""
    parts = normalized_layers(network)
    caught: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = [
        part.layer.register_forward_hook(lambda m, a, out, k=k: caught.__setitem__(k, (a[0].detach(), out.detach())))
        for k, part in enumerate(parts)
    ]
    stored = {name: value.clone() for name, value in network.named_buffers()}
    network.train()
    try:
        with torch.no_grad():
            network(inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for name, value in network.named_buffers():
            value.copy_(stored[name])
    layers: dict[int, tuple[Tensor, ...]] = {}
    for k, part in enumerate(parts):
        before, out = caught[k]
        rows = out.transpose(0, 1).flatten(1)
        gamma, beta = (part.norm.get_parameter(name).detach() for name in ("weight", "bias"))
        layers[k] = (gamma, beta, rows.mean(1), rows.std(1, unbiased=False), _patches(part, before))
    return layers


def _patches(part: Normalized, inputs: Tensor) -> Tensor:
    """Return what the weights are multiplied with, `[features, samples]`; for a convolution its patches."""
    layer = part.layer
    if not isinstance(layer, nn.Conv2d):
        return inputs.flatten(1).T
    kernel, edge, stride = layer.kernel_size, layer.padding, layer.stride
    cut = nn.functional.unfold(inputs, kernel, padding=edge, stride=stride)  # type: ignore[arg-type]
    return cut.transpose(0, 1).flatten(1)


def _ellipsoid(record: Record, step: int, inputs: Tensor, gamma: Tensor) -> None:
    """Record W' Sigma W'^T = gamma^2: the rank of Sigma, and axes gamma / sqrt(eigenvalue) of the median unit."""
    values = torch.linalg.eigvalsh(covariance(inputs.double()))
    kept = values[values > RANK_TOLERANCE * values[-1]]
    axes = float(gamma.abs().median()) / kept.sqrt()
    record(step, "ellipsoid_rank", len(kept))
    record(step, "ellipsoid_features", len(values))
    record(step, "log10_longest_axis", math.log10(max(float(axes.max()), 1e-300)))
    record(step, "log10_shortest_axis", math.log10(max(float(axes.min()), 1e-300)))


def _median(values: Tensor) -> float:
    return float(values.double().quantile(0.5))
