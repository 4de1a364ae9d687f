"""`ng.loss_surface`: the loss on a plane through the parameters, with trajectories drawn on it."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from normgauge.charts import surface
from normgauge.errors import InputError, NonFiniteError, StoreError
from normgauge.objective import Objective, tensors
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument
from normgauge.rng import generator

NOWHERE = "no point of the grid has a finite loss"
LOWER = 0.01  # of the height of the surface above the origin: what a grid of 25 points cannot resolve
Values = dict[str, Tensor]
Directions = Literal["filter", "pca"] | Sequence[Mapping[str, Tensor]] | None


@dataclass(frozen=True)
class LossSurface(Result):
    """Losses on the grid origin + a d_1 + b d_2, and trajectories in the same coordinates.

    Attributes:
        grid: the values of a, and of b.
        losses: `losses[j][i]` at a = grid[i], b = grid[j]; nan where the loss is not finite.
        paths: per trajectory the points (a, b, distance from the plane).
        directions: "filter", "pca" or "given".
        canonical: whether the origin is the canonical point of its orbit under the symmetries.
        loss: at the origin.
    """

    grid: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    paths: tuple[tuple[tuple[float, float, float], ...], ...]
    directions: str
    canonical: bool
    loss: float

    def _title(self) -> str:
        n = len(self.grid)
        return f"Loss surface of {n} x {n} points, directions {self.directions}: loss {self.loss:.4g} at the origin"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"a": a, "b": b, "loss": self.losses[j][i]}
            for j, b in enumerate(self.grid)
            for i, a in enumerate(self.grid)
        ]

    def _shown_rows(self) -> list[dict[str, Any]]:
        """Return the extremes in place of all points."""
        finite = [row for row in self._rows() if math.isfinite(row["loss"])] or self._rows()[:1]
        ordered = sorted(finite, key=lambda row: row["loss"])
        return [{"point": "lowest", **ordered[0]}, {"point": "highest", **ordered[-1]}]

    def readings(self) -> tuple[Reading, ...]:
        """Return the losses at the origin, at the lowest and at the highest point of the grid."""
        ends = [Reading.measured(f"{row['point']} loss", row["loss"], why=NOWHERE) for row in self._shown_rows()]
        return Reading("loss at the origin", self.loss), *ends

    def _meaning(self) -> str:
        low, high = self._shown_rows()
        if math.isnan(low["loss"]):
            return f"None of the {len(self.grid) ** 2} points has a finite loss: choose a smaller span."
        room = LOWER * max(high["loss"] - self.loss, 0.0)
        plane = f"In this plane the loss goes from {low['loss']:.4g} to {high['loss']:.4g}"
        if self.loss - low["loss"] > room:
            place = f"({low['a']:.3g}, {low['b']:.3g})"
            return f"{plane}, and it is lower at {place} than at the origin ({self.loss:.4g}): not the bottom yet."
        where = f"nowhere below the origin by over {LOWER:.0%} of its height"
        return f"{plane}, {where}: a bottom along these 2 directions."

    def _notes(self) -> str:
        holes = sum(not math.isfinite(row["loss"]) for row in self._rows())
        away = max((p[2] for path in self.paths for p in path), default=0.0)
        point = "canonical point" if self.canonical else "given point"
        return f"{point}; {holes} points not finite; paths up to {away:.3g} off the plane"

    def chart(self, levels: int = 8) -> Chart:
        """Return a heat map with contour lines, and the trajectories on it."""
        paths = [
            {"a": a, "b": b, "path": number, "step": step}
            for number, path in enumerate(self.paths)
            for step, (a, b, _) in enumerate(path)
        ]
        return surface(self._rows(), x="a", y="b", value="loss", paths=paths, levels=levels, title="loss surface")


@instrument
def loss_surface(
    objective: Objective,
    *,
    directions: Directions = None,
    span: float = 1.0,
    points: int = 25,
    paths: Sequence[Sequence[Mapping[str, Tensor]]] = (),
    seed: int = 0,
    symmetries: Any = None,
    resume: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LossSurface:
    """Evaluate L(origin + a d_1 + b d_2) for a, b on a grid of `points` values in [-span, span].

    Directions are two random ones, each filter scaled to the norm of the parameters' filter (Li et al.); or the two
    principal ones of all paths about the origin, scaled to their extent ("pca"); or given. With `symmetries` the
    origin, the paths and the random directions are first moved to the canonical point of their orbit, so that
    rescalings that change no output cannot change the picture.

    Kind: exact on the grid. Cost: points^2 + 1 forwards.

    Args:
        objective: model, loss, data, mode.
        directions: `None` or "filter"; "pca"; or two dicts shaped like the parameters.
        span: half-width of the grid in units of the directions.
        points: grid values per axis; an odd number includes the origin.
        paths: trajectories, each a sequence of parameter dicts, drawn where they are nearest in the plane.
        seed: of random directions.
        symmetries: what `ng.symmetries(objective)` gave.
        resume: a JSON file that keeps the losses found; a second call with the same settings continues there.
        progress: called as `progress(done, total)`.

    Examples:
        For L = w_1^2 + w_2^2 with given unit directions the surface is a^2 + b^2:

        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> data = (2**0.5 * torch.eye(2), torch.zeros(2, 1))
        >>> objective = Objective(model, torch.nn.functional.mse_loss, data, mode="eval").at(torch.zeros(2))
        >>> axes = [{"weight": torch.tensor([[1.0, 0.0]])}, {"weight": torch.tensor([[0.0, 1.0]])}]
        >>> surface = loss_surface(objective, directions=axes, points=3)
        >>> [[round(value, 4) for value in row] for row in surface.losses]
        [[2.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 2.0]]

    References: li2018, akbar2025.
    """
    if points < 2 or not span > 0:
        rule = "points must be at least 2 and span positive"
        raise InputError("loss_surface", rule, f"{points}, {span:g}", "Use 25, 1.0")
    canonical = symmetries.canonical if symmetries is not None else dict
    origin: Values = canonical(dict(objective.parameters))
    moved = [[canonical({n: p[n].detach() for n in origin}) for p in path] for path in paths]
    plane, kind = _plane(directions, origin, [p for path in moved for p in path], seed, symmetries)
    grid = [span * (2 * i / (points - 1) - 1) for i in range(points)]
    key = _fingerprint(objective, origin, plane, grid)
    losses = _read_losses(resume, key)
    for index in range(len(losses), points**2):
        b, a = grid[index // points], grid[index % points]
        there = {n: v + a * plane[0][n] + b * plane[1][n] for n, v in origin.items()}
        try:
            losses.append(float(objective.at(there).loss()))
        except NonFiniteError:
            losses.append(math.nan)
        if resume is not None and index % points == points - 1:
            Path(resume).write_text(json.dumps({"key": key, "losses": losses}), encoding="utf-8")
        if progress is not None:
            progress(index + 1, points**2)
    return LossSurface(
        grid=tuple(grid),
        losses=tuple(tuple(losses[j * points : (j + 1) * points]) for j in range(points)),
        paths=tuple(tuple(coordinates(p, origin, plane) for p in path) for path in moved),
        directions=kind,
        canonical=symmetries is not None,
        loss=float(objective.at(origin).loss()),
    )


def _plane(
    directions: Directions, origin: Values, path: Sequence[Values], seed: int, symmetries: Any
) -> tuple[tuple[Values, Values], str]:
    if directions is None or directions == "filter":
        drawn = [random_direction(origin, seed * 2 + i) for i in (1, 2)]
        if symmetries is not None:
            drawn = [symmetries.project(direction, origin) for direction in drawn]
        first, second = (normalize_filters(direction, origin) for direction in drawn)
        return (first, second), "filter"
    if directions == "pca":
        if not path:
            raise InputError("loss_surface", "directions='pca' needs paths", "none", "Pass paths=[checkpoints]")
        return principal_directions(origin, path), "pca"
    if isinstance(directions, str) or len(directions) != 2:
        got = repr(directions) if isinstance(directions, str) else f"{len(directions)} directions"
        rule = "directions are None, 'filter', 'pca' or two dicts of tensors"
        raise InputError("loss_surface", rule, got, "Pass two dicts shaped like objective.parameters")
    vectors = [{n: d[n].to(v) if n in d else torch.zeros_like(v) for n, v in origin.items()} for d in directions]
    a, b = (torch.cat([value.double().reshape(-1) for value in d.values()]) for d in vectors)
    if not float(a @ b) ** 2 < (1 - 1e-12) * float(a @ a) * float(b @ b):
        rule = "two directions must span a plane"
        raise InputError("loss_surface", rule, "parallel or zero ones", "Pass other directions")
    return (vectors[0], vectors[1]), "given"


def _read_losses(resume: str | Path | None, key: str) -> list[float]:
    if resume is None or not Path(resume).exists():
        return []
    where = f"loss_surface(resume={str(resume)!r})"
    try:
        kept = json.loads(Path(resume).read_text(encoding="utf-8"))
        losses = [float(value) for value in kept["losses"]]
        same = kept["key"] == key
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(where, "the file must be one written here", str(error), "Remove it") from error
    if not same:
        rule = "the file must belong to the same parameters, directions, grid and mode"
        raise StoreError(where, rule, "one of another surface", "Choose another file, or remove it")
    return losses


def _fingerprint(objective: Objective, origin: Values, plane: tuple[Values, Values], grid: Sequence[float]) -> str:
    mark = hashlib.sha256(f"{objective.mode} {list(grid)}".encode())
    named = [item for values in (origin, *plane) for item in values.items()]
    for name, value in [*named, *(("", value) for _, batch in objective.batches() for value in tensors(batch))]:
        mark.update(name.encode())
        mark.update(value.detach().cpu().double().contiguous().numpy().tobytes())
    return mark.hexdigest()


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
    scaled = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for name, value in parameters.items():
        if axes := tuple(range(1, value.ndim)):
            size, own = (torch.linalg.vector_norm(t, dim=axes, keepdim=True) for t in (value, direction[name]))
            scaled[name] = direction[name] * size / own.clamp_min(torch.finfo(value.dtype).tiny)
    return scaled


def principal_directions(origin: Mapping[str, Tensor], path: Sequence[Mapping[str, Tensor]]) -> tuple[Values, Values]:
    """Return the two principal directions of `path` minus `origin`, scaled to the largest extent of the path."""
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
