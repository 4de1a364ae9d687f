"""Optimizers: the conformance suite, the twins over options and layouts, torch's conventions, two DDP processes."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from normgauge import Objective, optim, testing
from normgauge.errors import InputError, NormgaugeWarning
from normgauge.optim import _rows, _turns
from reference import optim as twins

MOMENTUM = {"lr": 0.1, "momentum": 0.9}
SPHERICAL = {
    "SphereSGD": (MOMENTUM, "momentum_buffer", torch.optim.SGD),
    "GeodesicSGD": (MOMENTUM, "momentum_buffer", torch.optim.SGD),
    "SphereAdam": ({"lr": 0.03}, None, torch.optim.AdamW),
    "GeodesicAdam": ({"lr": 0.03}, "exp_avg", torch.optim.AdamW),
}
FLAT = {
    "ProjectedSGD": (MOMENTUM, torch.optim.SGD),
    "ProjectedAdam": ({"lr": 0.03}, torch.optim.AdamW),
    "NormalizedSGD": ({"lr": 0.03, "momentum": 0.5}, torch.optim.SGD),
}


def maker(name, options):
    return lambda params, **more: getattr(optim, name)(params, **{**options, **more})


@pytest.mark.heavy
@pytest.mark.parametrize("name", SPHERICAL)
def test_norms_do_not_drift_over_ten_thousand_steps(name):
    report = testing.check_optimizer(maker(name, SPHERICAL[name][0]), steps=10_000)
    assert report.checks[0][0].startswith("norms stay") and report.checks[0][2] < 1e-6


@pytest.mark.parametrize("name", SPHERICAL)
def test_sphere_optimizers_conform(name):
    options, tangent, torch_class = SPHERICAL[name]
    flat = {"weight_decay": 0} if torch_class is torch.optim.AdamW else {}
    report = testing.check_optimizer(
        maker(name, options),
        twin=lambda first: getattr(twins, name)(first, "row", None, **options),
        tangent_state=tangent,
        euclidean=lambda params: torch_class(params, **options, **flat),
        steps=1500,
    )
    assert report.name == name and "equals its twin" in str(report)


@pytest.mark.parametrize("name", FLAT)
def test_other_optimizers_conform(name):
    options, torch_class = FLAT[name]
    flat = {"weight_decay": 0} if torch_class is torch.optim.AdamW else {}
    twin = getattr(twins, name, None)
    testing.check_optimizer(
        maker(name, options),
        spherical=False,
        twin=twin and (lambda first: twin(first, **options)),
        euclidean=lambda params: torch_class(params, **options, **flat),
    )


class Leaky(torch.optim.SGD):
    """Changes the user's gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and not param.grad.is_sparse:
                    param.grad.add_(param.detach(), alpha=0.01)
        return super().step(closure)


class Forgetful(optim.SphereSGD):
    """Loses its momentum when a state is loaded."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.pop("momentum_buffer", None)


def test_the_suite_notices_what_is_wrong():
    def check(kind, rule, **how):
        with pytest.raises(testing.NonconformingError, match=rule):
            testing.check_optimizer(lambda p, **more: kind(p, **{**MOMENTUM, **more}), steps=200, **how)

    check(torch.optim.SGD, "norms stay within")
    check(Leaky, "gradients are never changed", spherical=False)
    check(Forgetful, "state_dict round trip")
    check(optim.SphereSGD, "equals its twin", twin=lambda first: twins.GeodesicSGD(first, "row", None, **MOMENTUM))


cases = st.tuples(
    st.sampled_from(["SphereSGD", "GeodesicSGD"]),
    st.sampled_from([0, 0.5, 0.9]),
    st.booleans(),
    st.sampled_from([1e-4, 0.01, 0.3]),
    st.sampled_from(["row", "tensor", 2]),
    st.sampled_from([None, 0.5, 20.0]),
    st.sampled_from([None, False]),
    st.integers(0, 10**6),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases)
def test_sphere_sgd_equals_its_twin_over_options(case):
    name, momentum, nesterov, lr, granularity, radius, fused, seed = case
    nesterov = nesterov and momentum > 0
    options = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
    follow(name, (4, 2, 3), options, granularity, radius, seed, fused=fused)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.sampled_from(["SphereAdam", "GeodesicAdam"]),
    st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.5, 0.9)]),
    st.sampled_from(["row", "tensor", 2]),
    st.sampled_from([None, 3.0]),
    st.integers(0, 10**6),
)
def test_sphere_adam_equals_its_twin_over_options(name, betas, granularity, radius, seed):
    follow(name, (4, 5), {"lr": 0.05, "betas": betas}, granularity, radius, seed)


def follow(name, shape, options, granularity, radius, seed, **more):
    source = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(shape, generator=source, dtype=torch.float64)

    first = draw()
    weight = nn.Parameter(first.clone())
    optimizer = getattr(optim, name)([weight], granularity=granularity, radius=radius, **options, **more)
    twin = getattr(twins, name)(first, granularity, radius, **options)
    for _ in range(8):
        grad = draw() + 0.3 * weight.detach()
        weight.grad = grad
        optimizer.step()
        torch.testing.assert_close(weight.detach(), twin.step(grad), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", [*SPHERICAL, "ProjectedSGD", "ProjectedAdam"])
def test_blocks_and_packing_change_no_number(name, monkeypatch):
    """Many small tensors together, one by one, and cut into blocks of two rows."""
    options = SPHERICAL[name][0] if name in SPHERICAL else FLAT[name][0]
    results = []
    for chunk, small, foreach in ((_rows.CHUNK, _rows.SMALL, None), (_rows.CHUNK, _rows.SMALL, False), (12, 0, None)):
        monkeypatch.setattr(_rows, "CHUNK", chunk)
        monkeypatch.setattr(_rows, "SMALL", small)
        source = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(4, 6, generator=source)) for _ in range(3)]
        params.append(nn.Parameter(torch.randn(3, 6, generator=source)))
        optimizer = getattr(optim, name)(params, foreach=foreach, **options)
        for _ in range(4):
            for param in params:
                param.grad = torch.randn(param.shape, generator=source)
            optimizer.step()
        results.append(torch.cat([param.detach().reshape(-1) for param in params]))
    torch.testing.assert_close(results[1], results[0], atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(results[2], results[0], atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("name", SPHERICAL)
def test_columns_are_the_rows_of_the_transposed(name):
    options = SPHERICAL[name][0]
    first = torch.randn(3, 4, 2)
    rows, columns = nn.Parameter(first.transpose(0, 1).contiguous()), nn.Parameter(first.clone())
    by_row = getattr(optim, name)([rows], **options)
    by_column = getattr(optim, name)([columns], granularity="column", **options)
    for _ in range(5):
        columns.grad = torch.randn(3, 4, 2)
        rows.grad = columns.grad.transpose(0, 1).contiguous()
        by_row.step(), by_column.step()
    torch.testing.assert_close(columns.detach().transpose(0, 1), rows.detach(), atol=1e-12, rtol=1e-12)
    assert columns.is_contiguous()
    with pytest.raises(InputError, match="columns need two axes"):
        getattr(optim, name)([nn.Parameter(torch.ones(3))], geometry="sphere", granularity="column")


def test_tangent_gradients_take_the_short_form_and_equal_the_twin():
    """With gradients tangent to rounding two passes are left out; the twin never leaves anything out."""
    first = torch.randn(4, 6)
    weight = nn.Parameter(first.clone())
    optimizer, twin = optim.SphereSGD([weight], **MOMENTUM), twins.SphereSGD(first, "row", None, **MOMENTUM)
    for _ in range(30):
        grad, w = torch.randn(4, 6), weight.detach()
        weight.grad = grad - w * (w * grad).sum(1, keepdim=True) / (w * w).sum(1, keepdim=True)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), twin.step(weight.grad), atol=1e-11, rtol=1e-11)
    buffer = optimizer.state[weight]["momentum_buffer"]
    assert float((buffer * weight.detach()).sum(1).abs().max()) < 1e-13


def test_states_and_parameters_replaced_by_the_user_are_noticed():
    """Blocks are kept between steps: a new tensor in the state or under the parameter must not be missed."""
    first = [torch.randn(3, 4) for _ in range(3)]
    runs = [[nn.Parameter(value.clone()) for value in first] for _ in range(2)]
    optimizers = [
        optim.SphereSGD(params, foreach=kind, **MOMENTUM) for params, kind in zip(runs, (None, False), strict=True)
    ]
    for number in range(6):
        grads = [torch.randn(3, 4) for _ in range(3)]
        for params, optimizer in zip(runs, optimizers, strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            if number == 2:
                params[0].data = params[1].data.clone()
                optimizer.state[params[0]]["radius"] = optimizer.state[params[1]]["radius"].clone()
            if number == 3:
                optimizer.state[params[2]]["momentum_buffer"] = torch.zeros(3, 4)
            if number == 4:
                params[1].grad = None
            optimizer.step()
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), atol=1e-13, rtol=1e-13)
    assert float(optimizers[0].state[runs[0][2]]["momentum_buffer"].norm()) > 0


@pytest.mark.parametrize("name", ["ProjectedSGD", "ProjectedAdam"])
@pytest.mark.parametrize("geometry", [None, "sphere"])
def test_projection_of_zero_weights_is_the_plain_step(name, geometry):
    weight = nn.Parameter(torch.zeros(3, 4))
    optimizer = getattr(optim, name)([weight], lr=0.1, geometry=geometry)
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3, 4), -0.1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("key", ["capturable", "differentiable"])
@pytest.mark.parametrize("name", [*SPHERICAL, *FLAT])
def test_capturable_and_differentiable_are_refused_also_in_groups(name, key):
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(InputError, match=f"{key}=True"):
        getattr(optim, name)([weight], **{key: True})
    with pytest.raises(InputError, match=f"{key}=True"):
        getattr(optim, name)([{"params": [weight], key: True}])


@pytest.mark.parametrize("delta", [1e-9, 0.1, 10.0])
@pytest.mark.parametrize("name", ["ProjectedSGD", "ProjectedAdam"])
def test_projection_follows_the_rule_row_tensor_or_not_at_all(name, delta):
    """Gradients orthogonal to rows, to the tensor only, or to nothing: the twin decides with plain ifs."""
    options = {"lr": 0.1, "weight_decay": 0.3, "delta": delta}
    first = torch.randn(4, 6)
    weight = nn.Parameter(first.clone())
    optimizer, twin = getattr(optim, name)([weight], **options), getattr(twins, name)(first, **options)
    for number in range(12):
        grad, w = torch.randn(4, 6), weight.detach()
        if number % 3 == 0:
            grad = grad - w * (w * grad).sum(1, keepdim=True) / (w * w).sum(1, keepdim=True)
        elif number % 3 == 1:
            grad = grad - w * (w * grad).sum() / (w * w).sum()
        weight.grad = grad
        optimizer.step()
        torch.testing.assert_close(weight.detach(), twin.step(grad), atol=1e-11, rtol=1e-11)


def test_default_geometry_is_rows_for_matrices_and_flat_for_vectors():
    layer = nn.Linear(4, 3)
    optimizer = optim.SphereSGD(layer.named_parameters(), lr=0.5)
    before = layer.weight.detach().norm(dim=1)
    layer(torch.randn(8, 4)).square().sum().backward()
    plain = layer.bias.detach() - 0.5 * layer.bias.grad
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach().norm(dim=1), before)
    assert torch.equal(layer.bias.detach(), plain)


def test_groups_override_everything_and_live_in_the_state_dict():
    a, b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
    groups = [{"params": [a], "granularity": "tensor", "radius": 2.0}, {"params": [b], "geometry": "euclidean"}]
    optimizer = optim.SphereSGD(groups, lr=0.1, momentum=0.9)
    for param in (a, b):
        param.grad = torch.randn(3, 4)
    optimizer.step()
    assert float(a.detach().norm()) == pytest.approx(2.0, rel=1e-12)
    saved = optimizer.state_dict()["param_groups"]
    assert saved[0]["granularity"] == "tensor" and saved[1]["geometry"] == "euclidean"
    assert set(optimizer.defaults) <= set(saved[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_norm_to_its_own_rounding(dtype):
    weight = nn.Parameter(torch.randn(4, 64).to(dtype))
    optimizer = optim.SphereSGD([weight], lr=0.05, momentum=0.9)
    radius = None
    for _ in range(200):
        weight.grad = torch.randn(4, 64).to(dtype)
        optimizer.step()
        radius = optimizer.state[weight]["radius"].double() if radius is None else radius
    assert weight.dtype == dtype
    assert float((weight.detach().double().norm(dim=1) / radius - 1).abs().max()) < 2 * torch.finfo(dtype).eps


def test_weight_decay_on_spheres_warns_once_and_does_nothing():
    first = torch.randn(3, 4)
    plain, decayed, bias = nn.Parameter(first.clone()), nn.Parameter(first.clone()), nn.Parameter(torch.ones(3))
    with pytest.warns(NormgaugeWarning, match="on a sphere the norm is fixed") as caught:
        ours = optim.SphereSGD(
            [{"params": [decayed, bias]}, {"params": [nn.Parameter(torch.ones(2, 2))]}], lr=0.1, weight_decay=0.5
        )
    assert len(caught) == 1
    other = optim.SphereSGD([plain], lr=0.1)
    grad = torch.randn(3, 4)
    plain.grad, decayed.grad, bias.grad = grad, grad.clone(), torch.zeros(3)
    ours.step(), other.step()
    assert torch.equal(plain, decayed)
    torch.testing.assert_close(bias.detach(), torch.full((3,), 0.95))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.ProjectedSGD([decayed], lr=0.1, weight_decay=0.5)
        optim.SphereSGD([bias], lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "must be finite and not negative"),
        ({"lr": torch.ones(2)}, "a tensor lr has one element"),
        ({"momentum": -0.1}, "momentum"),
        ({"nesterov": True}, "Nesterov momentum needs"),
        ({"geometry": "torus"}, "geometry is None or one of sphere, euclidean"),
        ({"granularity": 3}, "divides into blocks"),
        ({"radius": 0.0}, "a radius is positive"),
        ({"fused": True, "foreach": True}, "exclude each other"),
    ],
)
def test_bad_options_are_refused_in_words(options, message):
    with pytest.raises(InputError, match=message):
        optim.SphereSGD([nn.Parameter(torch.ones(4, 2))], **options)


def test_zero_rows_sparse_and_complex_are_refused():
    zero = nn.Parameter(torch.zeros(2, 3))
    zero.grad = torch.ones(2, 3)
    with pytest.raises(InputError, match="2 zero rows in a parameter"):
        optim.SphereSGD([zero]).step()
    zero.grad = torch.eye(2, 3).to_sparse()
    with pytest.raises(InputError, match="gradients must be dense"):
        optim.ProjectedAdam([zero]).step()
    odd = nn.Parameter(torch.ones(2, 2, dtype=torch.complex128))
    odd.grad = torch.ones_like(odd)
    with pytest.raises(InputError, match="parameters must be real"):
        optim.SphereAdam([odd]).step()
    with pytest.raises(InputError, match="each is in"):
        optim.SphereAdam([zero], betas=(1.0, 0.9))
    with pytest.raises(InputError, match="no fused kernel of Adam-G"):
        optim.GeodesicAdam([zero], fused=True)
    with pytest.raises(InputError, match="there is no weight_decay here"):
        optim.NormalizedSGD([{"params": [zero], "weight_decay": 0.1}])


def test_fused_is_refused_where_torch_has_no_kernel(monkeypatch):
    monkeypatch.setattr(_turns, "_FUSED_DEVICES", ())
    weight = nn.Parameter(torch.randn(2, 3))
    weight.grad = torch.randn(2, 3)
    with pytest.raises(InputError, match="torch must have a fused sgd kernel"):
        optim.SphereSGD([weight], fused=True).step()
    optim.SphereSGD([weight]).step()


def test_scale_invariant_training_keeps_direction_dynamics_of_sgd_at_frozen_norm():
    """On a scale-invariant loss, SGD renormalized after each step and SphereSGD are the same map."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 5), torch.randn(32, 3)

    def loss(w):
        z = x @ w.T
        z = (z - z.mean(0)) / z.std(0)
        return (z - y).square().mean()

    a = nn.Parameter(torch.randn(3, 5))
    b = a.detach().clone().requires_grad_()
    radius = a.detach().norm(dim=1, keepdim=True)
    optimizer = optim.SphereSGD([a], lr=0.3)
    for _ in range(20):
        optimizer.zero_grad()
        loss(a).backward()
        optimizer.step()
        (slope,) = torch.autograd.grad(loss(b), b)
        moved = b.detach() - 0.3 * slope
        b = (radius * moved / moved.norm(dim=1, keepdim=True)).requires_grad_()
    torch.testing.assert_close(a.detach(), b.detach(), atol=1e-10, rtol=1e-10)


def test_damped_gauss_newton_solves_its_system_and_descends():
    x, y = torch.randn(40, 6), torch.randn(40, 2)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    objective = Objective(model, nn.functional.mse_loss, (x, y), mode="train")
    result = optim.damped_gauss_newton(objective, damping=0.1, tol=1e-10)
    dense = objective.gauss_newton().matmat(torch.eye(objective.dimension)) + 0.1 * torch.eye(objective.dimension)
    exact = torch.linalg.solve(dense, -objective.flatten(objective.gradient()))
    torch.testing.assert_close(objective.flatten(result.step), exact, atol=1e-8, rtol=1e-6)
    assert result.residual < 1e-9
    assert objective.at(result.parameters).loss() < objective.loss()
    with pytest.raises(InputError, match="damping must be positive"):
        optim.damped_gauss_newton(objective, damping=0.0)


@pytest.mark.heavy
def test_two_ddp_processes_stay_bit_identical(tmp_path):
    script = Path(__file__).parents[1] / "reference" / "ddp_spheres.py"
    store = tmp_path / "store"
    ranks = [subprocess.Popen([sys.executable, str(script), str(rank), str(store), str(tmp_path)]) for rank in (0, 1)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    a, b = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert len(a) > 8
