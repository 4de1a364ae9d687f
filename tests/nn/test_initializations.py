import math

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.nn import init


def stack(layers, width, activation):
    parts = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), activation()]
    return nn.Sequential(*parts)


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_he_keeps_the_mean_square_through_twenty_relu_layers():
    x = normal(64, 256)
    ratios = []
    for seed in range(5):
        out = init.he(stack(20, 256, nn.ReLU), seed=seed)(x)
        ratios.append(float(out.detach().square().mean() / x.square().mean()))
    assert 0.5 < math.exp(sum(map(math.log, ratios)) / 5) < 2.0  # a wrong factor of sqrt(2) would be 2^20 away


def test_glorot_variance_and_range():
    layer = init.glorot(nn.Conv2d(24, 48, 3), seed=2)
    bound = math.sqrt(6 / ((24 + 48) * 9))
    weight = layer.weight.detach()
    assert float(weight.abs().max()) <= bound
    assert float(weight.var()) == pytest.approx(bound**2 / 3, rel=0.05)
    assert not layer.bias.any()


@pytest.mark.parametrize(
    "layer, expected",
    [
        (nn.Linear(7, 5), (7, 5)),
        (nn.Conv2d(4, 6, (3, 2), groups=2), (12, 18)),
        (nn.ConvTranspose1d(4, 6, 5, groups=2), (10, 15)),
    ],
)
def test_fans_count_what_one_output_reads_and_one_input_reaches(layer, expected):
    assert init.fans(layer) == expected
    if isinstance(layer, nn.Linear):
        return
    layer = layer.double()
    shape = (1, layer.in_channels, *[11] * len(layer.kernel_size))
    x = torch.zeros(shape, requires_grad=True)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    out = layer(x)
    middle = (0, 0, *[n // 2 for n in out.shape[2:]])
    (grad,) = torch.autograd.grad(out[middle], x)
    assert int(grad.count_nonzero()) == expected[0]


def test_selu_keeps_mean_and_variance():
    out = init.selu(stack(30, 400, nn.SELU), seed=0)(normal(128, 400)).detach()
    assert abs(float(out.mean())) < 0.1 and float(out.var()) == pytest.approx(1.0, abs=0.15)
    with pytest.raises(ng.NormgaugeError, match="must contain SELU"):
        init.selu(nn.Linear(2, 2))


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_orthogonal_linear(shape):
    weight = init.orthogonal(nn.Linear(shape[1], shape[0]), gain=1.5).weight.detach()
    values = torch.linalg.svdvals(weight)
    torch.testing.assert_close(values, torch.full_like(values, 1.5))


def test_delta_orthogonal_is_an_isometry_and_reshaped_orthogonal_is_not():
    layer = init.delta_orthogonal(nn.Conv2d(12, 16, 3, padding=1, bias=False))
    x = normal(2, 12, 8, 8)
    torch.testing.assert_close(layer(x).detach().norm(), x.norm())
    assert ng.operator_norm(layer, (12, 8, 8)).upper == pytest.approx(1.0)
    reshaped = ng.operator_norm(init.orthogonal(nn.Conv2d(12, 16, 3, padding=1)), (12, 8, 8))
    assert reshaped.reshaped == pytest.approx(1.0) and reshaped.lower > 1.1
    for bad in (nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 2), nn.ConvTranspose2d(4, 4, 3)):
        with pytest.raises(ng.NormgaugeError, match="odd kernels and groups=1"):
            init.delta_orthogonal(bad)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.branch = nn.Sequential(
            init.ScalarBias(), nn.Linear(width, width, bias=False), init.ScalarBias(), nn.ReLU(), init.ScalarBias(),
            nn.Linear(width, width, bias=False), init.ScalarScale(),
        )  # fmt: skip
        self.shortcut = nn.Identity()

    def forward(self, x):
        return torch.relu(self.shortcut(x) + self.branch(x))


def residual(depth, width=48):
    return nn.Sequential(nn.Linear(width, width), *[Block(width) for _ in range(depth)], nn.Linear(width, 5))


def test_fixup_weights_blocks_and_head():
    net = init.fixup(residual(16, 96))
    first = net[1].branch[1].weight.detach()
    assert float(first.var()) == pytest.approx(2 / 96 * 16 ** (-1.0), rel=0.1)  # m = 2: L^(-1/2) on the deviation
    assert not net[1].branch[5].weight.any() and not net[-1].weight.any()
    x = normal(4, 96).abs()
    torch.testing.assert_close(net[1](x), x)
    assert float(net[0].weight.detach().var()) == pytest.approx(2 / 96, rel=0.1)


def test_fixup_step_does_not_depend_on_depth():
    x, y = normal(32, 48), torch.randint(0, 5, (32,), generator=torch.Generator().manual_seed(0))

    def moved(depth):
        net = init.fixup(residual(depth))
        with torch.no_grad():  # one step from zero head only moves the head; look at the second step
            net[-1].weight.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
        before = net(x)
        nn.functional.cross_entropy(before, y).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.01 * parameter.grad
        return float((net(x) - before).detach().square().mean().sqrt())

    assert moved(64) < 3 * moved(4)


def test_fixup_is_an_arm_of_comparisons():
    from normgauge.lab import models

    plain, net = (models.build("resnet", norm, (3, 8, 8), 10, 0) for norm in ("none", "fixup"))
    assert [p.shape for p in net.parameters()] == [p.shape for p in plain.parameters()]
    x = torch.randn(4, 3, 8, 8, dtype=next(net.parameters()).dtype)
    assert not net(x).any() and plain(x).any()
    blocks = [part for part in net.modules() if hasattr(part, "skip")]
    assert blocks and all(not block.second.layer.weight.any() for block in blocks)


def test_fixup_finds_torchvision_blocks_and_refuses_the_rest():
    class Basic(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
            self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
            self.downsample = nn.Conv2d(4, 4, 1)

    net = nn.Sequential(Basic(), Basic(), nn.Linear(4, 2))
    init.fixup(net)
    assert not net[0].conv2.weight.any() and net[0].conv1.weight.any() and net[0].downsample.weight.any()
    with pytest.raises(ng.NormgaugeError, match="needs residual blocks"):
        init.fixup(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ng.NormgaugeError, match="BatchNorm1d at '1'"):
        init.fixup(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(ng.NormgaugeError, match="head names a weight layer"):
        init.fixup(net, head="nowhere")


def test_lsuv_gives_every_layer_unit_variance_and_leaves_no_trace():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(8 * 36, 10),
    )  # fmt: skip
    x = 5 * normal(64, 3, 8, 8) + 1
    state = torch.random.get_rng_state()
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    init.lsuv(net, x)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, buffers[name]) for name, value in net.named_buffers())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    signal = x
    for part in net:
        signal = part(signal)
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            assert float(signal.detach().var()) == pytest.approx(1.0, abs=0.1)


def test_lsuv_errors():
    with pytest.raises(ng.NormgaugeError, match="must vary over the batch"):
        init.lsuv(nn.Linear(3, 2), torch.zeros(4, 3))
    spare = nn.Sequential(nn.Linear(3, 2))
    spare.unused = nn.Linear(3, 2)
    spare.forward = lambda x: spare[0](x)
    with pytest.raises(ng.NormgaugeError, match="1 never reached"):
        init.lsuv(spare, torch.randn(4, 3))
    with pytest.raises(ng.NormgaugeError, match="must be positive"):
        init.lsuv(nn.Linear(3, 2), torch.randn(4, 3), rounds=0)


def test_scaled_weight_standardization_keeps_the_variance_through_relu():
    net = stack(12, 300, nn.ReLU)
    for part in net:
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
            ng.nn.scaled_weight_standardization(part)
    signal = normal(256, 300)
    for part in net[1:]:  # from the first activation on: the law is about inputs that are activations
        signal = part(signal)
        if isinstance(part, nn.Linear):
            assert float(signal.detach().var()) == pytest.approx(1.0, rel=0.35)


@pytest.mark.parametrize("name", ["he", "glorot", "orthogonal"])
def test_draws_repeat_and_leave_the_global_stream_alone(name):
    state = torch.random.get_rng_state()
    first, second, other = (nn.Linear(5, 4) for _ in range(3))
    torch.random.set_rng_state(state)
    getattr(init, name)(first, seed=3)
    getattr(init, name)(second, seed=3)
    getattr(init, name)(other, seed=4)
    assert torch.equal(first.weight, second.weight) and not torch.equal(first.weight, other.weight)
    assert torch.equal(state, torch.random.get_rng_state())


def test_errors_of_drawing():
    with pytest.raises(ng.NormgaugeError, match="must have a Linear"):
        init.he(nn.ReLU())
    with pytest.raises(ng.NormgaugeError, match="Initialize first, then normalize"):
        init.he(ng.nn.weight_norm(nn.Linear(2, 2)))
