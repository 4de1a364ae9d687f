"""Every instrument on an MLP, a convolutional net, a ResNet, a recurrent net and a transformer, without a trace."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import normgauge as ng
from cases import CASES
from reference.tracks import same, tracks

FIVE = [c for c in CASES if c.name in ("mlp", "cnn_batchnorm_dropout", "resnet", "lstm", "transformer")]
# covariate_shift, signal_propagation, margins, flatness and robustness have this test in their own files
INSTRUMENTS = {
    "landscape": lambda o: ng.landscape(o, steps=[0.1], random=1),
    "loss_surface": lambda o: ng.loss_surface(o, points=2),
    "activations": lambda o: ng.activations(o),
    "stable_rate": lambda o: ng.stable_rate(o, iterations=4, tol=2.0),
    "smoothing": lambda o: ng.smoothing(o),
    "sharpness_track": lambda o: ng.sharpness_track(o, checkpoints={0: o.parameters}),
    "drift": lambda o: ng.drift(o.model, [batch for _, batch in o.batches()]),
}


@pytest.mark.parametrize("case", FIVE, ids=str)
def test_instruments_run_and_leave_no_trace(case):
    objective = case.make("train")
    for parameter in objective.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    for name, measure in INSTRUMENTS.items():
        before = tracks(objective.model)  # afresh: the first import of rich, for printing, draws from `random`
        found = measure(objective)
        assert same(before, tracks(objective.model)), f"{name} left a trace"
        assert str(found) and found._footer() in str(found)


@pytest.mark.parametrize("case", FIVE, ids=str)
def test_a_raising_model_leaves_no_trace(case):
    objective = case.make("train")

    class Stop(Exception):
        pass

    def explode(*_):
        raise Stop

    layers = (torch.nn.Linear, torch.nn.LSTM)
    [m for m in objective.model.modules() if isinstance(m, layers)][-1].register_forward_hook(explode)
    before = tracks(objective.model)
    others = {
        "covariate_shift": lambda o: ng.covariate_shift(o, 0.1),
        "signal_propagation": ng.signal_propagation,
        "margins": ng.margins,
        "flatness": ng.flatness,
    }
    for name, measure in {**INSTRUMENTS, **others}.items():
        with pytest.raises(Stop):
            measure(objective)
        assert same(before, tracks(objective.model)), f"{name} left a trace"


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 20.0), st.integers(0, 1000))
def test_scaling_a_normalized_layer_scales_its_shift_by_the_inverse(factor, seed):
    """With v = k w before a batch norm, gradients by v are those by w divided by k; so is their change."""
    source = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, eps=1e-12), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ).double()
    draw = {n: torch.randn(p.shape, generator=source, dtype=torch.float64) for n, p in model.named_parameters()}
    data = (torch.randn(8, 3, generator=source, dtype=torch.float64), torch.randint(2, (8,), generator=source))
    first = ng.Objective(model, torch.nn.functional.cross_entropy, data, mode="train").at(draw)
    scaled = {n: factor * v if n.startswith("0.") else v for n, v in draw.items()}
    gradient = first.gradient()
    step = {n: v - 0.1 * gradient[n] for n, v in draw.items()}
    moved = {n: factor * v if n.startswith("0.") else v for n, v in step.items()}
    a, b = ng.covariate_shift(first, step), ng.covariate_shift(first.at(scaled), moved)
    assert b["1"].l2 == pytest.approx(a["1"].l2, rel=1e-6, abs=1e-9)
    assert b["3"].cosine == pytest.approx(a["3"].cosine, rel=1e-6)
    assert b["0"].gradient_norm == pytest.approx(a["0"].gradient_norm / factor, rel=1e-6)
