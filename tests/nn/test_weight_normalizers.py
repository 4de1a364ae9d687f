import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrize

import normgauge as ng
from normgauge.nn import functional as maps
from normgauge.nn import parametrizations, registry
from reference.weight_normalizers import (
    centered_weight_norm_backward,
    loop,
    spectral_norm_backward,
    unit_sphere_backward,
    vector_jacobian,
    weight_standardization_backward,
)

SHAPES = [(3, 4), (2, 3, 2, 2), (4, 2, 3)]
FORMS = {
    "weight_norm": ({"g": torch.tensor([1.5, -0.5, 2.0, 0.3], dtype=torch.float64)}, maps.weight_norm_backward),
    "centered_weight_norm": ({}, centered_weight_norm_backward),
    "weight_standardization": ({"eps": 0.01}, weight_standardization_backward),
    "unit_sphere": ({"radius": 2.5}, unit_sphere_backward),
    "spectral_norm": ({}, spectral_norm_backward),
}


def options_for(name, shape):
    return {key: value[: shape[0]] if key == "g" else value for key, value in FORMS[name][0].items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMS)
def test_closed_forms_against_loop_differences_and_autograd(name, shape):
    forward, options = getattr(maps, name), options_for(name, shape)
    v, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    if name == "spectral_norm":
        torch.testing.assert_close(forward(v) * torch.linalg.svdvals(v.detach().flatten(1))[0], v)
    else:
        torch.testing.assert_close(forward(v, **options), loop(name, v.detach(), **options))
    result = FORMS[name][1](grad, v.detach(), **options)
    by_v = result[0] if name == "weight_norm" else result
    torch.testing.assert_close(by_v, torch.autograd.grad(forward(v, **options), v, grad)[0])
    slow = vector_jacobian(lambda x: forward(x, **options), v.detach(), grad)
    torch.testing.assert_close(by_v, slow, atol=1e-7, rtol=1e-6)
    if name == "weight_norm":
        g = options["g"].clone().requires_grad_()
        torch.testing.assert_close(result[1], torch.autograd.grad(forward(v.detach(), g), g, grad)[0])


@pytest.mark.parametrize("name", FORMS)
def test_first_and_second_derivatives(name):
    shape = (3, 4)
    options = options_for(name, shape)
    v = torch.randn(shape, requires_grad=True)
    forward, backward = getattr(maps, name), FORMS[name][1]
    assert gradcheck(lambda x: forward(x, **options), (v,))
    assert gradgradcheck(lambda x: forward(x, **options), (v,))
    grad = torch.randn(shape, requires_grad=True)

    def by_v(incoming, x):
        result = backward(incoming, x, **options)
        return result[0] if isinstance(result, tuple) else result

    assert gradcheck(by_v, (grad, v))  # the closed form can be differentiated again, as a second derivative needs


def test_against_torch_weight_norm_and_spectral_norm():
    v, g = torch.randn(4, 3, 2), torch.rand(4)
    torch.testing.assert_close(maps.weight_norm(v, g), torch._weight_norm(v, g.reshape(4, 1, 1), 0))
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4), n_power_iterations=200)
    raw = layer.parametrizations.weight.original.detach()
    torch.testing.assert_close(maps.spectral_norm(raw), layer.weight.detach(), atol=1e-8, rtol=1e-6)


def test_papers_invariance_of_weight_norm_is_false_and_the_true_one_holds():
    v, g = torch.randn(3, 5), torch.rand(3) + 0.5
    w = maps.weight_norm(v, g)
    torch.testing.assert_close(maps.weight_norm(2.5 * v, g), w)
    torch.testing.assert_close(maps.weight_norm(2.5 * v, g / 2.5), w / 2.5)


def test_papers_diagonal_chain_rule_is_false():
    v, g, grad = torch.randn(1, 4), torch.ones(1), torch.randn(1, 4)
    jacobian = torch.autograd.functional.jacobian(lambda x: maps.weight_norm(x, g), v).reshape(4, 4)
    true = maps.weight_norm_backward(grad, v, g)[0]
    torch.testing.assert_close(true, grad @ jacobian)
    diagonal = grad * jacobian.diagonal()
    assert float((diagonal - true).norm() / true.norm()) > 0.1


LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "conv": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (4, 5, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 5, 4, stride=2), (3, 9)),
}
WEIGHTS = [registry.get(name) for name in registry.names() if registry.get(name).placement == "weights"]
NAMES = [one.name for one in WEIGHTS if one.name != "norm_propagation"]


def ready(name, kind):
    build, shape = LAYERS[kind]
    layer = registry.get(name).wrap(build())
    layer(torch.randn(1, *shape))  # spectral learns its size
    return layer.eval(), shape


def raw_of(layer):
    inner = layer.parametrizations.weight
    return inner.original1 if hasattr(inner, "original1") else inner.original


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", NAMES)
def test_assignment_state_dict_and_copies(name, kind):
    layer, shape = ready(name, kind)
    x = torch.randn(2, *shape)
    weight = layer.weight.detach().clone()
    layer.weight = weight  # lies where normalized weights live: comes back
    torch.testing.assert_close(layer.weight, weight, atol=1e-9, rtol=1e-7)
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(x), layer(x))
    other = registry.get(name).wrap(LAYERS[kind][0]()).eval()
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), layer(x))
    layer(x).square().sum().backward()
    assert torch.isfinite(raw_of(layer).grad).all()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", NAMES)
def test_declared_invariances_hold(name, kind):
    layer, _ = ready(name, kind)
    parametrization = layer.parametrizations.weight[0]
    before = layer.weight.detach().clone()
    raw = raw_of(layer)
    for law in registry.get(name).invariances:
        kept = raw.detach().clone()
        with torch.no_grad():
            if law.per == "tensor":
                raw.mul_(3.0)
            elif law.per == "column":
                raw.mul_(torch.rand_like(parametrization._lengths(raw)) + 0.5)
            else:
                rows = parametrization.rows(raw.detach())
                change = torch.rand(rows.shape[0], 1) + 0.5
                moved = rows * change if law.kind == "scale" else rows + change
                raw.copy_(parametrization.unrows(moved, raw))
        tolerance = 1e-10 if law.exact else 1e-6
        torch.testing.assert_close(layer.weight.detach(), before, atol=tolerance, rtol=tolerance)
        with torch.no_grad():
            raw.copy_(kept)


@pytest.mark.parametrize("kind", LAYERS)
def test_columns_and_whole_weights_live_on_the_stated_sphere(kind):
    columns = ready("unit_columns", kind)[0].weight
    lengths = (columns if kind == "transposed" else columns.transpose(0, 1)).flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
    plain = LAYERS[kind][0]()
    before = plain.weight.detach().clone()
    whole = registry.get("hyperball").wrap(plain)
    torch.testing.assert_close(whole.weight, before)
    with torch.no_grad():
        raw_of(whole).mul_(7.0).add_(0.1)
    torch.testing.assert_close(whole.weight.norm(), before.norm())


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("spectral", "unit_columns", "hyperball")])
def test_rows_live_on_the_stated_sphere(name, kind):
    layer, _ = ready(name, kind)
    inner = layer.parametrizations.weight
    rows = inner[0].rows(layer.weight)
    assert rows.shape[0] == (layer.out_features if kind == "linear" else layer.out_channels)
    if inner[0].centered:
        torch.testing.assert_close(rows.sum(1), torch.zeros(rows.shape[0]), atol=1e-9, rtol=0)
    stated = {"centered_weight": 1.0, "unit_sphere": 1.0, "weight_standardization": math.sqrt(rows.shape[1])}
    stated["scaled_weight_standardization"] = parametrizations.RELU_GAIN
    radius = inner.original0.abs() if name == "weight" else torch.full((rows.shape[0],), stated[name])
    torch.testing.assert_close(rows.norm(dim=1), radius, rtol=1e-6, atol=0)


def test_scaled_weight_standardization_holds_its_rows_in_training():
    """Mean 0 and length gamma |g| at every step; the variance of the activations is gamma^2 at first, and not held."""
    torch.manual_seed(0)
    net = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(128, 128, bias=False), nn.ReLU())])
    for part in net[::2]:
        ng.nn.scaled_weight_standardization(part).parametrizations.weight.original0.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x, y, one = torch.randn(128, 128), torch.randint(10, (128,)), parametrizations.RELU_GAIN
    variances = []
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        variances.append(float(net[:-1](x).detach().var()))
        for part in net[::2]:
            torch.testing.assert_close(part.weight.norm(dim=1), torch.full((128,), one), rtol=1e-6, atol=0)
            torch.testing.assert_close(part.weight.mean(1), torch.zeros(128), rtol=0, atol=1e-12)
    assert 0.7 * one**2 < variances[0] < 2 * one**2 < variances[-1]


def test_rows_of_a_transposed_layer_are_its_output_channels():
    layer = nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False)
    scale = torch.rand(6) + 0.5
    part = parametrizations.WeightNorm(layer)
    x = torch.randn(1, 4, 5, 5)
    expected = layer(x) * scale.reshape(1, 6, 1, 1)
    layer.weight.data = part.unrows(part.rows(layer.weight.data) * scale[:, None], layer.weight.data)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("wrap", [ng.nn.centered_weight_norm, ng.nn.weight_standardization])
def test_row_gain_keeps_centred_weights(wrap):
    layer = nn.Linear(6, 4)
    centred = layer.weight.detach() - layer.weight.detach().mean(1, keepdim=True)
    wrap(layer, gain="row")
    torch.testing.assert_close(layer.weight.detach(), centred, rtol=1e-6, atol=1e-9)
    assert layer.parametrizations.weight.original0.requires_grad


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 5), entries=st.integers(3, 9), seed=st.integers(0, 10**6))
def test_gradient_of_a_scale_invariant_row_is_orthogonal_to_it(rows, entries, seed):
    generator = torch.Generator().manual_seed(seed)
    v, grad = (torch.randn(rows, entries, generator=generator, dtype=torch.float64) for _ in range(2))
    for name in ("centered_weight_norm", "unit_sphere"):
        back = FORMS[name][1](grad, v)
        torch.testing.assert_close((back * v).sum(1), torch.zeros(rows, dtype=torch.float64), atol=1e-8, rtol=0)
    back = weight_standardization_backward(grad, v, eps=0.0)
    torch.testing.assert_close((back * v).sum(1), torch.zeros(rows, dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(back.sum(1), torch.zeros(rows, dtype=torch.float64), atol=1e-8, rtol=0)


@pytest.mark.parametrize("kind", LAYERS)
def test_spectral_norm_divides_by_the_operator_norm(kind):
    build, shape = LAYERS[kind]
    layer = ng.nn.spectral_norm(build())
    for _ in range(150):
        layer(torch.randn(1, *shape))
    bracket = ng.operator_norm(layer.eval(), shape)
    assert bracket.lower == pytest.approx(1.0, abs=1e-3)


def test_torch_spectral_norm_leaves_a_convolution_above_one():
    theirs = torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, padding=1), n_power_iterations=50)
    ours = ng.nn.spectral_norm(nn.Conv2d(8, 8, 3, padding=1), input_shape=(12, 12))
    for _ in range(50):
        ours(torch.randn(1, 8, 12, 12))
    assert ng.operator_norm(theirs.eval(), (8, 12, 12)).lower > 1.2
    assert ng.operator_norm(ours.eval(), (8, 12, 12)).lower < 1.001


def test_spectral_norm_gradient_matches_differences_at_convergence():
    layer = ng.nn.spectral_norm(nn.Conv1d(2, 3, 3, padding=1), input_shape=(6,), steps=500).double()
    layer(torch.randn(1, 2, 6))
    layer.eval()
    raw, grad = layer.parametrizations.weight.original, torch.randn(3, 2, 3)
    (layer.weight * grad).sum().backward()

    def normalized(weight):
        from normgauge.linalg import Convolution

        matrix = Convolution(weight, (6,), padding=((1, 1),)).matmat(torch.eye(12))
        return weight / torch.linalg.matrix_norm(matrix, 2)

    slow = vector_jacobian(normalized, raw.detach(), grad)
    torch.testing.assert_close(raw.grad, slow, atol=1e-5, rtol=1e-4)


def test_spectral_norm_learns_the_largest_input():
    layer = ng.nn.spectral_norm(nn.Conv2d(2, 2, 3, padding=1))
    with pytest.raises(ng.NormgaugeError, match="before any forward"):
        _ = layer.weight
    part = layer.parametrizations.weight[0]
    layer(torch.randn(1, 2, 5, 5))
    layer(torch.randn(1, 2, 4, 7))
    assert part.right.shape == (1, 2, 5, 7)
    layer(torch.randn(2, 3, 3))  # smaller, unbatched: nothing to learn
    assert part.right.shape == (1, 2, 5, 7)
    frozen = part.right.clone()
    layer.eval()(torch.randn(1, 2, 5, 7))
    assert torch.equal(frozen, part.right)


def test_weights_work_under_torch_func():
    layer = ng.nn.weight_standardization(nn.Linear(4, 3))
    x = torch.randn(5, 4)
    parameters = dict(layer.named_parameters())

    def loss(values):
        return torch.func.functional_call(layer, values, (x,)).square().mean()

    gradient = torch.func.grad(loss)(parameters)
    tangent = {name: torch.randn_like(value) for name, value in parameters.items()}
    _, slope = torch.func.jvp(loss, (parameters,), (tangent,))
    expected = sum((gradient[name] * tangent[name]).sum() for name in parameters)
    torch.testing.assert_close(slope, expected)


def test_errors_of_wrapping():
    with pytest.raises(ng.NormgaugeError, match="Wrap each Linear or Conv"):
        ng.nn.weight_norm(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ng.NormgaugeError, match="parametrized already"):
        ng.nn.unit_sphere(ng.nn.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(ng.NormgaugeError, match="parametrized already"):
        ng.nn.spectral_norm(ng.nn.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(ng.NormgaugeError, match="at least two entries"):
        ng.nn.weight_standardization(nn.Conv2d(4, 4, 1, groups=4))
    with pytest.raises(ng.NormgaugeError, match="Did you mean 'spectral'"):
        registry.get("spectal").wrap(nn.Linear(2, 2))
    with pytest.raises(ng.NormgaugeError, match="radius must be positive"):
        ng.nn.unit_sphere(nn.Linear(2, 2), radius=0.0)
    with pytest.raises(ng.NormgaugeError, match="gain is 'none' or 'row'"):
        ng.nn.weight_standardization(nn.Linear(2, 2), gain="tensor")
    dead = nn.Linear(2, 2)
    dead.weight.data[1] = 0.0
    with pytest.raises(ng.NormgaugeError, match="Got row 1"):
        ng.nn.weight_norm(dead)
    assert not parametrize.is_parametrized(dead)
