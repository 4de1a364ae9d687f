"""The terms of the bounds against loops; the margin bounds against classes whose complexity is known."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normgauge.errors import InputError
from normgauge.measure.generalization.partition import fit_partition, kmeans, partition_around, partition_from_cells
from normgauge.theory import generalization_bounds as theory
from normgauge.theory.partition_bound import partition_slack
from reference.generalization import (
    cells_by_loop,
    noise_tradeoff,
    rows_by_loop,
    slack_by_hand,
    transport_by_loop,
)

positive = st.floats(0.01, 50.0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(positive, positive, positive), min_size=1, max_size=6), st.integers(10, 5000), positive)
def test_terms_are_the_loops(rows, samples, largest):
    total = sum(row[0] for row in rows)
    shares, distances, slopes = [r[0] / total for r in rows], [r[1] for r in rows], [r[2] for r in rows]
    found = theory.cell_terms(shares, distances, slopes, largest)
    for term, share, distance, slope in zip(found, shares, distances, slopes, strict=True):
        assert term == pytest.approx(share * min(distance * slope, largest))
    assert sum(found) <= largest * (1 + 1e-12)
    naive = transport_by_loop(shares, distances, slopes, 7, samples, 0.1)
    assert theory.transport_terms(shares, distances, slopes, 7, samples, 0.1) == pytest.approx(naive)
    assert partition_slack(3, 9, samples, 0.1, largest) == pytest.approx(slack_by_hand(3, 9, samples, 0.1, largest))


@pytest.mark.parametrize(("sharpness", "samples"), [(0.5, 100), (30.0, 5000), (1e4, 60_000)])
def test_the_noise_is_chosen_best(sharpness, samples):
    assert theory.sharpness_terms(sharpness, samples) == pytest.approx(noise_tradeoff(sharpness, samples), rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=5), st.integers(1, 1000))
def test_the_sketch_of_s0_is_the_loop(rows, samples):
    sums, tops = [r[0] for r in rows], [r[1] for r in rows]
    assert theory.row_norm_term(sums, tops, samples) == pytest.approx(rows_by_loop(sums, tops, samples))


def test_the_sketch_of_s0_is_no_bound():
    """Equal unit rows: the slope grows like n^(depth/2), the term stays n^2 times the depth."""
    n, ratios = 16, []
    for depth in (2, 6, 12):
        W = torch.full((n, n), n**-0.5)
        slope = float(torch.linalg.matrix_norm(torch.linalg.matrix_power(W, depth), 2))
        term = theory.row_norm_term([n * 1.0] * depth, [1.0] * depth, samples=1)
        ratios.append(slope / term)
    assert ratios[0] < ratios[1] < ratios[2]
    assert ratios[2] > 100


def test_the_frobenius_term_is_above_the_complexity_of_linear_classes():
    """For {x -> <w, x>, |w| <= B} the complexity is B E|sum e_i x_i| / m, here over all signs."""
    X, B = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), 2.0
    signs = torch.tensor([[1.0 if k >> i & 1 else -1.0 for i in range(10)] for k in range(1024)])
    truth = B * float((signs @ X).norm(dim=1).mean()) / 10
    common = {"inputs": float(X.norm()), "samples": 10, "delta": 0.5}
    whole = theory.frobenius_margin_term([B], outputs=1, loss_slope=1.0, **common)
    chance = theory.frobenius_margin_term([B], outputs=1, loss_slope=1e-12, **common)
    assert whole - chance >= 2 * truth
    spectral = theory.spectral_margin_term([B], [B], [1.0], width=3, loss_slope=1.0, **common)
    flat = theory.spectral_margin_term([B], [B], [1.0], width=3, loss_slope=1e-12, **common)
    assert spectral - flat >= 2 * truth


def test_no_random_relu_net_of_the_class_beats_the_terms():
    source = torch.Generator().manual_seed(1)
    X = torch.randn(12, 3, generator=source)
    signs = torch.randn(60, 12, generator=source).sign()
    best = torch.full((60,), -math.inf)
    for _ in range(400):
        U, v = torch.randn(5, 3, generator=source), torch.randn(5, generator=source)
        out = torch.relu(X @ (U / U.norm()).T) @ (v / v.norm())
        best = torch.maximum(best, signs @ out / 12)
    seen = float(best.mean())
    common = {"inputs": float(X.norm()), "loss_slope": 1.0, "samples": 12, "delta": 0.5}
    assert theory.frobenius_margin_term([1.0, 1.0], outputs=1, **common) >= 2 * seen
    assert theory.spectral_margin_term([1.0, 1.0], [5**0.5, 1.0], [1.0, 1.0], width=5, **common) >= 2 * seen


@settings(max_examples=30, deadline=None)
@given(st.lists(positive, min_size=1, max_size=4), st.floats(1.1, 10.0))
def test_margin_terms_grow_with_every_norm_and_fall_with_samples(norms, factor):
    common = {"inputs": 5.0, "loss_slope": 2.0, "delta": 0.1}
    ones = [1.0] * len(norms)
    for place in range(len(norms)):
        larger = [v * factor if i == place else v for i, v in enumerate(norms)]
        for term in (
            lambda n, m: theory.frobenius_margin_term(n, outputs=3, samples=m, **common),
            lambda n, m: theory.spectral_margin_term(n, norms, ones, width=9, samples=m, **common),
        ):
            assert term(norms, 500) > term(norms, 5000)
        big = theory.frobenius_margin_term(larger, outputs=3, samples=500, **common)
        assert big >= theory.frobenius_margin_term(norms, outputs=3, samples=500, **common)


def test_samples_needed_is_the_first_that_is_enough():
    for penalty, room in ((lambda m: 30 / m**0.5, 0.2), (lambda m: 0.1 + 5 * math.log(m) / m, 0.3)):
        found = theory.samples_needed(penalty, room)
        assert penalty(found) < room <= penalty(found / 1.05)
    assert theory.samples_needed(lambda m: 1.0, 0.5) == math.inf
    assert theory.samples_needed(lambda m: 0.0, 0.0) == math.inf
    assert theory.frobenius_margin_term(
        [math.inf], inputs=1.0, outputs=1, loss_slope=1.0, samples=10, delta=0.1
    ) == math.inf  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5), st.floats(0.3, 3.0))
def test_cells_are_the_loop_and_their_distances_hold(seed, count, radius):
    source = torch.Generator().manual_seed(seed)
    points, labels = torch.randn(30, 2, generator=source), torch.randint(2, (30,), generator=source)
    part = partition_around(torch.randn(count, 2, generator=source), 2, radius)
    naive = cells_by_loop(points, labels, part.centers, part.radii)
    pieces = list(part.pieces(points, labels))
    assert {(p.center, p.label): p.members.tolist() for p in pieces} == naive
    assert part.cells == 2 * count + 1
    for piece in pieces:
        if piece.center < 0:
            continue
        samples, center = points[piece.members], part.centers[piece.center]
        away = torch.randn(200, 2, generator=source)
        inside = center + radius * away / away.norm(dim=1, keepdim=True)  # the far rim of the ball
        assert float(torch.cdist(samples, inside).mean()) <= piece.distance + 1e-12
        if len(samples) > 1:
            pairs = [float((a - b).norm()) for i, a in enumerate(samples) for j, b in enumerate(samples) if i != j]
            assert piece.distance_seen == pytest.approx(sum(pairs) / len(pairs))


def test_kmeans_finds_clusters_and_no_round_improves_it():
    source = torch.Generator().manual_seed(0)
    means = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    points = means[torch.arange(90) % 3] + 0.1 * torch.randn(90, 2, generator=source)
    part = fit_partition(points, 3, 1, None, torch.Generator().manual_seed(2))
    nearest = torch.cdist(points, part.centers).argmin(1)
    for k in range(3):
        torch.testing.assert_close(part.centers[k], points[nearest == k].mean(0))
        assert float((points[nearest == k] - part.centers[k]).norm(dim=1).max()) == pytest.approx(float(part.radii[k]))
    assert float(torch.cdist(part.centers, means).min(1).values.max()) < 0.1
    again = kmeans(points, 3, torch.Generator().manual_seed(2))
    torch.testing.assert_close(part.centers, again)
    assert len(kmeans(torch.zeros(4, 2), 3, torch.Generator().manual_seed(0))) == 1  # one distinct point
    with pytest.raises(InputError, match="number of cells lies between"):
        kmeans(points, 91, torch.Generator())


def test_a_given_assignment_is_kept():
    points = torch.tensor([[0.0], [1.0], [5.0]])
    part = partition_from_cells(points, torch.tensor([0, 0, 2]), 1)
    assert part.by_user and part.cells == 3
    pieces = list(part.pieces(points, None, torch.tensor([0, 0, 2])))
    assert [(p.center, p.members.tolist(), p.radius) for p in pieces] == [(0, [0, 1], 0.5), (2, [2], 0.0)]
