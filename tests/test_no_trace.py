"""A measurement leaves no trace on the model: state, gradients, flags, hooks, attributes, random states."""

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

import normgauge as ng
from cases import CASES
from hostile import (
    HOSTILE,
    Checkpointed,
    CheckpointedReentrant,
    ClippedEmbedding,
    Net,
    SpectralTrain,
    hostile_objective,
)
from normgauge.errors import NormgaugeError, NotDifferentiableError
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


INSTRUMENTS = {
    **MEASUREMENTS,
    "loss again": lambda o: o.loss(),
    "margins": ng.margins,
    "trace": lambda o: ng.trace(o, probes=2),
    "density": lambda o: ng.density(o, iterations=3),
    "flatness": lambda o: ng.flatness(o, samples=2),
    "signal_propagation": lambda o: ng.signal_propagation(o, theory=True),
    "activations": ng.activations,
    "symmetries": ng.symmetries,
    "weight_dynamics": ng.weight_dynamics,
    "quotient": lambda o: ng.spectrum(o, of="quotient", top=1, tol=1e-2),
    "drift": lambda o: ng.drift(o.model, [next(o.batches())[1]] * 2),
    "robustness": lambda o: ng.robustness(o.model, next(o.batches())[1], attack="fgsm", radius=0.1),
    "lipschitz": lambda o: ng.lipschitz(o.model, next(o.batches())[1][0]),
    "generalization": lambda o: ng.generalization(o.model, next(o.batches())[1]),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_forwards_leave_no_trace(kind, mode):
    objective = hostile_objective(kind, mode)
    _, batch = next(objective.batches())
    before, data = tracks(objective.model), [tensor.clone() for tensor in batch]
    values = {}
    for name, measure in INSTRUMENTS.items():
        try:
            values[name] = measure(objective)
        except (NormgaugeError, ValueError) as error:
            values[name] = error  # a refusal leaves no trace either: ours, or that of a BatchNorm given one sample
        assert same(before, tracks(objective.model)), f"{name} left a trace"
        assert same(data, list(batch)), f"{name} wrote into the data"
    assert torch.equal(values["loss"], values["loss again"])


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind.__name__ != "SpectralTrain"])
@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 10.0])
def test_derivatives_of_hostile_forwards_are_those_of_the_loss(kind, mode, scale):
    objective = hostile_objective(kind, mode, torch.float64)
    objective = objective.at(scale * objective.flatten(objective.parameters))
    theta = objective.flatten(objective.parameters)
    direction = torch.randn(len(theta), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    direction, step = direction / direction.norm(), 1e-5
    ahead, back = (objective.at(theta + sign * step * direction) for sign in (1, -1))
    slope = (ahead.loss() - back.loss()) / (2 * step)
    assert torch.allclose(objective.flatten(objective.gradient()) @ direction, slope, rtol=1e-5, atol=1e-8)
    bend = (objective.flatten(ahead.gradient()) - objective.flatten(back.gradient())) / (2 * step)
    assert torch.allclose(objective.hessian() @ direction, bend, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedReentrant])
def test_checkpoints_come_back_after_a_measurement(kind):
    module = torch.utils.checkpoint
    original = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    objective = hostile_objective(kind, "train")
    ng.spectrum(objective, top=1, tol=1e-2)
    assert (module.CheckpointFunction, module._checkpoint_without_reentrant_generator) == original


def test_hugging_face_checkpoints_have_the_plain_curvature():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0)).double()
    tokens = torch.randint(11, (3, 8))

    def top(scale):
        objective = ng.Objective.from_step(
            model, lambda m, batch: m(input_ids=batch, labels=batch).loss, tokens, mode="train"
        )
        theta = objective.flatten(objective.parameters)
        return ng.spectrum(objective.at(scale * theta), top=1, tol=1e-6).top[0]

    plain = [top(1.0), top(3.0)]
    for reentrant in (True, False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        before = tracks(model)
        assert [top(1.0), top(3.0)] == pytest.approx(plain, rel=1e-6)
        assert same(before, tracks(model))


def test_another_librarys_checkpoint_is_refused_by_name():
    class CheckpointFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, x):
            ctx.function = function
            ctx.save_for_backward(x)
            with torch.no_grad():
                return function(x)

        @staticmethod
        def backward(ctx, slope):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(ctx.function(x), slope)
            return None, x.grad

    class Own(Net):
        def vice(self, x):
            return CheckpointFunction.apply(torch.tanh, x.clone().requires_grad_())

    objective = hostile_objective(Own, "train")
    for measure in (objective.gradient, lambda: objective.hessian() @ torch.ones(objective.dimension)):
        with pytest.raises(NotDifferentiableError, match="CheckpointFunctionBackward, an activation checkpoint"):
            measure()


def test_an_open_cache_of_parametrizations_is_not_read():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2))
    objective = ng.Objective(model, nn.functional.mse_loss, (torch.randn(8, 4), torch.randn(8, 2)), mode="eval")
    expected = ng.landscape(objective, steps=[0.1, 1.0])
    with parametrize.cached():
        weight = model[0].weight
        found = ng.landscape(objective, steps=[0.1, 1.0])
        assert model[0].weight is weight  # the user's cache is as it was
    assert found == expected
    assert parametrize._cache_enabled == 0


def test_results_say_that_spectral_norm_hides_its_iteration_from_derivatives():
    said = "derivatives hold its singular vectors fixed"
    assert said in str(ng.spectrum(hostile_objective(SpectralTrain, "train"), top=1, tol=1e-2))
    assert said not in str(ng.spectrum(hostile_objective(SpectralTrain, "eval"), top=1, tol=1e-2))
    assert said not in str(ng.spectrum(hostile_objective(Net, "train"), top=1, tol=1e-2))


def test_embeddings_are_clipped_on_a_copy():
    objective = hostile_objective(ClippedEmbedding, "train")
    weight = objective.model.embedding.weight.detach().clone()
    expected = objective.loss()
    assert torch.equal(weight, objective.model.embedding.weight)
    _, (inputs, targets) = next(objective.batches())
    assert torch.allclose(nn.functional.cross_entropy(objective.model(inputs), targets), expected)
    assert not torch.equal(weight, objective.model.embedding.weight)  # torch itself does write


def test_a_parameter_that_the_forward_changes_has_no_derivative():
    class Clipped(Net):
        def vice(self, x):
            self.first.weight.data.clamp_(-0.1, 0.1)
            return x

    objective = hostile_objective(Clipped, "train")
    before = tracks(objective.model)
    assert torch.equal(objective.loss(), objective.loss())
    for measure in (objective.gradient, lambda: objective.hessian() @ torch.ones(objective.dimension)):
        with pytest.raises(NotDifferentiableError, match=r"first.weight.*must not write into its parameters"):
            measure()
    assert same(before, tracks(objective.model))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_reading_a_loader_moves_no_generator(own, workers):
    torch.manual_seed(0)
    model = Net()
    source = torch.Generator().manual_seed(5) if own else None
    data = TensorDataset(torch.randn(12, 4), torch.randint(3, (12,)))
    loader = DataLoader(data, batch_size=5, shuffle=True, generator=source, num_workers=workers)
    objective = ng.Objective(model, nn.functional.cross_entropy, loader, mode="train")
    before, state = tracks(model), source.get_state() if own else None
    first = objective.loss()
    assert same(before, tracks(model))
    torch.rand(3)
    if own:
        assert torch.equal(state, source.get_state())
        torch.rand(3, generator=source)
    assert torch.equal(first, objective.loss())  # one order for all passes, whatever was drawn in between


def test_augmentation_that_draws_from_numpy_is_drawn_once_and_for_all():
    class Noisy(torch.utils.data.Dataset):
        def __init__(self):
            self.source = np.random.default_rng(0)

        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.full((4,), float(index + np.random.rand() + self.source.normal())), index % 3

    loader = DataLoader(Noisy(), batch_size=3)
    objective = ng.Objective(Net(), nn.functional.cross_entropy, loader, mode="train")
    state, own = str(np.random.get_state()), str(loader.dataset.source.bit_generator.state)
    assert torch.equal(objective.loss(), objective.loss())
    assert (state, own) == (str(np.random.get_state()), str(loader.dataset.source.bit_generator.state))


def test_threads_measure_one_model_as_one_after_the_other():
    objective = hostile_objective(Checkpointed, "train")
    other = hostile_objective(Net, "train")  # random streams are shared by all models

    def measure(index):
        one = (objective, other)[index % 2].replace(mode=("train", "eval")[index // 2 % 2])
        top = ng.spectrum(one, top=1, tol=1e-2).top
        scaled = one.at(2.0 * one.flatten(one.parameters))
        return float(one.loss()), top, float(scaled.loss()), float(ng.margins(one).raw.sum())

    expected = [measure(index) for index in range(8)]
    before, found = tracks(objective.model), [[] for _ in range(8)]
    threads = [
        threading.Thread(target=lambda index=index: found[index].extend(measure(index) for _ in range(3)))
        for index in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[values] * 3 for values in expected]
    assert same(before, tracks(objective.model))


def test_a_compiled_model_is_measured_as_written():
    torch.manual_seed(0)
    model = Net()
    data = (torch.randn(8, 4), torch.randint(3, (8,)))
    plain = ng.spectrum(ng.Objective(model, nn.functional.cross_entropy, data, mode="train"), top=1)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(data[0])
    found = ng.spectrum(ng.Objective(compiled, nn.functional.cross_entropy, data, mode="train"), top=1)
    assert found.top == pytest.approx(plain.top)
    model.first.compile(backend="aot_eager")
    assert ng.spectrum(
        ng.Objective(model, nn.functional.cross_entropy, data, mode="train"), top=1
    ).top == pytest.approx(plain.top)
