"""The Objective against naive twins, and its errors word for word."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from cases import CASES, Recurrent
from normgauge.errors import DataError, InputError, ModelError, NonFiniteError, NotDifferentiableError, UnknownNameError
from reference.objective import (
    HandBatchNorm,
    HandGroupNorm,
    HandLayerNorm,
    HandRMSNorm,
    dense_gauss_newton,
    dense_hessian,
)

NORMS = {
    "batch1d": (lambda: nn.BatchNorm1d(4), HandBatchNorm),
    "layer": (lambda: nn.LayerNorm(4), HandLayerNorm),
    "group": (lambda: nn.GroupNorm(2, 4), HandGroupNorm),
    "rms": (lambda: nn.RMSNorm(4, eps=1e-6), HandRMSNorm),
}


def small_net(norm):
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return model


def batch(n=7, features=3, classes=2):
    return torch.randn(n, features), torch.randint(classes, (n,))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", NORMS)
def test_hessian_and_gauss_newton_equal_the_dense_twins_per_norm(name, mode):
    make, hand = NORMS[name]
    model = small_net(make())
    twin = copy.deepcopy(model)
    twin[1] = hand(model[1])
    data = [batch(7), batch(4)]
    objective = ng.Objective(model, F.cross_entropy, data, mode=mode)
    exact = dense_hessian(twin, F.cross_entropy, data, training=mode == "train")
    eye = torch.eye(objective.dimension)
    found = objective.hessian() @ eye
    assert (found - exact).norm() <= 1e-12 * exact.norm()
    assert (found - found.T).norm() <= 1e-12 * exact.norm()
    single = objective.replace(data=data[0])
    gauss_newton = dense_gauss_newton(twin, F.cross_entropy, data[0], training=mode == "train")
    assert torch.allclose(single.gauss_newton() @ eye, gauss_newton, atol=1e-12)


def test_torch_weight_norm_has_a_wrong_second_derivative_and_ours_has_not():
    """torch's fused kernel forgets that the norm depends on v; when torch mends it this test says so."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))
    data = batch()
    objective = ng.Objective(model, F.cross_entropy, data, mode="eval")
    point = objective.flatten(objective.parameters)

    def gradient(vector):
        return objective.flatten(objective.at(vector).gradient())

    steps = 1e-6 * torch.eye(objective.dimension)
    differences = torch.stack([(gradient(point + e) - gradient(point - e)) / 2e-6 for e in steps])
    fused = dense_hessian(model, F.cross_entropy, [data], training=False)
    order = torch.cat([torch.arange(s, s + n) for s, n in _places(model, objective)])
    exact = objective.hessian() @ torch.eye(objective.dimension)
    assert (exact - differences).norm() < 1e-8 * exact.norm()
    assert (fused[order][:, order] - exact).norm() > 1e-2 * exact.norm()


def _places(model, objective):
    starts, start = {}, 0
    for name, parameter in model.named_parameters():
        starts[name] = (start, parameter.numel())
        start += parameter.numel()
    return [starts[name] for name in objective.names]


def test_torch_func_hessian_is_wrong_through_fused_batchnorm():
    """The trap that decides how products are made; when torch mends it this test says so."""
    model = small_net(nn.BatchNorm1d(4))
    data = batch()
    twin = copy.deepcopy(model)
    twin[1] = HandBatchNorm(model[1])
    exact = dense_hessian(twin, F.cross_entropy, [data], training=True)
    names = list(dict(model.named_parameters()))
    model.train()

    def loss(parameters):
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        return F.cross_entropy(torch.func.functional_call(model, {**parameters, **buffers}, (data[0],)), data[1])

    blocks = torch.func.hessian(loss)({name: p.detach() for name, p in model.named_parameters()})
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    naive = torch.cat([torch.cat([blocks[a][b].reshape(sizes[a], sizes[b]) for b in names], 1) for a in names])
    assert (naive - exact).norm() > 1e-3 * exact.norm()


def differentiable_mode(case):
    """In train mode torch's spectral_norm iterates vectors it does not differentiate: its gradient is another one."""
    return "eval" if case.name == "weight_norm_parametrized" else "train"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_is_the_derivative_of_the_loss(case):
    objective = case.make(differentiable_mode(case))
    gradient = objective.flatten(objective.gradient())
    direction = torch.randn(objective.dimension)
    direction /= direction.norm()
    point, step = objective.flatten(objective.parameters), 1e-6
    slope = (objective.at(point + step * direction).loss() - objective.at(point - step * direction).loss()) / (2 * step)
    assert float(slope) == pytest.approx(float(gradient @ direction), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hessian_is_the_derivative_of_the_gradient_and_symmetric(case):
    objective = case.make(differentiable_mode(case))
    direction = torch.randn(objective.dimension)
    direction /= direction.norm()
    other = torch.randn(objective.dimension)
    with objective.hessian() as hessian:
        product = hessian @ direction
        assert float(other @ product) == pytest.approx(float(direction @ (hessian @ other)), rel=1e-8, abs=1e-10)
    point, step = objective.flatten(objective.parameters), 1e-6
    ahead, behind = (objective.at(point + s * step * direction) for s in (1, -1))
    slope = (objective.flatten(ahead.gradient()) - objective.flatten(behind.gradient())) / (2 * step)
    assert torch.allclose(product, slope, rtol=1e-3, atol=1e-5)


def test_batches_are_weighted_by_samples():
    model = nn.Linear(3, 2)
    first, second = batch(6), batch(2)
    joint = (torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]]))
    several = ng.Objective(model, F.cross_entropy, [first, second], mode="eval")
    one = several.replace(data=joint)
    assert several.loss() == pytest.approx(float(one.loss()))
    assert torch.allclose(several.flatten(several.gradient()), one.flatten(one.gradient()))
    assert torch.allclose(several.outputs(), one.outputs())


def test_float32_and_dataloader_agree_with_float64():
    model = small_net(nn.BatchNorm1d(4))
    inputs, targets = batch(12)
    exact = ng.Objective(model, F.cross_entropy, (inputs, targets), mode="train")
    single = copy.deepcopy(model).float()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs.float(), targets), batch_size=12)
    rough = ng.Objective(single, F.cross_entropy, loader, mode="train")
    assert rough.dtype == torch.float32
    assert float(rough.loss()) == pytest.approx(float(exact.loss()), rel=1e-5)
    vector = torch.randn(exact.dimension)
    assert torch.allclose(rough.hessian() @ vector, (exact.hessian() @ vector).float(), atol=1e-3, rtol=1e-3)


def test_from_step_agrees_with_the_constructor_and_terms_are_selectable():
    model, data = small_net(nn.BatchNorm1d(4)), batch()

    def step(m, b):
        return {"fit": F.cross_entropy(m(b[0]), b[1]), "decay": 0.1 * m[0].weight.square().sum()}

    plain = ng.Objective(model, F.cross_entropy, data, mode="train")
    steps = ng.Objective.from_step(model, step, data, mode="train", outputs=lambda m, b: m(b[0]))
    assert steps.replace(terms="fit").loss() == plain.loss()
    assert float(steps.loss()) == pytest.approx(float(plain.loss() + 0.1 * model[0].weight.detach().square().sum()))
    eye = torch.eye(plain.dimension)
    assert torch.equal(steps.replace(terms="fit").gauss_newton() @ eye, plain.gauss_newton() @ eye)
    with pytest.raises(UnknownNameError, match="unknown loss term 'fitt'. Did you mean 'fit'"):
        steps.replace(terms="fitt").loss()


def test_weight_of_from_step_counts_tokens():
    model = nn.Linear(2, 3)
    data = [{"x": torch.randn(n, 2), "y": torch.randint(3, (n,)), "tokens": t} for n, t in ((4, 10), (4, 30))]
    parts = [
        ng.Objective.from_step(model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), [d], mode="eval").loss()
        for d in data
    ]
    both = ng.Objective.from_step(
        model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), data, mode="eval", weight=lambda b: b["tokens"]
    )
    assert float(both.loss()) == pytest.approx(float(0.25 * parts[0] + 0.75 * parts[1]))


def test_gauss_newton_of_a_step_that_hides_its_outputs_says_so():
    model, data = nn.Linear(3, 2), batch()
    objective = ng.Objective.from_step(
        model, lambda m, b: F.cross_entropy(m(b[0] * 1.0), b[1]), data, mode="eval", outputs=lambda m, b: m(b[0])
    )
    with pytest.raises(NotDifferentiableError, match="call the model on the same tensors"):
        objective.gauss_newton() @ torch.ones(objective.dimension)
    with pytest.raises(InputError, match="Pass outputs=lambda"):
        ng.Objective.from_step(model, lambda m, b: m(b[0]).sum(), data, mode="eval").outputs()


def test_selection_by_glob_names_and_predicate():
    model = small_net(nn.BatchNorm1d(4))
    make = lambda selection: ng.Objective(model, F.cross_entropy, batch(), mode="train", parameters=selection)  # noqa: E731
    assert make("0.*").names == ("0.weight", "0.bias")
    assert make(["3.bias", "1.*"]).names == ("1.weight", "1.bias", "3.bias")
    assert make(lambda name, p: p.ndim == 2).names == ("0.weight", "3.weight")
    assert make("0.*").dimension == 16
    with pytest.raises(UnknownNameError, match="unknown parameter '0.wieght'. Did you mean '0.weight'"):
        make("0.wieght")
    with pytest.raises(InputError, match="which selects none of 6"):
        make("nowhere.*")


def test_subset_hessian_is_a_block_of_the_whole():
    model, data = small_net(nn.LayerNorm(4)), batch()
    whole = ng.Objective(model, F.cross_entropy, data, mode="eval")
    part = whole.replace(parameters="0.*")
    dense = whole.hessian() @ torch.eye(whole.dimension)
    assert torch.allclose(part.hessian() @ torch.eye(part.dimension), dense[:16, :16], atol=1e-12)


def test_operator_takes_dicts_matrices_and_goes_to_scipy():
    from scipy.sparse.linalg import eigsh

    objective = ng.Objective(small_net(nn.LayerNorm(4)), F.cross_entropy, batch(), mode="eval")
    hessian = objective.hessian()
    vector = torch.randn(objective.dimension)
    by_name = hessian @ objective.unflatten(vector)
    assert set(by_name) == set(objective.names)
    assert torch.allclose(objective.flatten(by_name), hessian @ vector)
    assert torch.allclose(hessian.matmat(torch.stack([vector, 2 * vector], 1))[:, 1], 2 * (hessian @ vector))
    dense = hessian @ torch.eye(objective.dimension)
    top = eigsh(hessian.to_scipy(), k=1, which="LA")[0][0]
    assert top == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]))
    with pytest.raises(InputError, match=r"a vector must have shape \(34,\)"):
        hessian @ torch.ones(3)


def test_the_operator_keeps_the_point_it_was_made_at():
    model = small_net(nn.BatchNorm1d(4))
    objective = ng.Objective(model, F.cross_entropy, batch(), mode="train")
    hessian, vector = objective.hessian(), torch.randn(objective.dimension)
    before = hessian @ vector
    with torch.no_grad():
        model[0].weight.mul_(3.0)
    assert torch.equal(hessian @ vector, before)
    assert not torch.allclose(objective.hessian() @ vector, before)


def test_affine_loss_has_zero_hessian_and_unused_parameters_zero_gradient():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            return self.used(x)

    objective = ng.Objective(Half(), lambda out, _: out.mean(), (torch.randn(4, 2), torch.zeros(4)), mode="eval")
    assert not (objective.hessian() @ torch.ones(objective.dimension)).any()
    assert not objective.gradient()["unused.weight"].any()


@given(scale=st.floats(0.1, 10.0), shift=st.floats(-2.0, 2.0))
@settings(max_examples=15, deadline=None)
def test_derivatives_are_linear_in_the_loss(scale, shift):
    torch.manual_seed(3)
    with torch.random.fork_rng():
        model, data = small_net(nn.BatchNorm1d(4)), batch()
    plain = ng.Objective(model, F.cross_entropy, data, mode="train")
    other = ng.Objective(model, lambda o, t: scale * F.cross_entropy(o, t) + shift, data, mode="train")
    vector = torch.linspace(-1, 1, plain.dimension, dtype=plain.dtype)
    assert torch.allclose(other.hessian() @ vector, scale * (plain.hessian() @ vector), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", NORMS)
def test_the_pure_function_works_under_torch_func(name, mode):
    model, data = small_net(NORMS[name][0]()), [batch(7), batch(4)]
    objective = ng.Objective(model, F.cross_entropy, data, mode=mode)
    values = dict(objective.parameters)
    slopes = torch.func.grad(objective.function)(values)
    assert all(torch.allclose(slopes[key], value) for key, value in objective.gradient().items())
    vector = {key: torch.randn_like(value) for key, value in values.items()}
    product = torch.func.jvp(torch.func.grad(objective.function), (values,), (vector,))[1]
    expected = objective.hessian() @ objective.flatten(vector)
    assert torch.allclose(objective.flatten(product), expected, atol=1e-10)
    several = {key: torch.stack([value, 1.1 * value]) for key, value in values.items()}
    losses = torch.func.vmap(objective.function)(several)
    assert float(losses[1]) == pytest.approx(float(objective.at({k: 1.1 * v for k, v in values.items()}).loss()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_leg(case):
    """The same numbers in single precision, up to its rounding."""
    exact = case.make("eval")
    single = case.make("eval")
    single.model.load_state_dict(exact.model.state_dict())
    single.model.float()
    rough = single.replace(data=[halved(b) for _, b in exact.batches()])
    assert rough.dtype == torch.float32
    if case.name != "secretive_state":  # its random output differs between precisions
        assert float(rough.loss()) == pytest.approx(float(exact.loss()), rel=1e-4, abs=1e-6)
        vector = torch.randn(exact.dimension) / exact.dimension**0.5
        product = (exact.hessian() @ vector).float()
        assert torch.allclose(rough.hessian() @ vector.float(), product, atol=2e-3 * float(product.abs().max()) + 1e-6)
    assert rough.gradient()[rough.names[0]].dtype == torch.float32


def halved(tree):
    if isinstance(tree, torch.Tensor):
        return tree.float() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: halved(value) for key, value in tree.items()}
    return tuple(halved(value) for value in tree)


def test_recurrent_nets_see_functional_parameters():
    model = Recurrent()
    data = (torch.randn(5, 4, 3), torch.randint(3, (5,)))
    objective = ng.Objective(model, F.cross_entropy, data, mode="eval")
    moved = {name: value + 0.1 for name, value in objective.parameters.items()}
    there = objective.at(moved).loss()
    model.load_state_dict(moved)
    assert float(there) == pytest.approx(float(objective.loss()))


def test_a_hugging_face_model_from_a_config_leaves_no_trace():
    transformers = pytest.importorskip("transformers")
    from reference.tracks import same, tracks

    config = transformers.GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(17, (3, 6))
    before = tracks(model)
    objective = ng.Objective.from_step(
        model,
        lambda m, b: m(**b).loss,
        {"input_ids": tokens, "labels": tokens},
        mode="train",
        outputs=lambda m, b: m(**b).logits,
    )
    vector = torch.ones(objective.dimension, dtype=objective.dtype)
    curvature = objective.gauss_newton() @ vector
    assert float(vector @ curvature) > 0
    assert torch.isfinite(objective.hessian() @ vector).all()
    assert same(before, tracks(model))


# -- errors: the rule, what came, the next step ------------------------------------------------------------------


def objective_of(loss=F.cross_entropy, data=None, mode="train", model=None, **kwargs):
    data = batch() if data is None else data
    return ng.Objective(model or small_net(nn.BatchNorm1d(4)), loss, data, mode=mode, **kwargs)


def test_mode_is_required_and_checked():
    with pytest.raises(TypeError, match="mode"):
        ng.Objective(nn.Linear(1, 1), F.mse_loss, batch())
    with pytest.raises(InputError, match="mode must be 'train' or 'eval'. Got 'test'. Pass mode='train'"):
        objective_of(mode="test")


def test_non_scalar_and_non_tensor_losses():
    with pytest.raises(InputError, match=r"Got shape \(7,\) of torch.float64 in batch 0. Use reduction='mean'"):
        objective_of(loss=lambda o, t: F.cross_entropy(o, t, reduction="none")).loss()
    with pytest.raises(InputError, match="must be a 0-d tensor. Got float. Return the tensor"):
        objective_of(loss=lambda o, t: 1.0).loss()
    with pytest.raises(InputError, match="loss is a function"):
        objective_of(loss="cross_entropy")


def test_non_finite_loss_names_the_batch():
    bad = batch()
    bad[0][2, 1] = float("inf")
    with pytest.raises(NonFiniteError, match="loss must be finite. Got nan in batch 1"):
        objective_of(data=[batch(), bad]).gradient()


def test_batch_of_one_names_the_layer():
    with pytest.raises(ModelError, match=r"layer '1' \(BatchNorm1d\).*Got input size .*\[1, 4\].*drop_last=True"):
        objective_of(data=[batch(), batch(1)]).loss()
    objective_of(data=batch(1), mode="eval").loss()


def test_empty_one_shot_and_malformed_data():
    with pytest.raises(DataError, match="at least one batch. Got none"):
        objective_of(data=torch.utils.data.DataLoader([])).loss()
    with pytest.raises(DataError, match=r"one-shot generator. Pass ng.take\(source, n\)"):
        objective_of(data=(batch() for _ in range(2)))
    with pytest.raises(DataError, match=r"pair \(inputs, targets\). Got tuple of length 3 as batch 0"):
        objective_of(data=[(*batch(), 1)]).loss()
    with pytest.raises(DataError, match="a list of two tensors"):
        objective_of(data=list(batch()))
    with pytest.raises(DataError, match="Got int"):
        objective_of(data=5)
    with pytest.raises(DataError, match="Got a mapping with keys x"):
        objective_of(data={"x": 1})


def test_data_that_changes_between_passes():
    class Moving:
        def __init__(self):
            self.passes = 0

        def __iter__(self):
            self.passes += 1
            inputs, targets = batch()
            return iter([(inputs + self.passes, targets)])

    objective = objective_of(data=Moving())
    objective.loss()
    with pytest.raises(DataError, match="same batches at every pass. Got another batch 0"):
        objective.loss()

    class Shrinking:
        count = 3

        def __iter__(self):
            self.count -= 1
            return iter([fixed] * self.count)

    fixed = batch()
    objective = objective_of(data=Shrinking())
    objective.loss()
    with pytest.raises(DataError, match="Got 1 batches instead of 2"):
        objective.loss()


def test_take_makes_one_shot_sources_usable():
    objective = objective_of(data=ng.take((batch() for _ in range(5)), 2))
    assert objective.loss() == objective.loss()
    with pytest.raises(DataError, match="count must be at least 1. Got 0"):
        ng.take([1], 0)


def test_models_without_variables_or_on_two_devices():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ModelError, match="Got 2 parameters, all frozen"):
        objective_of(model=frozen)
    with pytest.raises(ModelError, match="Got none"):
        objective_of(model=nn.ReLU())
    split = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError, match=r"one device. Got 0.weight on cpu, 1.weight on meta. Call model.to"):
        objective_of(model=split)
    with pytest.raises(InputError, match="model is a torch.nn.Module. Got function"):
        objective_of(model=F.relu)


def test_a_loss_without_graph():
    with pytest.raises(NotDifferentiableError, match="a loss without graph. Remove .detach"):
        objective_of(loss=lambda o, t: F.cross_entropy(o.detach(), t)).gradient()


def test_errors_inside_the_model_say_where():
    with pytest.raises(RuntimeError) as caught:
        objective_of(data=(torch.randn(4, 5), torch.zeros(4).long())).loss()
    assert "layer '0' (Linear)" in caught.value.__notes__[0]


def test_at_refuses_unknown_names_and_wrong_shapes():
    objective = objective_of()
    with pytest.raises(UnknownNameError, match="Did you mean '0.weight'"):
        objective.at({"0.weigth": torch.zeros(4, 3)})
    with pytest.raises(InputError, match=r"shape \(4, 3\). Got \(3, 4\)"):
        objective.at({"0.weight": torch.zeros(3, 4)})
    with pytest.raises(InputError, match=r"has shape \(34,\). Got \(2,\)"):
        objective.at(torch.zeros(2))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 2, device="meta"), r"parameters must have values. Got 'weight', on the meta device"),
        (nn.LazyLinear(2), r"'weight', which has no shape yet. Call the model once"),
    ],
)
def test_parameters_without_values(model, message):
    with pytest.raises(ModelError, match=message):
        ng.Objective(model, F.mse_loss, (torch.ones(2, 3), torch.ones(2, 2)), mode="eval")


def test_arguments_in_the_wrong_order_print_no_tensor():
    with pytest.raises(InputError, match=r"Got tuple. The order is model, loss or step, data\.$"):
        ng.Objective(nn.Linear(3, 2), (torch.ones(2, 3), torch.ones(2, 2)), F.mse_loss, mode="eval")
    with pytest.raises(InputError, match=r"step is a function step\(model, batch\). Got int"):
        ng.Objective.from_step(nn.Linear(3, 2), 3, torch.ones(2, 3), mode="eval")


def test_an_error_of_the_loss_is_not_blamed_on_the_model():
    data = (torch.ones(2, 3), torch.ones(2, 2))
    with pytest.raises(AttributeError) as caught:
        ng.Objective(nn.Linear(3, 2), lambda output, target: output.nothing, data, mode="eval").loss()
    assert "outside the model, in the loss" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError) as caught:
        ng.Objective(nn.Linear(4, 2), F.mse_loss, data, mode="eval").loss()
    assert "inside the model (layer 'Linear'" in caught.value.__notes__[0]


def test_nan_in_a_loader_is_said_to_be_nan():
    inputs = torch.ones(4, 3)
    inputs[0, 0] = torch.nan
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, torch.ones(4, 2)), batch_size=4)
    objective = ng.Objective(nn.Linear(3, 2), F.mse_loss, loader, mode="eval")
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="nan in batch 0"):
            objective.loss()
    assert objective.outputs().isnan().any() and objective.outputs().isnan().any()  # no "another batch" either
