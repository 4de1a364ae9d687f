"""Density, trace and per-layer spectra against dense eigenvalues."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.errors import InputError, UnknownNameError
from normgauge.linalg import DenseOperator, hutchinson, spectral_nodes
from normgauge.testing import check_result
from reference.curvature import dense_hessian, hand_written
from reference.nets import net


def with_spectrum(values, seed=0):
    values = torch.as_tensor(values, dtype=torch.float64)
    random = torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    frame, _ = torch.linalg.qr(random)
    matrix = (frame * values) @ frame.T
    return (matrix + matrix.T) / 2


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_moments_are_those_of_the_probes_and_near_the_exact_ones(mode):
    model, loss, batches = net("batch norm 1d")
    objective = ng.Objective(model, loss, batches, mode=mode)
    found = ng.density(objective, probes=30, iterations=12)
    exact = torch.linalg.eigvalsh(dense_hessian(hand_written(model), loss, batches, mode))
    for power in (1, 2, 3):
        mean, error = found.moments[power - 1], found.moment_errors[power - 1]
        assert abs(mean - float((exact**power).mean())) < 4 * error
        assert error < abs(mean)


def test_one_probe_has_the_exact_moments_of_its_vector():
    """Gauss quadrature: z^T A^p z / n is exact up to degree 2 steps - 1."""
    matrix = with_spectrum(torch.linspace(-1, 3, 60))
    nodes = spectral_nodes(DenseOperator(matrix), steps=4, seed=3)[0]
    signs = torch.randint(0, 2, (60,), generator=torch.Generator().manual_seed(3), dtype=torch.int8).double() * 2 - 1
    image = signs.clone()
    for power in range(8):
        quadrature = sum(w * v**power for v, w in zip(nodes.values, nodes.weights, strict=True))
        assert quadrature == pytest.approx(float(signs @ image) / 60, rel=1e-11)
        image = matrix @ image


def test_no_ghosts_after_many_steps():
    """Without reorthogonalization an outlier returns again and again; with it, it comes once."""
    matrix = with_spectrum([100.0, *torch.linspace(0, 1, 250).tolist()])
    nodes = spectral_nodes(DenseOperator(matrix.float()), steps=120)[0]
    assert sum(abs(value - 100.0) < 0.1 for value in nodes.values) == 1
    assert len(nodes.values) == 120


def test_density_integrates_to_one_and_finds_the_mass():
    matrix_values = [10.0] * 5 + [0.0] * 95
    model = nn.Linear(100, 1, bias=False)
    root = with_spectrum([math.sqrt(value / 2) for value in matrix_values])
    objective = ng.Objective.from_step(model, lambda m, b: m(b[0]).square().sum(), (root,), mode="eval")
    found = ng.density(objective, probes=40, iterations=10)
    step = found.grid[1] - found.grid[0]
    assert sum(found.values) * step == pytest.approx(1.0, abs=1e-3)
    assert found.share(lower=5.0) == pytest.approx(0.05, abs=0.02)
    assert found.moments[0] == pytest.approx(0.5, abs=4 * found.moment_errors[0] + 1e-9)


def test_the_density_run_gives_outer_eigenvalues_for_nothing():
    model, loss, batches = net("batch norm 1d")
    objective = ng.Objective(model, loss, batches, mode="train")
    found = ng.density(objective, iterations=25)
    top = ng.spectrum(objective, top=3, tol=1e-6).top
    assert found.extremes()[:2] == pytest.approx(top[:2], rel=1e-4)
    assert found.cost.products == 25


@pytest.mark.parametrize("of", ["hessian", "gauss_newton"])
def test_trace_covers_the_exact_one(of):
    model, loss, batches = net("no norm, squares")
    objective = ng.Objective(model, loss, batches, mode="train")
    found = ng.trace(objective, relative_error=0.05, of=of)
    operator = objective.hessian() if of == "hessian" else objective.gauss_newton()
    exact = float(operator.matmat(torch.eye(objective.dimension)).trace())
    assert found.status == "ok" and found.standard_error <= 0.05 * abs(found.value)
    assert abs(found.value - exact) < 4 * found.standard_error
    assert found.probes == found.cost.products >= 10


def test_the_standard_error_is_honest():
    """Over many seeds the error, in standard errors, has a spread near one."""
    matrix = with_spectrum([20.0, 10.0, *torch.linspace(0, 1, 40).tolist()])
    exact = float(matrix.trace())
    scores = []
    for seed in range(60):
        found = hutchinson(DenseOperator(matrix), relative_error=1e-9, probes=40, seed=seed)
        scores.append((found.value - exact) / found.standard_error)
    spread = torch.tensor(scores).std()
    assert 0.7 < float(spread) < 1.4
    assert abs(float(torch.tensor(scores).mean())) < 0.6


def test_a_trace_of_zero_is_not_reached():
    found = hutchinson(DenseOperator(with_spectrum([1.0, -1.0, 2.0, -2.0])), probes=30)
    assert found.probes == 30
    model, loss, batches = net("layer norm")
    short = ng.trace(ng.Objective(model, loss, batches, mode="train"), relative_error=1e-6, probes=12)
    assert short.status == "nonconverged" and "after 12 probes" in short.sentence


def test_layers_blocks_tensors_and_selections():
    model, loss, batches = net("batch norm 1d")
    objective = ng.Objective(model, loss, batches, mode="train")
    whole = objective.hessian().matmat(torch.eye(objective.dimension))
    layers = ng.layer_spectra(objective, top=2, bottom=1, tol=1e-8)
    assert list(layers.spectra) == ["0", "1", "3"]
    first = 0
    for found in layers.spectra.values():
        block = whole[first : first + found.dimension, first : first + found.dimension]
        first += found.dimension
        exact = torch.linalg.eigvalsh(block)
        torch.testing.assert_close(torch.tensor(found.top), exact.flip(0)[:2], rtol=1e-8, atol=1e-12)
        assert found.bottom[0] == pytest.approx(float(exact[0]), rel=1e-8, abs=1e-12)
    assert list(ng.layer_spectra(objective, per="tensor").spectra) == list(objective.names)
    chosen = ng.layer_spectra(objective, per={"weights": "*.weight", "head": ["3.weight", "3.bias"]})
    assert chosen["head"].top[0] == pytest.approx(layers["3"].top[0], rel=1e-5)
    with pytest.raises(UnknownNameError, match="partition"):
        ng.layer_spectra(objective, per="stage")
    with pytest.raises(UnknownNameError, match="block of variables"):
        layers["4"]


def test_parametrized_weights_belong_to_their_layer():
    model, loss, batches = net("weight norm")
    objective = ng.Objective(model, loss, batches, mode="train")
    assert list(ng.layer_spectra(objective, per="layer").spectra) == ["0", "2"]
    assert list(ng.layer_spectra(objective, per="block").spectra) == ["0", "2"]


def test_the_ways_out():
    model, loss, batches = net("batch norm 1d")
    objective = ng.Objective(model, loss, batches, mode="train")
    for found in (
        ng.density(objective, probes=2, iterations=10),
        ng.trace(objective, relative_error=0.2),
        ng.layer_spectra(objective),
    ):
        last = str(found).splitlines()[-1]
        assert "mode train" in last and "product" in last and "kind " in last
        assert len(found.frame())
        assert found.chart().to_dict()


@pytest.mark.parametrize(
    "call",
    [
        lambda o: ng.density(o, probes=0),
        lambda o: ng.density(o, iterations=0),
        lambda o: ng.density(o, width=-1.0),
        lambda o: ng.trace(o, relative_error=0.0),
        lambda o: ng.trace(o, probes=0),
    ],
)
def test_bad_counts_are_said(call):
    model, loss, batches = net("layer norm")
    with pytest.raises(InputError, match="Got"):
        call(ng.Objective(model, loss, batches, mode="train"))


# -- whole spectra ------------------------------------------------------------------------------------------------


def turned(values, seed=0):
    """A loss whose Hessian has these eigenvalues in random directions."""
    matrix = with_spectrum(values, seed)
    model = nn.Linear(len(values), 1, bias=False).double()
    step = lambda m, _: m.weight[0] @ matrix @ m.weight[0] / 2  # noqa: E731
    return ng.Objective.from_step(model, step, torch.ones(1), mode="eval")


def spread(count, seed):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_outliers_and_bulk_edges_are_those_of_the_matrix(seed):
    outside = torch.tensor([12.0, 9.0, 5.0, -4.0], dtype=torch.float64)
    found = ng.density(turned(torch.cat([spread(150, seed), outside]), seed), iterations=60)
    assert found.outliers == pytest.approx((12.0, 9.0, 5.0, -4.0), rel=1e-3)
    low, high = found.bulk
    assert -0.05 < low < 0.1 and 0.9 < high < 1.05 and "4 eigenvalues stand alone" in found.meaning()
    even = ng.density(turned(spread(150, seed), seed))
    assert len(even.outliers) <= 4 and even.bulk[1] - even.bulk[0] > 0.9


@pytest.mark.parametrize("seed", range(10))
def test_probes_are_drawn_until_the_share_has_the_error_asked_for(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    data = (torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,)))
    found = ng.density(ng.Objective(model, F.cross_entropy, data, mode="train"), error=0.06, iterations=30, seed=seed)
    check_result(found)
    assert found.status == "ok" and found.error <= 0.06 and len(found.nodes) >= 3
    assert found.cost.products <= 30 * len(found.nodes) and found.cost.gradients == 1
    dense = torch.linalg.eigvalsh(dense_hessian(hand_written(model), F.cross_entropy, [data], "train"))
    points = torch.linspace(float(dense[0]), float(dense[-1]), 9, dtype=torch.float64)[1:-1]
    for point in map(float, points):
        assert abs(found.share(upper=point) - float((dense <= point).double().mean())) < 4 * 0.06
    short = ng.density(ng.Objective(model, F.cross_entropy, data, mode="train"), error=1e-6, probes=3, iterations=10)
    assert short.status == "nonconverged" and "was asked" in short.sentence
    check_result(short)


@pytest.mark.parametrize("seed", range(3))
def test_the_distance_of_two_spectra_holds_the_true_one(seed):
    one, two = 3 * spread(60, seed), 3 * spread(60, seed) ** 2
    first, again, second = (
        ng.density(turned(values, seed + place), probes=8, iterations=60, seed=place)
        for place, values in enumerate((one, one, two))
    )
    true = float((one.sort().values - two.sort().values).abs().mean())
    found, same_one = first.distance(second), first.distance(again)
    assert found.low <= found.value <= found.high and abs(found.value - true) < 0.15 * true
    assert "they differ" in found.meaning() and found.value > found.noise
    assert same_one.value < 0.5 * found.value and "cannot tell" in same_one.meaning()
    with pytest.raises(InputError, match="two probes"):
        first.distance(ng.density(turned(one), probes=1))


def test_the_part_of_sharpness_that_is_the_sample():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3))
    data = (torch.randn(24, 20), torch.randint(3, (24,)))
    halves = [(data[0][rows], data[1][rows]) for rows in (slice(12), slice(12, 24))]
    objective = ng.Objective(model, F.cross_entropy, halves[0], mode="eval")
    found = ng.spectrum(objective, top=2, tol=1e-6, held_out=halves[1])
    check_result(found)
    one, two = (dense_hessian(model, F.cross_entropy, [half], "eval") for half in halves)
    values, vectors = torch.linalg.eigh(one)
    wanted = [float(vectors[:, -k] @ two @ vectors[:, -k]) for k in (1, 2)]
    assert found.held_out == pytest.approx(wanted, rel=1e-4)
    assert found.sample_share == pytest.approx(1 - wanted[0] / float(values[-1]), rel=1e-4)
    assert found.sample_share > 0.2 and "measure on more" in found.meaning()
    assert "is the sample" not in ng.spectrum(objective, top=1).meaning()
    alike = ng.spectrum(objective, top=1, held_out=halves[0])
    assert abs(alike.sample_share) < 1e-3 and "it is the network's" in alike.meaning()


@pytest.mark.parametrize("probes", [1, 4])
def test_printed_shares_lie_within_bounds_that_hold_the_truth(probes):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Tanh(), torch.nn.Linear(12, 4))
    data = (torch.randn(32, 6, dtype=torch.float64), torch.randint(4, (32,)))
    objective = ng.Objective(net.double(), torch.nn.functional.cross_entropy, data, mode="train")
    exact = torch.linalg.eigvalsh(objective.hessian() @ torch.eye(objective.dimension, dtype=torch.float64))
    measured = ng.density(objective, probes=probes, iterations=15)
    below = float((exact <= -measured.width).double().mean())
    for lower, upper, truth in (
        (-math.inf, -measured.width, below),
        (measured.width, math.inf, float((exact > measured.width).double().mean())),
        (-measured.width, measured.width, float((exact.abs() <= measured.width).double().mean())),
    ):
        least, most = measured.share_bounds(lower, upper)
        assert least <= truth <= most and least <= measured.share(lower, upper) <= most
    assert f"{measured.share_bounds(-math.inf, -measured.width)[1]:.0%} bend down" in measured.meaning()


def test_one_eigenvalue_of_all_directions_has_a_share_of_one():
    torch.manual_seed(0)
    norm, data = nn.BatchNorm1d(4), (torch.randn(8, 4), torch.randn(8, 4))  # Hessian 0.5 times the identity, rounded
    for seed in range(8):
        found = ng.density(ng.Objective(norm, nn.functional.mse_loss, data, mode="train"), probes=2, seed=seed)
        assert "Between" in found.meaning()
