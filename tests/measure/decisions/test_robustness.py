"""Robustness against loops over samples, its balls and bounds, and the three kinds of statistics."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from normgauge.errors import DataError, InputError, UnknownNameError
from normgauge.measure.decisions.robustness import project, random_start, robustness
from reference.robustness import attacked_one_by_one
from reference.tracks import same, tracks


def trained(norm=True):
    """A small convolutional net fitted to separable images, so that attacks have something to break."""
    source = torch.Generator().manual_seed(0)
    y = torch.randint(3, (48,), generator=source)
    x = 0.5 + 0.1 * torch.randn(48, 1, 4, 4, generator=source)
    x[torch.arange(48), 0, y, y] += 0.25
    x = x.clamp(0, 1)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 3),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, y


@pytest.fixture(scope="module")
def problem():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    made = trained()
    torch.set_default_dtype(before)
    return made


ARMS = {
    "fgsm": ("linf", 1, 1.0),
    "bim": ("linf", 10, 0.25),
    "pgd": ("linf", 5, 0.3),
    "pgd_l2": ("l2", 5, 0.3),
}


@pytest.mark.parametrize("name", ARMS)
def test_equals_one_sample_at_a_time(problem, name):
    model, x, y = problem
    ball, steps, share = ARMS[name]
    radius = 0.1 if ball == "linf" else 0.4
    found = robustness(
        model, (x, y), attack=name, radius=radius, bounds=(0, 1), iterations=steps, restarts=0, step=share
    )
    moved = attacked_one_by_one(
        model, x, y, ball=ball, radius=radius, steps=steps, step=share * radius, bounds=(0.0, 1.0)
    )
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(moved)
    assert found.entries[0].accuracy == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    assert found.entries[0].loss == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-6)
    assert found.entries[0].largest <= radius * (1 + 1e-9)
    assert found.accuracy < found.clean


def test_batches_change_nothing_with_stored_statistics(problem):
    model, x, y = problem
    whole = robustness(model, (x, y), attack="bim", radius=[0.05, 0.1])
    parts = robustness(model, [(x[:20], y[:20]), (x[20:], y[20:])], attack="bim", radius=[0.1, 0.05])
    for a, b in zip(whole.entries, parts.entries, strict=True):
        assert (a.accuracy, a.loss) == pytest.approx((b.accuracy, b.loss))


def test_restarts_only_help_the_attacker(problem):
    model, x, y = problem
    arms = [robustness(model, (x, y), attack="pgd", radius=0.08, iterations=3, restarts=n).accuracy for n in (1, 4)]
    assert arms[1] <= arms[0]


def test_gaussian_noise_in_units_of_its_deviation(problem):
    model, x, y = problem
    found = robustness(model, (x, y), attack="gaussian", radius=[1e-9, 1.0], seed=4)
    assert found.entries[0].accuracy == found.clean and found.entries[1].accuracy < found.clean
    again = robustness(model, (x, y), attack="gaussian", radius=1.0, seed=4)
    assert again.entries[0].loss == found.entries[1].loss
    expected = math.sqrt(x[0].numel())
    assert found.entries[1].largest == pytest.approx(expected, rel=0.6)


def test_statistics(problem):
    model, x, y = problem
    batch = robustness(model, (x, y), attack="fgsm", radius=0.1, statistics="batch")
    twin = copy.deepcopy(model).eval()
    twin[1].train()
    free = x.clone().requires_grad_()
    F.cross_entropy(twin(free), y, reduction="sum").backward()
    with torch.no_grad():
        logits = twin(x + 0.1 * free.grad.sign())
    assert batch.entries[0].loss == pytest.approx(float(F.cross_entropy(logits, y)))
    stored = robustness(model, (x, y), attack="fgsm", radius=0.1)
    quiet = robustness(model, (x, y), attack="fgsm", radius=0.1, statistics="noisy", noise=1e-9)
    loud = robustness(model, (x, y), attack="fgsm", radius=0.1, statistics="noisy", noise=1.0)
    assert quiet.entries[0].loss == pytest.approx(stored.entries[0].loss, rel=1e-6)
    assert loud.entries[0].loss != pytest.approx(stored.entries[0].loss, rel=1e-2)


@pytest.mark.parametrize("statistics", ["stored", "batch", "noisy"])
def test_leaves_no_trace(problem, statistics):
    model, x, y = problem
    before = tracks(model)
    robustness(model, (x, y), attack="pgd", radius=0.1, iterations=2, statistics=statistics)
    assert same(before, tracks(model))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["linf", "l2"]), st.floats(0.01, 3.0))
def test_projection_and_starts_stay_in_the_ball(seed, ball, radius):
    source = torch.Generator().manual_seed(seed)
    x, z = (torch.randn(4, 3, generator=source, dtype=torch.float64) for _ in range(2))
    size = (lambda v: v.abs().amax(1)) if ball == "linf" else (lambda v: v.norm(dim=1))
    near = project(z, x, ball, radius)
    assert bool((size(near - x) <= radius * (1 + 1e-12)).all())
    torch.testing.assert_close(project(near, x, ball, radius), near)
    inside = size(z - x) <= radius
    torch.testing.assert_close(near[inside], z[inside])
    start = random_start(x, ball, radius, source, None)
    assert bool((size(start - x) <= radius * (1 + 1e-12)).all()) and not torch.equal(start, x)


def test_three_ways_out_and_errors(problem):
    model, x, y = problem
    seen = []
    found = robustness(
        model, (x, y), attack="fgsm", radius=[0.1, 0.2], bounds=(0, 1), progress=lambda *step: seen.append(step)
    )
    assert seen == [(1, 2), (2, 2)]
    assert "gradients' worth" in str(found) and "inputs kept in [0, 1]" in str(found)
    assert list(found.frame()["radius"]) == [0.1, 0.2]
    assert found.chart().to_dict()["title"] == "accuracy under attack"
    with pytest.raises(UnknownNameError, match="unknown attack 'fgms'"):
        robustness(model, (x, y), attack="fgms", radius=0.1)
    with pytest.raises(UnknownNameError, match="unknown statistics"):
        robustness(model, (x, y), attack="fgsm", radius=0.1, statistics="running")
    with pytest.raises(InputError, match="radius must be positive"):
        robustness(model, (x, y), attack="fgsm", radius=0.0)
    with pytest.raises(InputError, match="inputs must lie in bounds"):
        robustness(model, (x + 5, y), attack="fgsm", radius=0.1, bounds=(0, 1))
    with pytest.raises(InputError, match="iterations must be at least 1"):
        robustness(model, (x, y), attack="pgd", radius=0.1, iterations=0)
    with pytest.raises(DataError, match="one real tensor"):
        robustness(model, (torch.ones(2, 2).long(), y[:2]), attack="fgsm", radius=0.1)
    with pytest.raises(DataError, match="a class is a whole number"):
        robustness(model, (x, torch.randn(48, 3)), attack="fgsm", radius=0.1)
