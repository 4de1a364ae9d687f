"""Every estimator that states an error is within it of a dense twin on ten small networks, and costs what it says.

`tests/test_results.py` holds the list against the registry: an instrument that states an error has a twin.
"""

import math

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

import normgauge as ng
from random_nets import random_net
from reference.batch_noise import all_batches
from test_results import TINY

NETS = range(10)


def problem(seed, rows=24):
    model, inputs = random_net(seed)
    model, inputs = model.double(), inputs[:rows].double()
    targets = torch.randint(0, model[-1].out_features, (len(inputs),), generator=torch.Generator().manual_seed(seed))
    return ng.Objective(model, F.cross_entropy, (inputs, targets), mode="train")


def dense(objective):
    """The eigenvalues of the Hessian, row by row with a second backward pass of torch's own."""
    inputs, targets = next(objective.batches())[1]
    objective.model.train()
    names, sizes = list(objective.parameters), [value.numel() for value in objective.parameters.values()]
    shapes = [value.shape for value in objective.parameters.values()]
    theta = objective.flatten(objective.parameters).requires_grad_()
    pieces = [piece.view(shape) for piece, shape in zip(theta.split(sizes), shapes, strict=True)]
    buffers = {name: value.clone() for name, value in objective.model.named_buffers()}
    out = functional_call(objective.model, {**buffers, **dict(zip(names, pieces, strict=True))}, (inputs,))
    (slope,) = torch.autograd.grad(F.cross_entropy(out, targets), theta, create_graph=True)
    rows = [torch.autograd.grad(entry, theta, retain_graph=True)[0] for entry in slope]
    matrix = torch.stack(rows)
    return torch.linalg.eigvalsh((matrix + matrix.T) / 2)


@pytest.fixture(scope="module", params=NETS)
def case(request):
    objective = problem(request.param)
    return objective, dense(objective)


def test_eigenvalues_trace_and_density(case):
    objective, values = case
    noise = 1e-9 * float(values.abs().max())
    found = ng.spectrum(objective, top=2, bottom=1)
    for reading, exact in zip(found.readings(), (values[-1], values[-2], values[0]), strict=True):
        assert abs(reading.value - float(exact)) <= reading.uncertainty + noise

    trace = ng.trace(objective, relative_error=0.1, probes=60)
    assert abs(trace.value - float(values.sum())) <= 4 * trace.standard_error + noise * len(values)
    assert trace.cost.products == trace.probes

    density = ng.density(objective, probes=20, iterations=6)
    for power, (moment, error) in enumerate(zip(density.moments[:3], density.moment_errors[:3], strict=True), 1):
        assert abs(moment - float((values**power).mean())) <= 5 * error + noise
    for low, high in ((-0.3, 0.2), (-0.01, 0.01), (0.05, 2.0)):
        ends = low * density.largest, high * density.largest
        share = float(((values > ends[0]) & (values <= ends[1])).double().mean())
        low_bound, high_bound = density.share_bounds(*ends)
        assert low_bound - 1e-9 <= share <= high_bound + 1e-9
        one_low, one_high = ng.density(objective, iterations=6).share_bounds(*ends)
        assert one_low - 1e-9 <= share <= one_high + 1e-9
    assert density.cost.products == pytest.approx(20 * 6, rel=0.1)


def test_layers(case):
    objective, _ = case
    for name, found in ng.layer_spectra(objective, top=1, per="tensor").spectra.items():
        exact = dense(objective.replace(parameters=name))
        for reading in found.readings():
            assert abs(reading.value - float(exact[-1])) <= reading.uncertainty + 1e-6 * float(exact.abs().max()) + 1e-9


def test_predicted_and_critical_rate(case):
    objective, values = case
    found = ng.stable_rate(objective, iterations=4, tol=2.0)
    assert found.predicted == pytest.approx(2 / float(values[-1]), rel=0.02)
    here, slope, base = (
        objective.flatten(objective.parameters),
        objective.flatten(objective.gradient()),
        objective.loss(),
    )
    assert objective.at(here - 0.9 * found.critical * slope).loss() <= base
    assert objective.at(here - 1.1 * found.critical * slope).loss() > base


@pytest.mark.parametrize("seed", NETS)
def test_batch_noise_and_flatness(seed):
    objective = problem(seed, rows=6)
    model, batch = objective.model, next(objective.batches())[1]
    found = ng.batch_noise(objective, sizes=[4], draws=60, seed=seed)
    exact = all_batches(model.train(), F.cross_entropy, batch, 4)
    for name, error in (("bias", 4), ("sampling", 5), ("statistics", 5), ("total", 5)):
        value, uncertainty = getattr(found.sizes[0], name)
        assert abs(value - float(exact[name])) <= error * uncertainty + 1e-9, name
    assert found.cost.gradients == pytest.approx(1 + 60 * (4 / 6 + 2 / 3), rel=0.1)

    few = ng.flatness(objective, sigmas=[0.02], samples=40, seed=0)
    many = ng.flatness(objective, sigmas=[0.02], samples=150, seed=1)
    one, two = few.readings()[0], many.readings()[0]
    assert abs(one.value - two.value) <= 4 * math.hypot(one.uncertainty, two.uncertainty)
    assert few.cost.forwards == pytest.approx(40 * 1 * 2 + 1, rel=0.1)  # samples, sigmas, kinds of noise


COSTS = {  # what the docstring says, in forwards, gradients and products
    "landscape": (0, 2 * 2 + 1, 0),
    "loss_surface": (3 * 3 + 1, 0, 0),
    "activations": (1, 0, 0),
    "signal_propagation": (0, 1, 0),
    "trainable_depth": (1, 3, 0),
    "drift": (3, 0, 0),
    "margins": (0, 1, 0),
    "covariate_shift": (3, 4, 0),
    "smoothing": (0, 2, 2 * 2 * 1),
    "flatness": (2 * 3 * 2 + 3, 1, 0),
}


@pytest.mark.parametrize("name", COSTS)
def test_costs_are_those_stated(name):
    cost = TINY[name]().cost
    forwards, gradients, products = COSTS[name]
    assert cost.gradients_worth == pytest.approx(forwards / 3 + gradients + 2.2 * products, rel=0.1)
