"""Bounds on slopes with respect to weights: never below the gradient, and equal to it where nothing is lost."""

import math

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.errors import InputError, ModelError
from normgauge.measure.lipschitz.weight_lipschitz import input_norms
from reference.lipschitz import KINDS, random_net

WITH_LAYERS = [kind for kind in KINDS if kind not in ("transposed and upsampled",)]


def distance(output, target):
    return (output - target).square().mean()


def objective_of(net, data, mode="eval"):
    with torch.no_grad():
        shape = net(data).shape
    return ng.Objective(net, distance, (data, torch.zeros(shape)), mode=mode)


def dense_weight_slope(net, layer, x):
    """Norm of the Jacobian of the outputs at one sample with respect to a layer's weight, entry by entry."""

    def output(weight):
        return torch.func.functional_call(net, {f"{layer}.weight": weight}, (x[None],)).flatten()

    weight = dict(net.named_parameters())[f"{layer}.weight"].detach()
    jacobian = torch.autograd.functional.jacobian(output, weight)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, weight.numel()), 2))


@pytest.mark.parametrize("kind", WITH_LAYERS)
def test_bounds_are_never_below_the_gradient(kind):
    net, data = random_net(kind, 7)
    result = ng.weight_lipschitz(objective_of(net, data))
    assert result.layers
    for layer in result.layers:
        assert layer.log10_gradient <= layer.log10_chain and layer.log10_gradient <= layer.log10_local


@pytest.mark.parametrize("kind", ["mlp", "vgg", "resnet", "normalized mlp"])
def test_output_bound_is_never_below_the_dense_jacobian(kind):
    net, data = random_net(kind, 3)
    for layer in ng.weight_lipschitz(objective_of(net, data)).layers:
        truth = max(dense_weight_slope(net, layer.name, x) for x in data)
        assert math.log10(truth) <= layer.log10_output


def test_train_mode_uses_the_batch_and_shows_what_batch_norm_saves():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    nn.init.uniform_(net[1].weight, 0.5, 2.0)
    data = 3 * torch.randn(6, 2, 5, 5)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    result = ng.weight_lipschitz(objective_of(net.eval(), data).replace(mode="train"))
    first, last = result.layers
    assert first.log10_chain is None and first.log10_plain is not None and last.log10_plain is None
    assert first.log10_gradient <= first.log10_local
    assert "share batch statistics" in str(result)
    # the closed form behind batch normalization is the gradient that autograd finds before it
    gradient = objective_of(net, data).replace(mode="train").gradient()
    assert float(gradient["0.weight"].norm()) == pytest.approx(10**first.log10_gradient, rel=1e-8)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_train_mode_local_bound_is_the_norm_times_the_gradient_before_batch_norm():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    data, target = torch.randn(8, 3), torch.randn(8, 2)
    hidden = net[0](data).detach().requires_grad_()
    (slope,) = torch.autograd.grad(distance(net[1:](hidden), target), hidden)
    net[1].reset_running_stats()
    expected = float(torch.linalg.matrix_norm(data, 2) * slope.norm())
    objective = ng.Objective(net, distance, (data, target), mode="train")
    assert 10 ** ng.weight_lipschitz(objective).layers[0].log10_local == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 3), (2, 4)),
        (nn.Linear(4, 3), (2, 5, 4)),
        (nn.Conv1d(2, 4, 3, 2, 1, groups=2), (2, 2, 6)),
        (nn.Conv2d(2, 3, 3, 2, 1, padding_mode="circular"), (2, 2, 5, 5)),
        (nn.Conv2d(2, 3, (2, 3), dilation=2, padding="same"), (2, 2, 5, 6)),
        (nn.Conv3d(1, 2, 2), (2, 1, 3, 3, 3)),
    ],
)
def test_input_norms_against_the_dense_map(layer, shape):
    generator = torch.Generator().manual_seed(0)
    layer, x = layer.double(), torch.randn(shape, generator=generator, dtype=torch.float64)

    def norm(inputs):
        def output(weight):
            zero = torch.zeros_like(layer.bias)
            return torch.func.functional_call(layer, {"weight": weight, "bias": zero}, (inputs,)).flatten()

        jacobian = torch.autograd.functional.jacobian(output, layer.weight.detach())
        return float(torch.linalg.matrix_norm(jacobian.reshape(len(jacobian), -1), 2))

    each, together = input_norms(layer, x)
    truths = [norm(sample[None]) for sample in x]
    if isinstance(layer, nn.Conv3d):
        assert all(a >= b for a, b in zip(each.tolist(), truths, strict=True)) and together >= norm(x)
    else:
        assert each.tolist() == pytest.approx(truths) and together == pytest.approx(norm(x))


def test_several_batches_are_weighted():
    net, data = random_net("mlp", 2)
    target = torch.zeros(3, 3)
    whole = ng.Objective(net, distance, (data, target), mode="eval")
    parts = ng.Objective(net, distance, [(data[:1], target[:1]), (data[1:], target[1:])], mode="eval")
    for a, b in zip(ng.weight_lipschitz(whole).layers, ng.weight_lipschitz(parts).layers, strict=True):
        assert a.log10_gradient == pytest.approx(b.log10_gradient)
        assert a.log10_chain == pytest.approx(b.log10_chain)


def test_result_has_three_ways_out_and_errors_speak():
    net, data = random_net("mlp", 2)
    result = ng.weight_lipschitz(objective_of(net, data))
    assert list(result.frame().layer) == ["0", "2", "4"] and result.chart().to_dict()
    assert str(result).splitlines()[-1].startswith("kind upper, exact")
    step = ng.Objective.from_step(net, lambda m, b: m(b).mean(), data, mode="eval")
    with pytest.raises(InputError, match="from a step"):
        ng.weight_lipschitz(step)
    with pytest.raises(ModelError, match="Linear or convolution"):
        ng.weight_lipschitz(ng.Objective(nn.BatchNorm1d(6), distance, (data, data), mode="eval"))


def test_what_it_would_call_otherwise_is_refused():
    net, data = nn.Linear(3, 2), (torch.randn(6, 3), torch.randn(6, 2))
    tripled = ng.Objective(net, nn.functional.mse_loss, data, mode="eval", forward=lambda m, x: 3 * m(x))
    with pytest.raises(InputError, match="forward="):
        ng.weight_lipschitz(tripled)  # its bounds and gradients would be those of a third of the outputs
    words = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    tokens = (torch.randint(5, (4, 2)), torch.randn(4, 2))
    with pytest.raises(InputError, match="one real tensor"):
        ng.weight_lipschitz(ng.Objective(words, nn.functional.mse_loss, tokens, mode="eval"))
