"""Lipschitz brackets of networks: sound on every supported kind, tight where exact, loud where not understood."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import normgauge as ng
from normgauge.errors import DataError, InputError, ModelError
from normgauge.theory import lipschitz_constants
from reference.lipschitz import KINDS, Gated, PlainAttention, Residual, random_net, slope_at, steepest_near


def typical_length(data):
    return float(data.flatten(1).norm(dim=1).mean())


def check_sound(kind, seed):
    net, data = random_net(kind, seed)
    generator = torch.Generator().manual_seed(seed)
    radius = typical_length(data) * 10 ** float(-3 * torch.rand((), generator=generator))
    ball = ng.lipschitz(net, data, radius=radius, climbs=1)
    free = ng.lipschitz(net, data, climbs=1)
    measured = max(slope_at(net, x) for x in data)
    assert measured <= ball.at_data * (1 + 1e-9)
    assert max(ball.lower, steepest_near(net, data, radius, generator, draws=1)) <= ball.upper
    assert max(free.lower, ball.lower) <= free.upper
    assert ball.at_data <= ball.upper <= free.upper
    assert free.at_data == pytest.approx(ball.at_data, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_upper_is_never_below_what_is_measured(kind, seed):
    check_sound(kind, seed)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(100, 115))
@pytest.mark.parametrize("kind", KINDS)
def test_upper_is_never_below_what_is_measured_on_200_nets(kind, seed):
    check_sound(kind, seed)


EXACT = {  # one layer whose constant the rule must find exactly, at the data
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "linear chain": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout(), nn.Linear(6, 6), nn.Linear(6, 3)), (5,)),
    "linear and BN": (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 6), nn.BatchNorm1d(6)), (5,)),
    "convolution and BN": (
        lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)),
        (2, 4, 4),
    ),
    "transposed convolution": (lambda: nn.ConvTranspose1d(2, 3, 3, 2), (2, 4)),
    "average pool": (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (2, 6, 5)),
    "adaptive average": (lambda: nn.AdaptiveAvgPool2d((2, 3)), (2, 5, 7)),
    "global average": (lambda: nn.AdaptiveAvgPool1d(1), (2, 5)),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 3, 4)),
    "layer norm": (lambda: nn.LayerNorm(6, elementwise_affine=False), (6,)),
    "group norm": (lambda: nn.GroupNorm(2, 8, affine=False), (8,)),
    "rms norm": (lambda: nn.RMSNorm(6, eps=1e-5), (6,)),
    "instance norm": (lambda: nn.InstanceNorm1d(3), (3, 5)),
    "whitening": (lambda: ng.nn.WhiteningNorm(6, groups=2), (6,)),
}


@pytest.mark.parametrize("name", EXACT)
def test_single_layers_are_exact_at_the_data(name):
    build, shape = EXACT[name]
    torch.manual_seed(3)
    layer = build().eval()
    for part in layer.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(part.running_var, 0.1, 3.0)
            nn.init.normal_(part.weight)
    data = 2 * torch.randn(3, *shape)
    bracket = ng.lipschitz(layer, data, climbs=0)
    truth = max(slope_at(layer, x) for x in data)
    assert bracket.at_data == pytest.approx(truth, rel=1e-6)
    assert bracket.lower == pytest.approx(truth, rel=1e-4)


def test_linear_network_bracket_is_tight():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(10)))
    bracket = ng.lipschitz(net, torch.randn(2, 6), climbs=0)
    product = torch.eye(6)
    for layer in net:
        product = layer.weight.detach() @ product
    truth = float(torch.linalg.matrix_norm(product, 2))
    assert bracket.lower == pytest.approx(truth, rel=1e-8) and bracket.upper == pytest.approx(truth, rel=1e-8)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_max_pool_constant_bounds_random_pairs(kernel, stride, dilation):
    pool = nn.MaxPool1d(kernel, stride, dilation=dilation)
    generator = torch.Generator().manual_seed(kernel + 10 * stride + 100 * dilation)
    x, y = torch.randn(2, 64, 1, 20, generator=generator)
    spike = x + 5 * torch.nn.functional.one_hot(torch.arange(64) % 20, 20).unsqueeze(1)
    for a, b in ((x, y), (x, spike)):
        ratio = (pool(a) - pool(b)).flatten(1).norm(dim=1) / (a - b).flatten(1).norm(dim=1)
        assert float(ratio.max()) <= lipschitz_constants.max_pool_constant(kernel, stride, dilation) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("function", "constant"),
    [
        (nn.GELU(), lipschitz_constants.GELU),
        (nn.GELU("tanh"), lipschitz_constants.GELU_TANH),
        (nn.SiLU(), lipschitz_constants.SILU),
        (nn.Mish(), lipschitz_constants.MISH),
        (nn.SELU(), lipschitz_constants.SELU),
        (nn.Hardswish(), lipschitz_constants.HARD_SWISH),
        (nn.Hardsigmoid(), lipschitz_constants.HARD_SIGMOID),
        (nn.Sigmoid(), lipschitz_constants.SIGMOID),
        (torch.erf, lipschitz_constants.ERF),
    ],
)
def test_activation_constants_are_rounded_up_and_tight(function, constant):
    x = torch.linspace(-12, 12, 400_001, requires_grad=True)
    (slope,) = torch.autograd.grad(function(x).sum(), x)
    assert constant * (1 - 1e-5) <= float(slope.abs().max()) <= constant


def test_folding_batch_norm_is_tighter_than_the_product():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)).eval()
    nn.init.uniform_(net[1].running_var, 0.05, 4.0)
    folded = ng.lipschitz(net, torch.randn(1, 3, 6, 6), climbs=0).upper
    scale = float((net[1].running_var + net[1].eps).rsqrt().max())
    assert folded < 0.9 * scale * ng.operator_norm(net[0], (3, 6, 6)).upper


def scaled_weights(net, factor):
    other = copy.deepcopy(net)
    with torch.no_grad():
        for part in other.modules():
            if isinstance(part, (nn.Conv2d, nn.Linear)) and part.bias is None:
                part.weight.mul_(factor)
    return other


def test_rescaling_scale_invariant_weights_does_not_move_the_bracket():
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.GroupNorm(2, 4, eps=1e-12), nn.ReLU(), nn.Flatten(),
        nn.Linear(36, 5, bias=False), nn.LayerNorm(5, eps=1e-12), nn.Tanh(), nn.Linear(5, 3),
    ).eval()  # fmt: skip
    data = torch.randn(3, 2, 5, 5)
    before, after = (ng.lipschitz(m, data, radius=0.05, climbs=2) for m in (net, scaled_weights(net, 37.0)))
    assert after.log10_upper == pytest.approx(before.log10_upper, abs=1e-6)
    assert after.log10_at_data == pytest.approx(before.log10_at_data, abs=1e-6)
    assert after.log10_lower == pytest.approx(before.log10_lower, abs=1e-6)
    # with eps the function itself is not invariant far from the data: its global constant does move
    assert after.log10_global == pytest.approx(before.log10_global + 2 * math.log10(37.0), abs=1e-6)


def test_rescaling_raw_weights_of_weight_normalizers_moves_nothing():
    torch.manual_seed(2)
    net = nn.Sequential(ng.nn.weight_norm(nn.Linear(4, 6)), nn.ReLU(), ng.nn.unit_sphere(nn.Linear(6, 3)))
    data = torch.randn(3, 4)
    before = ng.lipschitz(net, data, climbs=2)
    with torch.no_grad():
        net[0].parametrizations.weight.original1.mul_(9.0)
        net[2].parametrizations.weight.original.mul_(0.2)
    after = ng.lipschitz(net, data, climbs=2)
    assert (after.log10_lower, after.log10_upper) == pytest.approx((before.log10_lower, before.log10_upper), abs=1e-9)


def test_rescaling_before_batch_norm_with_its_statistics_moves_nothing():
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4, eps=1e-12), nn.ReLU(), nn.Flatten()).eval()
    net[1].running_var.uniform_(0.5, 2.0)
    other = scaled_weights(net, 11.0)
    other[1].running_var.mul_(121.0), other[1].running_mean.mul_(11.0)
    data = torch.randn(2, 2, 5, 5)
    a, b = ng.lipschitz(net, data, climbs=1), ng.lipschitz(other, data, climbs=1)
    assert (a.log10_lower, a.log10_upper) == pytest.approx((b.log10_lower, b.log10_upper), abs=1e-6)


def test_attention_without_a_normalizer_has_no_global_bound_and_with_one_has():
    torch.manual_seed(0)
    bare = PlainAttention(6, fused=True).eval()
    data = torch.randn(2, 4, 6)
    free = ng.lipschitz(bare, data, climbs=1)
    assert free.upper == math.inf and math.isfinite(free.at_data) and "infinity" in str(free)
    assert math.isfinite(ng.lipschitz(bare, data, radius=0.1, climbs=1).upper)
    assert math.isfinite(ng.lipschitz(nn.Sequential(nn.LayerNorm(6), bare), data, climbs=1).upper)


def test_the_ball_closes_in_on_the_data():
    net, data = random_net("attention by function", 1)
    ball = ng.lipschitz(net, data, radius=1e-10, climbs=0)
    assert ball.upper == pytest.approx(ball.at_data, rel=1e-4)


@pytest.mark.parametrize("depth", [200, pytest.param(1000, marks=pytest.mark.heavy)])
def test_depth_does_not_overflow(depth):
    net = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(2, 2, bias=False), nn.ReLU())))
    with torch.no_grad():
        for layer in net[::2]:
            layer.weight.copy_(torch.eye(2) * 10 ** (1000 / depth))
    bracket = ng.lipschitz(net, -torch.ones(1, 2), climbs=0)
    assert bracket.log10_upper == pytest.approx(1000, abs=1e-3)
    assert bracket.upper == math.inf and "10^1000" in bracket._title()


class Clipped(nn.Module):
    def forward(self, x):
        return torch.cumsum(x, dim=1)


def test_an_unknown_step_is_refused_by_name():
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Clipped()))
    with pytest.raises(
        ModelError,
        match=r"'1.0.cumsum'.*skipped.*cumsum \(lipschitz/test_lipschitz.py:\d+: return torch.cumsum.*none.*register",
    ):
        ng.lipschitz(net, torch.randn(2, 3))


def test_an_unknown_torch_module_is_refused_by_name_and_line():
    net = nn.Sequential(nn.Linear(3, 3), nn.Hardshrink())
    with pytest.raises(ModelError, match=r"lipschitz of '1.hardshrink'.*hardshrink .*, which has none"):
        ng.lipschitz(net, torch.randn(2, 3))


def test_registered_rules_are_used_and_duplicates_refused():
    class Known(nn.Module):
        def forward(self, x):
            return torch.cumsum(x, dim=1)

    ng.register_lipschitz_rule(Known, lambda call: call.input.value.shape[1], normalizer=True)
    bracket = ng.lipschitz(nn.Sequential(Known(), nn.ReLU()), torch.rand(2, 3))
    assert bracket.upper == pytest.approx(3) and 1 < bracket.lower < 3 and bracket.layers[0].normalizer
    with pytest.raises(InputError, match="one rule per target"):
        ng.register_lipschitz_rule(Known, lambda call: 1.0)

    class Three(nn.Module):
        def forward(self, x):
            return torch.cumsum(3 * x, dim=1) * 0 + 3 * x

    ng.register_lipschitz_rule(Three, lambda call: (3.0, 3.0 + call.input.spread, 5.0))
    free, ball = ng.lipschitz(Three(), torch.rand(2, 3)), ng.lipschitz(Three(), torch.rand(2, 3), radius=0.5)
    assert (free.at_data, free.upper) == pytest.approx((3.0, 5.0)) and 3.0 <= ball.upper <= 3.5
    with pytest.raises(InputError, match="a rule is a function, registered for a module type"):
        ng.register_lipschitz_rule(torch.sin, lambda call: 1.0)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "evaluation mode"),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), "evaluation mode"),
    ],
)
def test_training_mode_is_refused(net, words):
    with pytest.raises(ModelError, match=words):
        ng.lipschitz(net.train(), torch.randn(4, 3))


class Mixes(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0, keepdim=True)


class MixesByTranspose(nn.Module):
    def forward(self, x):
        return torch.softmax(x.transpose(0, 1), dim=1).transpose(0, 1)


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else 2 * x


class Detaches(nn.Module):
    def forward(self, x):
        return x * x.detach()


@pytest.mark.parametrize("net", [Mixes(), MixesByTranspose(), Branches(), Detaches()], ids=lambda m: type(m).__name__)
def test_models_that_mix_samples_branch_or_detach_are_refused(net):
    with pytest.raises(ModelError):
        ng.lipschitz(net, torch.randn(3, 3))


def test_a_changed_forward_or_a_hook_is_refused():
    class Twice(nn.ReLU):
        def forward(self, x):
            return torch.cumsum(x, 1)

    with pytest.raises(ModelError, match="cumsum"):
        ng.lipschitz(nn.Sequential(Twice()), torch.randn(2, 3))
    net = nn.Sequential(nn.Linear(3, 3))
    net[0].register_forward_hook(lambda module, inputs, output: 100 * output)
    with pytest.raises(ModelError, match="hook"):
        ng.lipschitz(net, torch.randn(2, 3))


@pytest.mark.parametrize("inputs", [torch.arange(6).reshape(2, 3), torch.randn(3), torch.full((2, 3), math.nan), "x"])
def test_inputs_must_be_a_batch_of_numbers(inputs):
    with pytest.raises(DataError, match="one batch"):
        ng.lipschitz(nn.Linear(3, 3), inputs)


@pytest.mark.parametrize("radius", [0.0, -1.0, math.inf, True])
def test_radius_must_be_positive(radius):
    with pytest.raises(InputError, match="radius"):
        ng.lipschitz(nn.Linear(3, 3), torch.randn(2, 3), radius=radius)


def test_kinks_at_the_data_do_not_fool_the_lower_bound():
    class Zero(nn.Module):  # zero everywhere, but automatic differentiation says 1 at zero
        def forward(self, x):
            return x - torch.relu(x) + torch.relu(-x)

    bracket = ng.lipschitz(Zero(), torch.zeros(1, 3), climbs=0)
    assert bracket.lower < 1e-6


def test_many_outputs_use_power_iterations_and_few_are_exact():
    torch.manual_seed(0)
    for width in (20, 80):
        net = nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, width))
        data = torch.randn(3, 7)
        truth = max(slope_at(net, x) for x in data)
        lower = ng.lipschitz(net, data, climbs=0).lower
        assert truth * 0.98 <= lower <= truth * (1 + 1e-4)


def test_nothing_is_left_behind():
    net = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)), nn.BatchNorm2d(3), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(27, 2),
    )  # fmt: skip
    net.eval()
    net[5].train()
    data = torch.randn(2, 2, 5, 5, requires_grad=True)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    random, flags = torch.get_rng_state(), [module.training for module in net.modules()]
    ng.lipschitz(net, data, radius=0.1, climbs=1)
    with pytest.raises(ModelError):
        ng.lipschitz(nn.Sequential(net, nn.Hardshrink()), data)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert flags == [module.training for module in net.modules()]
    assert data.grad is None and all(p.grad is None and p.requires_grad for p in net.parameters())
    assert net[2].inplace and not any(module._forward_hooks for module in net.modules())


def test_layers_multiply_up_to_the_bound_and_normalizers_are_counted():
    net, data = random_net("normalized mlp", 5)
    bracket = ng.lipschitz(net, data, climbs=0)
    assert sum(layer.log10 for layer in bracket.layers) == pytest.approx(bracket.log10_upper, abs=1e-6)
    frame = bracket.frame()
    assert list(frame[frame.normalizer].kind) == ["BatchNorm1d", "LayerNorm", "RMSNorm"]
    assert frame.share.sum() == pytest.approx(1.0)
    assert bracket.normalizers_log10 == pytest.approx(frame[frame.normalizer].log10.sum())
    assert str(bracket).splitlines()[-1].startswith("kind upper, lower")
    assert bracket.chart().to_dict()["title"]


def test_residual_sum_and_gate_rules_on_known_numbers():
    net = Residual(nn.Linear(3, 3, bias=False))
    nn.init.eye_(net.body.weight)
    assert ng.lipschitz(net, torch.ones(1, 3), climbs=0).upper == pytest.approx(2.0)
    gated = Gated(2)
    data = torch.ones(1, 2, 3, 3)
    assert ng.lipschitz(gated, data, climbs=0).upper == math.inf  # x times something of x grows without end
    assert slope_at(gated, data[0]) <= ng.lipschitz(gated, data, climbs=0).at_data < 3.0


class PackedHeads(nn.Module):
    """Attention as vision transformers write it: the three parts are stacked before the batch, then taken apart."""

    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        samples, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(samples, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))


def test_heads_packed_before_the_batch_are_followed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(6), PackedHeads(6, 2)).eval()
    data = torch.randn(3, 4, 6)
    bracket = ng.lipschitz(net, data, radius=0.05, climbs=1)
    generator = torch.Generator().manual_seed(0)
    assert steepest_near(net, data, 0.05, generator) <= bracket.upper < 100
    assert math.isfinite(bracket.everywhere)


class ByMask(nn.Module):
    def forward(self, x):
        return x * (x > 0)


class ByItem(nn.Module):
    def forward(self, x):
        return x * x.sum(dim=1).sum(dim=0, keepdim=True).item()


class ByData(nn.Module):
    def forward(self, x):
        return x * x.data


class ByClamp(nn.Module):
    def forward(self, x):
        return torch.clamp(x, min=5 * torch.sigmoid(x))


class ByMax(nn.Module):
    def forward(self, x):
        return torch.max(x, torch.ones(3))


class BySharedKeys(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x[:, :1], x[:, :1])


@pytest.mark.parametrize("net", [ByMask(), ByItem(), ByData(), ByClamp(), ByMax()], ids=lambda m: type(m).__name__)
def test_values_that_leave_the_graph_are_refused(net):
    with pytest.raises(ModelError):
        ng.lipschitz(net, torch.randn(1, 3))


def test_keys_shared_by_heads_are_repeated():
    torch.manual_seed(0)
    data = torch.randn(2, 3, 4, 5)
    bracket = ng.lipschitz(BySharedKeys(), data, radius=0.01, climbs=1)
    assert max(slope_at(BySharedKeys(), x) for x in data) <= bracket.upper < 20


def test_the_search_climbs_towards_the_steepest_point_of_the_ball():
    # sum of x^2: the Jacobian at x is 2 x, steepest where the ball is farthest from zero
    class Squares(nn.Module):
        def forward(self, x):
            return x.square().sum(dim=1, keepdim=True)

    x = torch.tensor([[3.0, 4.0, 0.0]])
    bracket = ng.lipschitz(Squares(), x, radius=1.0, climbs=6)
    assert ng.lipschitz(Squares(), x, climbs=0).lower == pytest.approx(10.0, rel=1e-5)
    assert 12.0 * (1 - 1e-4) <= bracket.lower <= 12.0 <= bracket.upper


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class _Own(nn.Module):
    def forward(self, x):
        return x + torch.tanh(_Hidden.apply(x))


class _Mapped(nn.Module):
    def forward(self, x):
        return x + torch.tanh(torch.func.vmap(lambda row: 3 * row)(x))


class _Unpacked(nn.Module):
    def forward(self, x):
        first, second = x.unflatten(1, (2, -1)).transpose(0, 1)
        return first + 2 * second


def test_nothing_depends_on_the_input_unseen():
    with pytest.raises(ModelError, match="vmap"):
        ng.lipschitz(_Mapped(), torch.randn(3, 4))
    assert ng.lipschitz(_Own(), torch.randn(3, 4)).upper == pytest.approx(4.0)
    found = ng.lipschitz(_Unpacked(), torch.randn(3, 4))
    assert found.lower == pytest.approx(5**0.5) and found.upper >= found.lower


@pytest.mark.parametrize("slope", [1e160, 1e-170, 1e300, 1e-300])
@pytest.mark.parametrize("width", [3, 60])
def test_extreme_slopes_are_bracketed_from_both_sides(slope, width):
    net = ng.nn.network_with_slope(slope, [width] * 40, dtype=torch.float64)
    bracket = ng.lipschitz(net, torch.rand(3, width, dtype=torch.float64) + 0.1, climbs=1)
    assert bracket.log10_lower == pytest.approx(math.log10(slope), abs=1e-6)
    assert bracket.log10_upper == pytest.approx(math.log10(slope), abs=1e-6)


@pytest.mark.parametrize("scale", [1e-170, 1e-30, 1e30, 1e170])
def test_extreme_linear_layers_keep_their_norm(scale):
    torch.manual_seed(0)
    for layer, size in ((nn.Linear(4, 3), ()), (nn.Conv2d(2, 3, 3), (5, 5)), (nn.Conv2d(8, 8, 3), (20, 20))):
        layer = layer.double()
        shape = (layer.in_channels, *size) if size else None
        truth = ng.operator_norm(layer, shape).upper
        layer.weight.data *= scale
        bracket = ng.operator_norm(layer, shape)
        assert bracket.lower <= bracket.upper == pytest.approx(scale * truth, rel=1e-9)
    chain = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4))).double()
    for part in chain:
        part.weight.data = scale * torch.eye(3, dtype=torch.float64)
    assert ng.lipschitz(chain, torch.ones(1, 3).double()).log10_upper == pytest.approx(4 * math.log10(scale), abs=1e-6)


def test_a_constant_function_has_no_vacuous_bound():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    found = ng.lipschitz(net, torch.randn(4, 3))
    assert found.upper == found.lower == 0 and not found.vacuous
    assert "constant is 0" in found.meaning() and "vacuous" not in str(found)
