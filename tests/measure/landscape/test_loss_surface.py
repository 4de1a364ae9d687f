"""The loss surface against copies of the model, its directions, paths, invariance and resumption."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normgauge.errors import InputError, StoreError
from normgauge.measure.landscape.loss_surface import loss_surface, normalize_filters, random_direction
from normgauge.objective import Objective
from normgauge.symmetry import symmetries
from reference.loss_surface import surface_by_copies
from reference.tracks import same, tracks


def problem(norm=None):
    model = nn.Sequential(nn.Linear(4, 6), norm or nn.Identity(), nn.ReLU(), nn.Linear(6, 3))
    batch = (torch.randn(10, 4), torch.randint(3, (10,)))
    return model, batch, Objective(model, F.cross_entropy, batch, mode="train")


def test_equals_copies_with_filter_normalized_directions():
    model, batch, objective = problem(nn.BatchNorm1d(6))
    before = tracks(model)
    found = loss_surface(objective, points=3, span=0.5, seed=4)
    assert same(before, tracks(model))
    origin = objective.parameters
    first, second = (normalize_filters(random_direction(origin, 8 + i), origin) for i in (1, 2))
    for name, value in origin.items():
        if value.ndim > 1:
            torch.testing.assert_close(first[name].norm(dim=1), value.norm(dim=1))
    twin = surface_by_copies(model, F.cross_entropy, batch, first, second, found.grid, training=True)
    assert [x for row in found.losses for x in row] == pytest.approx([x for row in twin for x in row])
    assert found.losses[1][1] == pytest.approx(found.loss)


def moved_scale(objective):
    """Move scale between the layers, another factor for each unit: filter normalization alone cannot undo this."""
    p, factors = objective.parameters, torch.tensor([0.1, 0.5, 1.0, 2.0, 5.0, 10.0])
    changed = {
        "0.weight": factors[:, None] * p["0.weight"],
        "0.bias": factors * p["0.bias"],
        "3.weight": p["3.weight"] / factors,
    }
    return objective.at({name: value.clone() for name, value in changed.items()})


def test_symmetries_make_the_picture_blind_to_rescaling():
    _, _, objective = problem()
    other = moved_scale(objective)
    assert float(other.loss()) == pytest.approx(float(objective.loss()))
    plain = [loss_surface(o, points=3).losses for o in (objective, other)]
    canonical = [loss_surface(o, points=3, symmetries=symmetries(o)).losses for o in (objective, other)]
    flat = [[x for row in losses for x in row] for losses in (*plain, *canonical)]
    assert flat[0] != pytest.approx(flat[1], rel=1e-3)
    assert flat[2] == pytest.approx(flat[3], rel=1e-6)


def descent(objective, steps=4, rate=0.5):
    path, point = [], dict(objective.parameters)
    for _ in range(steps):
        gradient = objective.at(point).gradient()
        point = {name: value - rate * gradient[name] for name, value in point.items()}
        path.append(point)
    return path


def test_paths_and_principal_directions():
    _, _, objective = problem()
    path = descent(objective)
    end = objective.at(path[-1])
    found = loss_surface(end, directions="pca", points=3, paths=[path])
    assert found.directions == "pca"
    assert found.paths[0][-1] == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
    assert max(abs(a) for a, _, _ in found.paths[0]) == pytest.approx(1.0)
    rows = torch.stack([objective.flatten(p) - objective.flatten(path[-1]) for p in path])
    left = torch.linalg.svdvals(rows)[2:].square().sum().sqrt()  # what two directions cannot hold
    off = math.sqrt(sum(distance**2 for _, _, distance in found.paths[0]))
    assert off == pytest.approx(float(left), rel=1e-6, abs=1e-12)


def test_resumes_where_it_stopped(tmp_path):
    _, _, objective = problem()
    file = tmp_path / "surface.json"
    whole = loss_surface(objective, points=4)

    class Stop(Exception):
        pass

    def stop(done, _):
        if done == 10:
            raise Stop

    with pytest.raises(Stop):
        loss_surface(objective, points=4, resume=file, progress=stop)
    again = loss_surface(objective, points=4, resume=file)
    assert again.losses == whole.losses and again.cost.forwards == 8 + 1
    with pytest.raises(StoreError, match="same parameters, directions, grid and mode"):
        loss_surface(objective, points=4, seed=1, resume=file)
    file.write_text("nonsense")
    with pytest.raises(StoreError, match="one written here"):
        loss_surface(objective, points=4, resume=file)


def test_holes_ways_out_and_errors():
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    data = (torch.eye(2), torch.ones(2, 1))
    objective = Objective(model, lambda out, _: out.log().mean(), data, mode="eval")
    axes = [{"weight": torch.tensor([[1.0, 0.0]])}, {"weight": torch.tensor([[0.0, 1.0]])}]
    found = loss_surface(objective, directions=axes, span=2.0, points=3, paths=[[dict(objective.parameters)]])
    assert sum(math.isnan(x) for row in found.losses for x in row) == 5
    assert "5 points not finite" in str(found) and found.cost.forwards == 9 + 1
    assert len(found.frame()) == 9
    drawn = found.chart().to_dict()
    assert len(drawn["layer"]) == 2 and drawn["config"]
    with pytest.raises(InputError, match="must span a plane"):
        loss_surface(objective, directions=[axes[0], axes[0]])
    with pytest.raises(InputError, match="needs paths"):
        loss_surface(objective, directions="pca")
    with pytest.raises(InputError, match="spans a plane with"):
        loss_surface(objective, directions="pca", paths=[[dict(objective.parameters)]])
    with pytest.raises(InputError, match="two dicts of tensors"):
        loss_surface(objective, directions="random")
    with pytest.raises(InputError, match="points must be at least 2"):
        loss_surface(objective, points=1)
