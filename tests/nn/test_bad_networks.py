"""Networks with a prescribed constant or gradient: exact in float64, and harmless once normalized."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import normgauge as ng
from normgauge.errors import InputError, UnknownNameError
from reference.bad_networks import cascade_output, slope_by_differences

WIDTHS = ([3, 4], [2, 5, 3], [6, 4, 4, 5], [4, 1, 3], [3] * 9)


def jacobian_norm(net, x):
    return float(torch.linalg.matrix_norm(torch.func.jacrev(lambda v: net(v[None])[0])(x).detach(), 2))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(WIDTHS), st.integers(0, 10_000), st.floats(1e-6, 9.0))
def test_the_cascade_is_the_loop(widths, seed, top):
    source = torch.Generator().manual_seed(seed)
    sizes = (top * torch.rand(len(widths) - 1, generator=source)).tolist()
    x = torch.randn(widths[0], generator=source)
    torch.testing.assert_close(ng.nn.cascade(widths, sizes)(x), cascade_output(widths, sizes, x))


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("slope", [0.0, 1e-30, 0.3, 1.0, 7e9, 1e150])
def test_the_lipschitz_constant_is_the_prescribed_one(widths, slope):
    """Theorem 6: the Jacobian attains it, the product of the norms bounds it."""
    net = ng.nn.network_with_slope(slope, widths)
    x = torch.rand(widths[0], generator=torch.Generator().manual_seed(1)) + 0.1
    assert jacobian_norm(net, x) == pytest.approx(slope, rel=1e-13, abs=0)
    norms = [float(torch.linalg.matrix_norm(m.weight.detach(), 2)) for m in net if isinstance(m, torch.nn.Linear)]
    assert math.prod(norms) == pytest.approx(slope, rel=1e-12, abs=0)
    y = torch.randn(50, widths[0], generator=torch.Generator().manual_seed(2))
    moved = (net(y[1:]) - net(y[:-1])).norm(dim=1) / (y[1:] - y[:-1]).norm(dim=1)
    assert float(moved.detach().max()) <= slope * (1 + 1e-12)


def test_the_jacobian_agrees_with_differences():
    net = ng.nn.network_with_slope(40.0, [3, 5, 4])
    x = torch.tensor([0.4, 0.9, 0.2])
    assert jacobian_norm(net, x) == pytest.approx(slope_by_differences(net, x, 1e-6), rel=1e-8)


@pytest.mark.parametrize("widths", [[5, 4, 2, 3], [3, 6, 6, 6], [4, 3, 5, 2, 4]], ids=str)
def test_the_constant_in_the_weights_is_that_of_theorem_13(widths):
    """a_{i+1} ... a_K |h_{i-1}(x)|, with all of h_{i-1}: not truncated as printed."""
    sizes = [1.0, *(0.5 + k for k in range(len(widths) - 2))]
    net = ng.nn.cascade(widths, sizes)
    x = torch.rand(widths[0], generator=torch.Generator().manual_seed(0)) + 0.1
    first = torch.ones(widths[1], 1) * x  # all units of layer 1 are active

    def output(flat):
        return net[1:](flat.reshape(first.shape) @ x)

    slope = torch.linalg.matrix_norm(torch.func.jacrev(output)(first.flatten()).detach(), 2)
    assert float(slope) == pytest.approx(math.prod(sizes) * float(x.norm()), rel=1e-12)


@pytest.mark.parametrize("size", [1e-12, 0.5, 1e12])
@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("kind", ["mse", "logistic"])
def test_the_gradient_is_the_prescribed_one_and_the_loss_is_not_changed(size, layer, kind):
    source = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(20, 4, generator=source), torch.rand(20, generator=source).round()
    loss = torch.nn.functional.mse_loss
    if kind == "logistic":
        loss = torch.nn.functional.binary_cross_entropy_with_logits
    net = ng.nn.network_with_gradient(size, [4, 3, 5, 4, 3], (inputs, targets), loss, layer=layer)
    value = loss(net(inputs), targets)
    (gradient,) = torch.autograd.grad(value, net[2 * (layer - 1)].weight)
    assert float(gradient.norm()) == pytest.approx(size, rel=1e-10)
    again = ng.nn.network_with_gradient(2.0, [4, 3, 5, 4, 3], (inputs, targets), loss, layer=layer)
    assert float(value) == pytest.approx(float(loss(again(inputs), targets)), rel=1e-10)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_with_normalization_the_same_weights_are_harmless(norm):
    """The sizes cancel: the slope at the data is that of unit sizes, for 10^24 as for 1, up to eps."""
    data = 3 * torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).abs() + torch.arange(4.0)
    slopes = {}
    for size in (1e2, 1e4, 1e6):
        net = ng.nn.cascade([4, 5, 5, 4], [size] * 3, norm=norm)
        for module in net:
            if hasattr(module, "momentum"):
                module.momentum = 1.0
        with torch.no_grad():
            net.train()(data)
        net.eval()
        slopes[size] = max(jacobian_norm(net, x) for x in data[:8])
        plain = ng.nn.cascade([4, 5, 5, 4], [size] * 3)
        assert jacobian_norm(plain, data[0]) == pytest.approx(size**3, rel=1e-12)
    assert slopes[1e4] == pytest.approx(slopes[1e6], rel=1e-2)
    assert max(slopes.values()) < 50


def test_normalized_gradients_do_not_explode():
    """The gradient in W_1 is that of sizes 1 times a_2 ... a_K without, and the same for all sizes with batch norm."""
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(5)) + torch.arange(4.0)
    plain, normed = {}, {}
    for size in (1e2, 1e4):
        for norm, found in (("none", plain), ("batch", normed)):
            net = ng.nn.cascade([4, 4, 4, 4], [1.0, size, size], norm=norm).train()
            out = net(inputs)
            (gradient,) = torch.autograd.grad((out + 1 + out.detach().max() * torch.arange(4.0)).norm(), net[0].weight)
            found[size] = float(gradient.norm())
    assert plain[1e4] == pytest.approx(plain[1e2] * 1e4, rel=1e-2)
    assert normed[1e4] == pytest.approx(normed[1e2], rel=1e-3)
    assert normed[1e4] < 100 < plain[1e2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ng.nn.cascade([3], []), "width of its input"),
        (lambda: ng.nn.cascade([3, 2], [1.0, 2.0]), "one per layer"),
        (lambda: ng.nn.cascade([3, 2], [-1.0]), "numbers >= 0"),
        (lambda: ng.nn.network_with_slope(float("inf"), [3, 2]), "slope must be a finite number"),
        (
            lambda: ng.nn.network_with_gradient(
                1.0, [2, 2], (torch.ones(1, 2), torch.ones(1)), torch.nn.functional.mse_loss
            ),
            "below the last layer",
        ),
        (
            lambda: ng.nn.network_with_gradient(
                1.0, [2, 2, 2], (-torch.ones(1, 2), torch.ones(1)), torch.nn.functional.mse_loss
            ),
            "must have a slope",
        ),
    ],
)
def test_what_makes_no_network_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_an_unknown_normalizer_is_named():
    with pytest.raises(UnknownNameError, match="layer"):
        ng.nn.cascade([3, 2], [1.0], norm="layr")


@pytest.mark.parametrize("slope", [1e60, 1e-60])
def test_what_the_dtype_cannot_hold_is_refused(slope):
    with pytest.raises(InputError, match="torch.float32 holds numbers"):
        ng.nn.network_with_slope(slope, [3] * 5, dtype=torch.float32)
    wide = ng.nn.network_with_slope(slope, [3] * 5, dtype=torch.float64)
    assert float(wide(torch.ones(3, dtype=torch.float64))[0].detach()) == pytest.approx(slope)
    with pytest.raises(InputError, match="holds numbers"):
        ng.nn.network_with_slope(1e200, [3, 3], norm="batch")
