"""Quotient curvature: the five properties of the research note, with explicit blocks."""

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.errors import InputError, UnknownNameError
from normgauge.measure.curvature.products import QuotientOperator

ROWS = [(("0.weight", 0),)]
WRITERS = [(("0.weight", 0), ("0.bias", 0))]


def batch_norm_objective(eps=1e-20):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, eps=eps), nn.Tanh(), nn.Linear(5, 3))
    data = (torch.randn(9, 4), torch.randint(0, 3, (9,)))
    return ng.Objective(model, nn.functional.cross_entropy, data, mode="train")


def rescalable_objective():
    """A ReLU net: rows of the first layer with their biases are coupled to columns of the second."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    data = (torch.randn(9, 4), torch.randint(0, 3, (9,)))
    return ng.Objective(model, nn.functional.cross_entropy, data, mode="eval")


def dense(operator):
    return operator.matmat(torch.eye(operator.shape[0]))


def canonical(objective):
    """Scale every hidden unit's row and bias to norm one and push the factor into the column that reads it."""
    p = objective.parameters
    size = torch.cat([p["0.weight"], p["0.bias"][:, None]], 1).norm(dim=1)
    return objective.at(
        {
            "0.weight": p["0.weight"] / size[:, None],
            "0.bias": p["0.bias"] / size,
            "2.weight": p["2.weight"] * size,
        }
    )


def gauged(objective, seed):
    factors = torch.exp(2.0 * torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 2.0)
    p = objective.parameters
    return objective.at(
        {
            "0.weight": p["0.weight"] * factors[:, None],
            "0.bias": p["0.bias"] * factors,
            "2.weight": p["2.weight"] / factors,
        }
    )


def rescaled(objective, seed):
    factors = torch.exp(2.0 * torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 2.0)
    return objective.at({"0.weight": objective.parameters["0.weight"] * factors[:, None]})


def along_geodesic(objective, operator, v):
    """d^2/ds^2 of the loss at s = 0 along the product of great circles (and lines, outside the blocks)."""
    start = objective.flatten(objective.parameters)
    tangent = operator.project(v)
    speed = operator._broadcast(operator._sums(tangent * tangent).sqrt(), 0.0)
    safe = torch.where(speed > 0, speed, 1.0)
    names, x, y = objective.names, *next(objective.batches())[1]

    def loss(s):
        circle = start * torch.cos(speed * s) + operator.radius * tangent / safe * torch.sin(speed * s)
        line = start + s * tangent
        theta = torch.where(operator.inside, circle, line)
        pieces, first = {}, 0
        for name in names:
            shape = objective.parameters[name].shape
            pieces[name] = theta[first : first + shape.numel()].view(shape)
            first += shape.numel()
        buffers = {name: value.clone() for name, value in objective.model.named_buffers()}
        objective.model.train(objective.mode == "train")
        return nn.functional.cross_entropy(torch.func.functional_call(objective.model, {**pieces, **buffers}, (x,)), y)

    s = torch.zeros((), requires_grad=True)
    (slope,) = torch.autograd.grad(loss(s), s, create_graph=True)
    (bend,) = torch.autograd.grad(slope, s)
    return float(bend)


def test_a_canonical_point_does_not_depend_on_the_gauge():
    objective = rescalable_objective()
    here, there = canonical(objective), canonical(gauged(objective, 3))
    for name, value in here.parameters.items():
        torch.testing.assert_close(there.parameters[name], value, rtol=1e-12, atol=1e-12)
    assert float(here.loss()) == pytest.approx(float(objective.loss()), rel=1e-12)


@pytest.mark.parametrize("blocks", [WRITERS, ROWS], ids=["coupled", "free, large eps"])
def test_b_and_c_quadratic_form_is_the_second_derivative_along_geodesics(blocks):
    objective = canonical(rescalable_objective()) if blocks is WRITERS else batch_norm_objective(eps=0.1)
    operator = QuotientOperator(objective, blocks)
    v = torch.randn(operator.shape[0], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    exact = along_geodesic(objective, operator, v)
    assert float(v @ (operator @ v)) == pytest.approx(exact, rel=1e-10)
    operator.pull = torch.zeros_like(operator.pull)  # without the second term the form is another one
    assert abs(float(v @ (operator @ v)) - exact) > 1e-4 * abs(exact)


def test_d_free_scalings_do_not_move_the_quotient_at_the_raw_point():
    objective = batch_norm_objective()
    here, there = (dense(QuotientOperator(each, ROWS)) for each in (objective, rescaled(objective, 0)))
    assert float(objective.flatten(objective.gradient()).norm()) > 1e-2
    assert float((here - there).norm() / here.norm()) < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_e_random_factors_move_the_plain_spectrum_only(seed):
    free = batch_norm_objective()
    coupled = rescalable_objective()
    pairs = [
        (free, rescaled(free, seed), free, rescaled(free, seed), ROWS),
        (coupled, gauged(coupled, seed), canonical(coupled), canonical(gauged(coupled, seed)), WRITERS),
    ]
    for plain_here, plain_there, here, there, blocks in pairs:
        assert float(plain_here.loss()) == pytest.approx(float(plain_there.loss()), rel=1e-9)
        first, second = (ng.quotient_spectrum(each, blocks, top=3, bottom=1, tol=1e-9) for each in (here, there))
        torch.testing.assert_close(torch.tensor(first.top), torch.tensor(second.top), rtol=1e-6, atol=0)
        torch.testing.assert_close(torch.tensor(first.bottom), torch.tensor(second.bottom), rtol=1e-6, atol=0)
        assert first.negatives == second.negatives
        assert first.condition == pytest.approx(second.condition, rel=1e-4)
        plain = [ng.spectrum(each, top=1).top[0] for each in (plain_here, plain_there)]
        assert not 0.5 < plain[0] / plain[1] < 2.0


def test_counts_are_those_of_the_dense_matrix():
    objective = batch_norm_objective()
    found = ng.quotient_spectrum(objective, ROWS, top=2, bottom=2, tol=1e-8)
    values = torch.linalg.eigvalsh(dense(QuotientOperator(objective, ROWS)))
    nonzero = values[values.abs() > 1e-10]
    assert found.negatives == float((nonzero < 0).sum()) > 0
    assert found.condition == pytest.approx(float(nonzero.abs().max() / nonzero.abs().min()), rel=1e-5)
    assert found.sharpness == pytest.approx(float(values.max()), rel=1e-8)
    assert found.blocks == 5
    text = str(found)
    assert "gauge given point" in text and "mode train" in text.splitlines()[-1]


def test_block_directions_are_zero_modes():
    objective = batch_norm_objective()
    operator = QuotientOperator(objective, ROWS)
    for row in range(5):
        direction = torch.where(operator.owner == row, operator.weights, 0.0)
        assert float((operator @ direction).norm()) < 1e-12


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        ([(("0.wieght", 0),)], UnknownNameError, r"Did you mean '0\.weight'"),
        ([(("0.weight", 2),)], InputError, "axis 2"),
        ([(("0.weight", 0),), (("0.weight", 1),)], InputError, "share no entry"),
        ([(("0.weight", 0), ("3.weight", 0))], InputError, "equally many slices"),
        ([(("1.bias", None),)], InputError, "positive norm"),
    ],
)
def test_bad_blocks_are_said(blocks, error, message):
    with pytest.raises(error, match=message):
        QuotientOperator(batch_norm_objective(), blocks)


def test_of_quotient_uses_the_discovered_symmetries():
    pytest.importorskip("normgauge.symmetry")
    torch.manual_seed(2)
    layers = [nn.Linear(5, 4), nn.BatchNorm1d(4, eps=1e-20), nn.ReLU(), nn.Linear(4, 3)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    objective = ng.Objective(
        model, nn.functional.cross_entropy, (torch.randn(12, 5), torch.randint(0, 3, (12,))), mode="train"
    )
    here = ng.spectrum(objective, of="quotient", top=3, tol=1e-8)
    p, free, coupled = objective.parameters, torch.rand(4) * 5 + 0.2, torch.rand(4) * 5 + 0.2
    moved = objective.at(
        {
            "0.weight": p["0.weight"] * free[:, None],
            "0.bias": p["0.bias"] * free,
            "1.weight": p["1.weight"] * coupled,
            "1.bias": p["1.bias"] * coupled,
            "3.weight": p["3.weight"] / coupled,
        }
    )
    there = ng.spectrum(moved, of="quotient", top=3, tol=1e-8)
    assert here.gauge == "unit-writer" and here.blocks >= 8
    torch.testing.assert_close(torch.tensor(here.top), torch.tensor(there.top), rtol=1e-6, atol=0)
