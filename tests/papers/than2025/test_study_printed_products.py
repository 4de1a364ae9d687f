"""The products S2 prints, read off a network: norms, deviations, and the inputs where LayerNorm is steep."""

import math

import pytest
import torch

from normgauge.lab import data, models
from normgauge.papers.than2025.studies._printed_products import average_pixels, printed_products, settle_statistics
from normgauge.papers.than2025.studies.capacity import measure_capacity, suspects


@pytest.fixture
def digits():
    torch.set_default_dtype(torch.float32)  # as the studies run
    return data.load("digits")


def drawn(norm, dataset):
    network = models.build("mlp", norm, dataset.shape, dataset.classes, 3)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part in network.modules():
            if isinstance(part, models.Normalized):
                part.layer.bias.copy_(torch.randn(part.layer.bias.shape, generator=source))
    return settle_statistics(network, dataset)


def layers_of(network):
    return [part for part in network.modules() if isinstance(part, models.Normalized)]


def test_batch_norm_holds_the_statistics_of_the_training_data_and_enters_with_their_euclidean_norm(digits):
    network = drawn("batch", digits)
    first = layers_of(network)[0]
    before = first.layer(digits.train[0].flatten(1)).detach()
    assert torch.allclose(first.norm.running_var, before.var(0), rtol=1e-4)
    found = printed_products(network, digits.train[0][:32])
    expected = (before.double().var(0) + first.norm.eps).rsqrt().norm()
    assert math.isclose(found.printed[0], math.log10(expected), abs_tol=1e-4)
    assert found.everywhere == found.printed


def test_weights_enter_with_their_spectral_norms_and_the_last_layer_counts(digits):
    network = drawn("none", digits)
    weights = [m.weight.detach() for m in network.modules() if isinstance(m, torch.nn.Linear)]
    expected = sum(float(torch.linalg.matrix_norm(w, 2).log10()) for w in weights)
    found = printed_products(network, digits.train[0][:8])
    assert len(found.weights) == 4 and not found.printed
    assert math.isclose(found.bound, expected, abs_tol=1e-4)
    assert found.bound == found.power == found.scaled == found.defined


def test_layer_norm_enters_with_the_smallest_deviation_seen(digits):
    network, inputs = drawn("layer", digits), digits.train[0][:8]
    first = layers_of(network)[0]
    smallest = first.layer(inputs.flatten(1)).detach().double().var(1, unbiased=False).min()
    found = printed_products(network, inputs)
    assert math.isclose(found.printed[0], -0.5 * math.log10(smallest + first.norm.eps), abs_tol=1e-5)
    assert found.everywhere == pytest.approx((2.5,) * 3)  # 1 / sqrt(1e-5)


def test_a_suspect_makes_the_first_layer_constant_and_layer_norm_steeper_than_its_printed_product(digits):
    network, inputs = drawn("layer", digits), digits.train[0][:8]
    first = layers_of(network)[0]
    deviations = first.layer(suspects(network, inputs).flatten(1)).std(1)
    assert deviations[-1] < 1e-3 < deviations[0]
    found = measure_capacity(network, inputs)
    assert found["steepest"] > found["printed"]
    assert found["at_data"] < found["on_ball"] < found["everywhere"]
    assert found["steepest"] <= found["everywhere"]


def test_averaged_pixels_are_means_of_squares_and_one_changes_nothing():
    dataset = data.load("digits")
    halves, same = average_pixels(dataset, 2), average_pixels(dataset, 1)
    image = dataset.test[0][3, 0]
    naive = torch.stack([image[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean() for i in range(4) for j in range(4)])
    assert torch.allclose(halves.test[0][3, 0].reshape(-1), naive)
    assert torch.equal(same.test[0], dataset.test[0]) and torch.equal(halves.test[1], dataset.test[1])
