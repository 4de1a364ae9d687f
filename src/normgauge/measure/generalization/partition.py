"""Cells of the data space: balls about centres, met with the centres' regions, split by class, and the rest."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.rng import generator

Choice = int | Tensor | Sequence[int]
_ROUNDS = 50
_MANY = 1000  # all pairs of more would not fit


@dataclass(frozen=True, slots=True)
class Piece:
    """The samples of one occupied cell."""

    center: int  # index of the centre, or -1 for the rest
    label: int  # the class, or -1 where cells are not split by class
    members: Tensor  # indices of its samples
    radius: float  # the cell lies within this distance of its centre; inf for the rest
    distance: float  # bound of the mean distance between a sample and a point of the cell
    distance_seen: float  # that mean over the pairs of samples; nan for a single sample


@dataclass(frozen=True)
class Partition:
    """A partition of the data space into `cells` cells."""

    centers: Tensor  # `[k, d]`, float64
    radii: Tensor  # `[k]`
    cells: int  # N, counted before the samples are seen
    by_user: bool = False  # whether the user gave an assignment of samples, which says nothing of a cell's extent

    def pieces(self, points: Tensor, labels: Tensor | None, assignment: Tensor | None = None) -> Iterator[Piece]:
        """Yield the occupied cells with their samples and distances; a sample outside its ball is in the rest."""
        far = torch.cdist(points, self.centers)
        nearest = far.argmin(dim=1) if assignment is None else assignment
        reach = far.gather(1, nearest[:, None]).squeeze(1)
        if assignment is None:
            nearest = torch.where(reach <= self.radii[nearest], nearest, -1)
        kinds = torch.full_like(nearest, -1) if labels is None else labels
        for center in nearest.unique().tolist():
            here = nearest == center
            if center < 0:  # one cell for the rest: the loss may do there what it likes
                yield Piece(-1, -1, here.nonzero().flatten(), math.inf, math.inf, math.nan)
                continue
            for label in kinds[here].unique().tolist():
                members = (here & (kinds == label)).nonzero().flatten()
                radius = float(self.radii[center])
                mean = radius + float(reach[members].mean())
                yield Piece(center, label, members, radius, mean, _mean_distance(points[members]))

    def stay(self, points: Tensor, cells: Tensor, before: Tensor) -> Tensor:
        """Return points moved into the balls of their cells, or `before`, where another centre is nearer (cell -1)."""
        inside = self.centers[cells]
        away = points - inside
        far = away.norm(dim=1, keepdim=True)
        moved = inside + away * (self.radii[cells, None] / far.clamp_min(1e-300)).clamp_max(1.0)
        nearest = torch.cdist(moved, self.centers).argmin(dim=1)
        return torch.where(((nearest == cells) & (cells >= 0))[:, None], moved, before)


def fit_partition(points: Tensor, count: int, classes: int, radius: float | None, source: torch.Generator) -> Partition:
    """Return the partition by k-means on `points`; each ball reaches the farthest of its points, or `radius`."""
    centers = kmeans(points, count, source)
    far, nearest = torch.cdist(points, centers).min(dim=1)
    radii = torch.zeros(len(centers), dtype=torch.float64)
    radii = radii.scatter_reduce(0, nearest, far, reduce="amax")
    if radius is not None:
        radii = torch.full_like(radii, radius)
    return Partition(centers, radii, len(centers) * classes + 1)


def partition_around(centers: Tensor, classes: int, radius: float) -> Partition:
    """Return the partition of balls of one radius about given centres."""
    return Partition(centers, torch.full((len(centers),), radius, dtype=torch.float64), len(centers) * classes + 1)


def partition_from_cells(points: Tensor, assignment: Tensor, classes: int) -> Partition:
    """Return the partition a user gave by samples: centres and radii are those of the samples seen."""
    count = int(assignment.max()) + 1
    centers = torch.zeros(count, points.shape[1], dtype=torch.float64)
    radii = torch.zeros(count, dtype=torch.float64)
    for number in assignment.unique().tolist():
        mine = points[assignment == number]
        centers[number] = mine.mean(0)
        radii[number] = (mine - centers[number]).norm(dim=1).max()
    return Partition(centers, radii, count * classes, by_user=True)


def points_of(inputs: Tensor, targets: Tensor) -> Tensor:
    """Return inputs, with real targets beside them, as rows in float64: the space the cells lie in."""
    flat = inputs.detach().double().reshape(len(inputs), -1).cpu()
    if not targets.is_floating_point():
        return flat
    return torch.cat([flat, targets.detach().double().reshape(len(targets), -1).cpu()], dim=1)


def sizes_to_try(samples: int, classes: int, holdout: float) -> tuple[int, ...]:
    """Return the numbers of centres to try: from one, over one per class, to one per 100 samples and class.

    They depend on counts alone, so that a union bound over them holds whatever the samples are.

    Examples:
        >>> sizes_to_try(20000, 2, 0.2), sizes_to_try(300, 10, 0.2)
        ((1, 2, 13, 80), (1,))
    """
    most = max(1, (samples - max(1, round(holdout * samples))) // (100 * classes))
    return tuple(sorted({1, min(classes, most), round(math.sqrt(min(classes, most) * most)), most}))


def partition_of(
    points: Tensor, classes: int, choice: Choice, *, radius: float | None, holdout: float, seed: int
) -> tuple[Partition, Tensor, Tensor | None]:
    """Return the partition, which samples the bound uses, and their cells where the user gave them.

    `choice`: number of centres, centres or a cell number per sample, see `ng.generalization`; each ball is split into
    `classes`.
    """
    every = torch.arange(len(points))
    if isinstance(choice, int):
        source = generator(seed)
        order = torch.randperm(len(points), generator=source)
        held = max(1, round(holdout * len(points)))
        part = fit_partition(points[order[:held]], choice, classes, radius, source)
        return part, order[held:].sort().values, None
    table = torch.as_tensor(choice)
    if table.is_floating_point():
        centers = table.double().reshape(len(table), -1)
        if centers.shape[1] != points.shape[1] or radius is None:
            rule = f"centres have {points.shape[1]} entries each (inputs, and real targets) and need a radius"
            got = f"centres of {centers.shape[1]} entries, radius={radius}"
            step = "Pass partition=centres with radius=, or a number of cells"
            raise InputError("generalization", rule, got, step)
        return partition_around(centers, classes, radius), every, None
    if table.shape != (len(points),) or int(table.min()) < 0:
        rule = f"a given partition has one cell number >= 0 for each of the {len(points)} samples"
        raise InputError("generalization", rule, f"shape {tuple(table.shape)}", "Pass a number of cells instead")
    return partition_from_cells(points, table.long(), classes), every, table.long()


def kmeans(points: Tensor, count: int, source: torch.Generator) -> Tensor:
    """Return `count` centres by Lloyd's rounds from a k-means++ start.

    Cost: at most 50 passes over the distances between points and centres.

    Examples:
        >>> points = torch.tensor([[0.0], [1.0], [10.0], [11.0]], dtype=torch.float64)
        >>> sorted(kmeans(points, 2, torch.Generator().manual_seed(0)).flatten().tolist())
        [0.5, 10.5]

    References: arthur2007
    """
    if not 1 <= count <= len(points):
        rule = "the number of cells lies between 1 and the number of points they are fitted to"
        got = f"{count} cells for {len(points)} points"
        raise InputError("partition", rule, got, "Ask for fewer cells, or raise holdout=")
    centers = points[torch.randint(len(points), (1,), generator=source)]
    for _ in range(count - 1):
        weights = torch.cdist(points, centers).min(dim=1).values.square()
        if not float(weights.sum()) > 0:  # fewer distinct points than centres
            break
        centers = torch.cat([centers, points[torch.multinomial(weights, 1, generator=source)]])
    for _ in range(_ROUNDS):
        nearest = torch.cdist(points, centers).argmin(dim=1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, points)
        counts = torch.zeros(len(centers), dtype=points.dtype).index_add_(0, nearest, torch.ones_like(points[:, 0]))
        moved = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], centers)
        if torch.equal(moved, centers):
            break
        centers = moved
    return centers


def _mean_distance(points: Tensor) -> float:
    """Return the mean distance between two different samples, of the first thousand."""
    points = points[:_MANY]
    count = len(points)
    if count < 2:
        return math.nan
    return float(torch.cdist(points, points).sum()) / (count * (count - 1))
