"""Directions of a slice through parameter space: random, filter-normalized, or along a path."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.rng import generator

Values = dict[str, Tensor]


def random_direction(like: Mapping[str, Tensor], seed: int | torch.Generator) -> Values:
    """Return independent standard normal entries shaped and typed like the parameters."""
    source = generator(seed) if isinstance(seed, int) else seed
    return {n: torch.randn(v.shape, generator=source, dtype=torch.float64).to(v) for n, v in like.items()}


def normalize_filters(direction: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Values:
    """Give each filter of the direction the norm of the parameters' filter.

    A filter is a slice of the first axis of a tensor with two or more axes. Vectors (biases, gains) are left out:
    their direction is zero, as in Li et al.

    Examples:
        >>> p, d = {"w": torch.tensor([[3.0, 4.0]])}, {"w": torch.tensor([[1.0, 0.0]])}
        >>> normalize_filters(d, p)["w"]
        tensor([[5., 0.]])
    """
    scaled = {}
    for name, value in parameters.items():
        if value.ndim < 2:
            scaled[name] = torch.zeros_like(value)
            continue
        axes = tuple(range(1, value.ndim))
        size = torch.linalg.vector_norm(value, dim=axes, keepdim=True)
        own = torch.linalg.vector_norm(direction[name], dim=axes, keepdim=True)
        scaled[name] = direction[name] * size / own.clamp_min(torch.finfo(value.dtype).tiny)
    return scaled


def principal_directions(origin: Mapping[str, Tensor], path: Sequence[Mapping[str, Tensor]]) -> tuple[Values, Values]:
    """Return the two principal directions of `path` minus `origin`, scaled to the largest extent of the path.

    Raises:
        InputError: when the path has fewer than two points off the origin.
    """
    rows = torch.stack([torch.cat([(p[n] - origin[n]).double().reshape(-1) for n in origin]) for p in path])
    _, sizes, vectors = torch.linalg.svd(rows, full_matrices=False)
    if len(sizes) < 2 or not sizes[1] > 1e-12 * sizes[0]:
        rule = "principal directions need a path that spans a plane with the objective's point"
        got = f"a path of {len(path)} points of rank {int((sizes > 1e-12 * sizes[0]).sum())}"
        raise InputError("loss_surface", rule, got, "Pass more checkpoints in paths=, or other directions")
    extents = (rows @ vectors[:2].T).abs().amax(0)
    return _split(vectors[0] * extents[0], origin), _split(vectors[1] * extents[1], origin)


def coordinates(
    point: Mapping[str, Tensor], origin: Mapping[str, Tensor], directions: Sequence[Mapping[str, Tensor]]
) -> tuple[float, float, float]:
    """Return the plane coordinates of the point nearest to `point`, and the distance from the plane."""
    names = list(origin)
    away = torch.cat([(point[n].to(origin[n]) - origin[n]).double().reshape(-1) for n in names])
    basis = torch.stack([torch.cat([d[n].double().reshape(-1) for n in names]) for d in directions], dim=1)
    solution = torch.linalg.lstsq(basis, away[:, None]).solution[:, 0]
    return float(solution[0]), float(solution[1]), float((away - basis @ solution).norm())


def _split(vector: Tensor, like: Mapping[str, Tensor]) -> Values:
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.view(value.shape).to(value) for part, (name, value) in zip(parts, like.items(), strict=True)}
