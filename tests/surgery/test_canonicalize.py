"""The canonical representative: one for the whole orbit, the same function, and int8 error as before."""

import copy

import pytest
import torch
from operations import shaken
from torch import nn

import normgauge as ng

pytestmark = pytest.mark.usefixtures("single_precision")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5))


def rescaled(model, seed=1):
    other, source = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for index in (0, 2):
            factors = torch.exp(2 * torch.randn(24, generator=source))
            other[index].weight.mul_(factors[:, None])
            other[index].bias.mul_(factors)
            other[index + 2].weight.div_(factors)
    return other


def int8_error(model, inputs):
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for value in rounded.parameters():
            if value.ndim > 1:
                unit = value.abs().max() / 127
                value.copy_((value / unit).round() * unit)
        return float((model(inputs) - rounded(inputs)).norm() / model(inputs).norm())


def test_orbits_have_one_representative_and_int8_error_returns():
    model, inputs = network(), torch.randn(40, 8)
    first, second = (ng.canonicalize(m, example=inputs) for m in (model, rescaled(model)))
    assert first.proof <= 1e-10 and second.proof <= 1e-10
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    base, spoiled, back = (int8_error(m, inputs) for m in (model, rescaled(model), second.model))
    assert spoiled > 10 * base and back < 2 * base
    assert abs(back - int8_error(first.model, inputs)) < 0.02 * back
    assert "orders of units" in second.note and "48 directions" in second.note


def test_the_effect_of_eps_is_reported_apart():
    model = shaken(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)))
    with torch.no_grad():
        model[0].weight.mul_(0.02)
        model[0].bias.mul_(0.02)
    done = ng.canonicalize(model, example=torch.randn(30, 6))
    with_eps = [row["difference"] for row in done.proofs if row.get("eps") == "as it is"]
    assert done.proof <= 1e-10 < 1e-4 < max(with_eps)
    assert "without eps (limit" in done.meaning()
