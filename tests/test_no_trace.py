"""A measurement leaves no trace on the model: state, gradients, flags, hooks, attributes, random states."""

import pytest
import torch

import normgauge as ng
from cases import CASES
from reference.tracks import same, tracks

MEASUREMENTS = {
    "loss": lambda o: o.loss(),
    "gradient": lambda o: o.gradient(),
    "outputs": lambda o: o.outputs(),
    "hessian": lambda o: o.hessian() @ torch.ones(o.dimension, dtype=o.dtype),
    "gauss_newton": lambda o: o.gauss_newton() @ torch.ones(o.dimension, dtype=o.dtype),
    "landscape": lambda o: ng.landscape(o, steps=[0.1]),
    "spectrum": lambda o: ng.spectrum(o, top=1, tol=1e-2),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_measurements_leave_no_trace(case, mode):
    objective = case.make(mode)
    for parameter in objective.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    list(objective.model.modules())[-1].eval()  # flags differ between modules: each must come back
    objective.model.register_forward_hook(lambda *_: None)
    before = tracks(objective.model)
    for name, measure in MEASUREMENTS.items():
        measure(objective)
        assert same(before, tracks(objective.model)), f"{name} left a trace"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_raising_measurement_leaves_no_trace(case):
    objective = case.make("train")

    class Stop(Exception):
        pass

    def explode(*_):
        raise Stop

    layers = (torch.nn.Linear, torch.nn.LSTM)
    [m for m in objective.model.modules() if isinstance(m, layers)][-1].register_forward_hook(explode)
    before = tracks(objective.model)
    with pytest.raises(Stop):
        objective.loss()
    with pytest.raises(Stop):
        objective.hessian() @ torch.ones(objective.dimension)
    assert same(before, tracks(objective.model))


def test_dropout_draws_the_same_mask_each_time_and_differs_from_eval():
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1))
    data = (torch.randn(6, 4), torch.randn(6, 1))
    objective = ng.Objective(model, torch.nn.functional.mse_loss, data, mode="train")
    assert objective.loss() == objective.loss()
    assert objective.loss() != objective.replace(mode="eval").loss()


def test_the_picture_itself_notices_changes():
    """The twin must be able to fail: each kind of trace is seen."""
    for spoil in (
        lambda m: m[1].running_mean.add_(1),
        lambda m: setattr(m[0].weight, "grad", torch.ones_like(m[0].weight)),
        lambda m: m[1].eval(),
        lambda m: m[0].register_forward_hook(lambda *_: None),
        lambda m: torch.rand(1),
        lambda m: setattr(m[0], "extra", 1),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        before = tracks(model)
        spoil(model)
        assert not same(before, tracks(model))
