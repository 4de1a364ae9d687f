"""The layers beyond their laws: torch's operators, definitions of the papers, stored statistics, processes."""

import copy
import math

import pytest
import torch
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

import normgauge as ng
from normgauge import errors
from normgauge.nn.noisy_batch import ActivationNoise
from normgauge.testing import check_normalizer
from reference.normalizers import TWINS
from reference.synced import loss_of, worker


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def operators_of(layer, x):
    with Operators() as mode:
        layer(x)
    return mode.seen


PAIRS = [
    (lambda: ng.nn.BatchNorm(4), lambda: torch.nn.BatchNorm1d(4), (5, 4)),
    (lambda: ng.nn.BatchNorm(4), lambda: torch.nn.BatchNorm2d(4), (5, 4, 3, 3)),
    (lambda: ng.nn.BatchNorm(4), lambda: torch.nn.BatchNorm3d(4), (5, 4, 3, 3, 2)),
    (lambda: ng.nn.LayerNorm(4), lambda: torch.nn.LayerNorm(4), (5, 4)),
    (lambda: ng.nn.GroupNorm(2, 4), lambda: torch.nn.GroupNorm(2, 4), (5, 4, 3, 3)),
    (lambda: ng.nn.ChannelLayerNorm(4), lambda: torch.nn.GroupNorm(1, 4), (5, 4, 3, 3)),
    (lambda: ng.nn.InstanceNorm(4), lambda: torch.nn.InstanceNorm2d(4, affine=True), (5, 4, 3, 3)),
    (lambda: ng.nn.RMSNorm(4), lambda: torch.nn.RMSNorm(4, eps=1e-5), (5, 4)),
]


@pytest.mark.parametrize(("ours", "torchs", "shape"), PAIRS)
@pytest.mark.parametrize("training", [True, False])
def test_torch_runs_the_same_operators(ours, torchs, shape, training):
    x = torch.randn(shape)
    left, right = ours().train(training), torchs().train(training)
    assert operators_of(left, x) == operators_of(right, x)
    assert torch.equal(left(x), right(x))
    assert left.state_dict().keys() == right.state_dict().keys()


def test_rms_norm_over_maps_runs_torchs_operators():
    x = torch.randn(5, 4, 3, 3)
    core = operators_of(torch.nn.RMSNorm(36, eps=1e-5, elementwise_affine=False), x.flatten(1))
    seen = operators_of(ng.nn.ChannelRMSNorm(4), x)
    assert any(seen[start : start + len(core)] == core for start in range(len(seen)))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("make", [ng.nn.BatchNorm, ng.nn.GhostBatchNorm, ng.nn.NoisyBatchNorm, ng.nn.SyncedBatchNorm])
def test_population_statistics_are_unbiased_exponential_or_cumulative(make, momentum):
    layer = make(3, momentum=momentum)
    batches = [torch.randn(8, 3, 2) * 2 + 1 for _ in range(4)]
    mean, var = torch.zeros(3), torch.ones(3)
    for count, batch in enumerate(batches, start=1):
        layer(batch)
        share = 1 / count if momentum is None else momentum
        mean = (1 - share) * mean + share * batch.mean((0, 2))
        var = (1 - share) * var + share * batch.var((0, 2), correction=1)
    stored = layer.running_var if make is ng.nn.BatchNorm else layer.running_moment
    assert torch.allclose(layer.running_mean, mean)
    assert torch.allclose(stored, var)
    if momentum is None:
        whole_mean, whole_var = ng.nn.population_statistics(batches)
        assert torch.allclose(whole_mean, mean) and torch.allclose(whole_var, var)
    shape = (1, 3, 1)
    y = layer.eval()(batches[0])
    assert torch.allclose(y, (batches[0] - mean.view(shape)) / (var.view(shape) + 1e-5).sqrt())


def test_population_variance_is_unbiased_for_small_batches():
    generator = torch.Generator().manual_seed(3)
    batches = torch.randn(20000, 2, 1, generator=generator, dtype=torch.float64) * 3
    _, var = ng.nn.population_statistics(batches.unbind())
    assert abs(float(var) / 9 - 1) < 0.04  # the biased mean would be 0.5
    with pytest.raises(errors.DataError, match="at least one batch"):
        ng.nn.population_statistics([])
    with pytest.raises(errors.DataError, match="at least 2 values"):
        ng.nn.population_statistics([torch.zeros(1, 3)])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_lp_layer_stores_moments_and_fast_gradients_are_the_closed_form(p):
    layer = ng.nn.LpBatchNorm(3, p=p, momentum=None)
    x = (torch.randn(6, 3, 4) + 0.5).requires_grad_()
    y = layer(x)
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, [x, layer.weight, layer.bias], grad)
    for left, right in zip(got, ng.nn.functional.lp_norm_backward(grad, x, p, layer.weight), strict=True):
        assert torch.allclose(left, right)
    powers = x.detach().abs().amax((0, 2)) if math.isinf(p) else x.detach().abs().pow(p).mean((0, 2))
    assert torch.allclose(layer.running_moment, powers)
    with pytest.raises(errors.InputError, match="p is at least 1"):
        ng.nn.LpBatchNorm(3, p=0.5)


def test_fast_gradients_share_ties_of_the_maximum():
    layer = ng.nn.LpBatchNorm(1, p=math.inf, affine=False)
    x = torch.tensor([[2.0], [-2.0], [1.0]], requires_grad=True)
    grad = torch.tensor([[1.0], [2.0], [-4.0]])
    (got,) = torch.autograd.grad(layer(x), x, grad)
    assert torch.allclose(got, ng.nn.functional.lp_norm_backward(grad, x, math.inf)[0])


def test_batch_renorm_is_batch_norm_at_its_tightest_and_evaluation_at_its_widest():
    x = torch.randn(16, 3, 4) * 2 + 1
    tight = ng.nn.BatchRenorm(3, r_max=1.0, d_max=0.0)
    assert torch.allclose(tight(x), torch.nn.BatchNorm1d(3)(x))
    wide = ng.nn.BatchRenorm(3, r_max=1e6, d_max=1e6)
    wide(torch.randn(16, 3, 4))
    stored = copy.deepcopy(wide).eval()
    assert torch.allclose(wide(x), stored(x))
    # The gradient is that of batch normalization times r, not that of evaluation: r and d are constants.
    inputs = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((copy.deepcopy(stored).train()(inputs) * x.cos()).sum(), inputs)
    assert gradient.sum((0, 2)).abs().max() < 1e-9


def test_batch_renorm_clips():
    layer = ng.nn.BatchRenorm(1, r_max=1.5, d_max=0.5, eps=1e-12)
    x = torch.tensor([[10.0], [30.0]])  # std 10 and mean 20 against the stored 1 and 0
    assert torch.allclose(layer(x).flatten(), torch.tensor([-1.0, 1.0]) * 1.5 + 0.5)
    assert torch.allclose(layer.running_moment, torch.tensor([0.99 * 1 + 0.01 * 10.0]))


@pytest.mark.parametrize("batch", [4, 5, 6, 7, 9])
@pytest.mark.parametrize("space", [(), (3,), (2, 2)])
def test_ghost_batches_even_and_uneven(batch, space):
    layer = ng.nn.GhostBatchNorm(3, ghost_size=2, momentum=1.0)
    x = torch.randn(batch, 3, *space, requires_grad=True)
    twin = TWINS["ghost_batch"](layer, x)
    y = copy.deepcopy(layer)(x)
    assert torch.allclose(y, twin)
    probe = torch.randn_like(y)
    (got,), (right,) = torch.autograd.grad(y, x, probe), torch.autograd.grad(twin, x, probe)
    assert torch.allclose(got, right)
    layer(x)
    axes = (0, *range(2, x.dim()))
    ghosts = batch // 2
    means = torch.stack([x[ghost::ghosts].mean(axes) for ghost in range(ghosts)])
    variances = torch.stack([x[ghost::ghosts].var(axes, correction=1) for ghost in range(ghosts)])
    assert torch.allclose(layer.running_mean, means.mean(0))
    assert torch.allclose(layer.running_moment, variances.mean(0))


def test_small_ghosts_conform():
    def make(channels, spatial):
        return ng.nn.GhostBatchNorm(channels, ghost_size=2)

    laws = ng.nn.registry.get("ghost_batch").invariances
    check_normalizer(make, invariances=laws, smallest=2, twin=TWINS["ghost_batch"])
    with pytest.raises(errors.InputError, match="ghost_size is at least 2"):
        ng.nn.GhostBatchNorm(3, ghost_size=1)


def test_noise_has_the_moments_of_algorithm_1():
    noise = ActivationNoise(torch.Size((64, 8, 1000)), seed=5, step=2)
    flat, bell = noise.uniform(dtype=torch.float64), noise.normal(dtype=torch.float64)
    count = flat.numel()
    assert flat.abs().max() < 1
    for draws, variance, fourth in ((flat, 1 / 3, 1 / 5), (bell, 1.0, 3.0)):
        assert abs(draws.mean()) < 4 * math.sqrt(variance / count)
        assert abs(draws.square().mean() / variance - 1) < 4 * math.sqrt((fourth / variance**2 - 1) / count) + 2e-4
        assert abs((draws[1:] * draws[:-1]).mean()) < 4 * variance / math.sqrt(count)
    assert abs((flat * bell).mean()) < 4 * math.sqrt(1 / 3 / count)
    tail = (bell > 2).double().mean()
    assert abs(tail - 0.02275) < 4 * math.sqrt(0.02275 / count)


def test_noisy_batch_norm_draws_a_distribution_per_step_and_unit():
    layer = ng.nn.NoisyBatchNorm(200, n_mu=0.5, n_sigma=1.25, r_mu=0.1, r_sigma=0.1, seed=1)
    x = torch.randn(2000, 200)
    plain = torch.nn.BatchNorm1d(200)(x)
    steps = []
    for _ in range(2):
        y = layer(x)
        slope = (plain * (y - y.mean(0))).mean(0) / plain.square().mean(0)
        steps.append((slope.detach(), y.mean(0).detach()))
        assert slope.min() > 0.98 and slope.max() < 1.27 and slope.max() - slope.min() > 0.2
        assert y.mean(0).abs().max() < 0.52
        rest = y - slope * plain - y.mean(0)
        spread = rest.square().mean() - (0.1**2 / 3 + 0.1**2)  # offset's variance, factor's times E a^2 = 1
        assert abs(spread) < 3e-4
    assert abs(torch.corrcoef(torch.stack([steps[0][1], steps[1][1]]))[0, 1]) < 0.3  # a new distribution every step
    assert not torch.allclose(steps[0][0], steps[1][0], atol=0.05)


def test_noise_is_reproducible_by_seed_and_state_and_leaves_the_global_stream_alone():
    x = torch.randn(6, 3)
    first, again, other = (ng.nn.NoisyBatchNorm(3, seed=seed) for seed in (4, 4, 5))
    state = torch.random.get_rng_state()
    y = first(x)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(y, again(x))
    assert not torch.allclose(y, other(x))
    resumed = ng.nn.NoisyBatchNorm(3)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(first(x), resumed(x))
    assert not torch.allclose(first(x), y)
    assert torch.allclose(first.eval()(x), first(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_survives_a_second_backward_pass(dtype):
    layer = ng.nn.NoisyBatchNorm(3, seed=4).to(dtype)
    x = torch.randn(6, 3, 5, dtype=dtype, requires_grad=True)
    y = layer(x)
    probe = torch.randn_like(y)
    first, again, kept = (
        torch.autograd.grad(y, x, probe, retain_graph=True, create_graph=flag)[0] for flag in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert torch.allclose(first, kept)


def test_objective_sees_one_noise_and_moves_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), ng.nn.NoisyBatchNorm(3, seed=2), torch.nn.Linear(3, 2))
    data = (torch.randn(10, 4), torch.randint(2, (10,)))
    before = copy.deepcopy(model.state_dict())
    objective = ng.Objective(model, torch.nn.functional.cross_entropy, data, mode="train")
    assert float(objective.loss()) == float(objective.loss())
    objective.gradient()
    v = torch.randn(objective.dimension)
    product = objective.hessian() @ v
    assert torch.allclose(product, objective.hessian() @ v)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ng.nn.registry.names())
def test_hessian_product_of_an_objective_through_every_normalizer(name):
    declaration = ng.nn.registry.get(name)
    first = torch.nn.Linear(4, 6)
    layers = [declaration.wrap(first)] if declaration.placement == "weights" else [first, declaration.layer(6, 0)]
    model = torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(6, 2))
    data = (torch.randn(12, 4), torch.randint(2, (12,)))
    objective = ng.Objective(model, torch.nn.functional.cross_entropy, data, mode="train")
    with objective.hessian() as hessian:
        u, v = torch.randn(2, objective.dimension)
        if declaration.detached:
            assert (hessian @ v).isfinite().all()
        else:
            assert torch.allclose(u @ (hessian @ v), v @ (hessian @ u))


@pytest.mark.parametrize(("groups", "space"), [(1, ()), (2, (5,)), (3, (3, 4))])
def test_whitening_makes_the_covariance_of_a_group_the_identity(groups, space):
    layer = ng.nn.WhiteningNorm(6, groups=groups, iterations=40, eps=0.0, affine=False, momentum=1.0)
    x = torch.randn(80, 6, *space)
    x = torch.einsum("ij,nj...->ni...", torch.randn(6, 6), x) + 2
    rows = layer(x).transpose(0, 1).reshape(6, -1)
    size = 6 // groups
    for group in range(groups):
        block = rows[group * size : (group + 1) * size]
        assert torch.allclose(block @ block.T / block.shape[1], torch.eye(size), atol=1e-8)
    centred = x.transpose(0, 1).reshape(6, -1)
    first = centred[:size]
    assert torch.allclose(layer.running_covariance[0], torch.cov(first).view(size, size))
    # ZCA: the symmetric root of the inverse, not any other whitening.
    values, vectors = torch.linalg.eigh(torch.cov(first, correction=0).view(size, size))
    root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    assert torch.allclose(rows[:size], root @ (first - first.mean(1, keepdim=True)), atol=1e-7)


def test_whitening_of_single_channels_is_batch_norm():
    x = torch.randn(20, 4, 3)
    layer = ng.nn.WhiteningNorm(4, groups=4, iterations=3)
    assert torch.allclose(layer(x), torch.nn.BatchNorm1d(4)(x))
    with pytest.raises(errors.InputError, match="groups divides"):
        ng.nn.WhiteningNorm(4, groups=3)


def test_plain_newton_schulz_diverges_where_the_coupled_form_stays():
    from normgauge.nn.whitening import inverse_root

    matrix = torch.diag(torch.tensor([1.0, 1e-2, 1e-4])) + 1e-3
    values, vectors = torch.linalg.eigh(matrix)
    right = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    assert torch.allclose(inverse_root(matrix, 80), right)
    scaled, root = matrix / matrix.trace(), torch.eye(3)
    for _ in range(80):
        root = (3 * root - root @ root @ root @ scaled) / 2
    assert not torch.allclose(root / matrix.trace().sqrt(), right)


def test_frozen_layers_take_over_a_trained_layer():
    layer = torch.nn.BatchNorm2d(3)
    layer(torch.randn(8, 3, 4, 4) * 3 + 1)
    with torch.no_grad():
        layer.weight.uniform_()
    frozen = ng.nn.FrozenBatchNorm.of(layer).train()
    x = torch.randn(2, 3, 4, 4)
    assert torch.allclose(frozen(x), layer.eval()(x))
    assert not list(frozen.parameters())
    with pytest.raises(errors.ModelError, match="store statistics"):
        ng.nn.FrozenBatchNorm.of(torch.nn.BatchNorm2d(3, track_running_stats=False))


def test_norm_propagation_keeps_unit_variance_through_depth():
    x = torch.randn(4000, 64)
    signal, first = x, True
    for _ in range(4):
        layer = ng.nn.norm_propagation(torch.nn.Linear(64, 64, bias=False), after="data" if first else "relu")
        with torch.no_grad():
            layer.parametrizations.weight[0].gain.fill_(1.0)
        z = layer(signal)
        # Units are correlated after a rectifier, so that the variance of one is near 1, not at it.
        assert abs(z.var() - 1) < 0.15
        signal, first = z.relu(), False
    with pytest.raises(errors.InputError, match="'relu' or 'data'"):
        ng.nn.norm_propagation(torch.nn.Linear(2, 2), after="tanh")


def test_norm_propagation_assigns_directions():
    layer = ng.nn.norm_propagation(torch.nn.Linear(3, 2))
    target = torch.randn(2, 3)
    layer.weight = target
    cosine = torch.nn.functional.cosine_similarity(layer.weight, target)
    assert torch.allclose(cosine, torch.ones(2))


@pytest.mark.parametrize("point", ["axes=batch,scale=std", "axes=layer,scale=std", "axes=group,scale=std"])
def test_stat_norm_contains_the_classics(point):
    x = torch.randn(6, 8, 5)
    layer = ng.nn.registry.get(f"stat:{point}").layer(8, 1)
    twins = {"batch": torch.nn.BatchNorm1d(8), "layer": torch.nn.GroupNorm(1, 8), "group": torch.nn.GroupNorm(4, 8)}
    assert torch.allclose(layer(x), twins[layer.axes](x))
    if layer.axes == "batch":
        twins["batch"](x), layer(x)
        assert torch.allclose(layer.eval()(x), twins["batch"].eval()(x))
    else:
        assert not dict(layer.named_buffers())


def test_layers_refuse_what_they_cannot_use():
    for make in (ng.nn.BatchNorm, ng.nn.LpBatchNorm, ng.nn.WhiteningNorm, ng.nn.FrozenBatchNorm, ng.nn.ChannelRMSNorm):
        with pytest.raises(errors.DataError, match="move the channels to axis 1"):
            make(4)(torch.randn(3, 5))
    with pytest.raises(errors.DataError, match="Use LayerNorm"):
        ng.nn.InstanceNorm(4)(torch.randn(3, 4))
    with pytest.raises(errors.InputError, match="momentum is between"):
        ng.nn.LpBatchNorm(4, momentum=2.0)
    with pytest.raises(errors.InputError, match="num_features is at least 1"):
        ng.nn.LpBatchNorm(0)
    with pytest.raises(errors.InputError, match="quantile is at least 0"):
        ng.nn.StatNorm(4, scale="quantile", quantile=0.5)


def test_two_processes_equal_one_on_the_joint_batch(tmp_path):
    x, probe = torch.randn(6, 3, 2) * 2 + 5, torch.randn(6, 3, 2)
    cuts = (3, 1)  # even, and uneven with a single sample
    mp.spawn(worker, (str(tmp_path / "rendezvous"), cuts, x, probe, str(tmp_path / "out")), nprocs=2)
    layer = torch.nn.BatchNorm1d(3)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1.0, 4.0))
    inputs = x.clone().requires_grad_()
    y = layer(inputs)
    gradients = torch.autograd.grad(loss_of(y, probe), [inputs, layer.weight, layer.bias], create_graph=True)
    (second,) = torch.autograd.grad((gradients[0] * probe.sin()).sum(), inputs)
    for cut in cuts:
        parts = [torch.load(tmp_path / f"out{cut}-{rank}") for rank in range(2)]
        assert [len(part["y"]) for part in parts] == [cut, 6 - cut]
        assert torch.allclose(torch.cat([part["y"] for part in parts]), y)
        assert torch.allclose(torch.cat([part["gradients"][0] for part in parts]), gradients[0])
        assert torch.allclose(torch.cat([part["second"] for part in parts]), second)
        for index in (1, 2):
            assert torch.allclose(sum(part["gradients"][index] for part in parts), gradients[index])
        for part in parts:
            assert torch.allclose(part["state"]["running_mean"], layer.running_mean)
            assert torch.allclose(part["state"]["running_moment"], layer.running_var)


def test_synced_alone_is_batch_norm():
    def make(channels, spatial):
        return ng.nn.SyncedBatchNorm(channels)

    check_normalizer(make, invariances=ng.nn.registry.get("batch").invariances, smallest=2, twin=TWINS["batch"])
