import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import svds
from torch import nn

import normgauge as ng
from normgauge import linalg
from normgauge.errors import CertificateError
from normgauge.linalg import Convolution, peak_frequency, random_start_bound, symbol_bound, top_singular_pair
from reference.operator_norm import dense_matrix, dense_norm, random_layer, trained_like


def check_bounds(seed):
    """Every bound of one random layer against its dense twin; returns upper / exact."""
    layer, shape = random_layer(seed)
    matrix = dense_matrix(layer, shape)
    exact = float(torch.linalg.svdvals(matrix)[0])
    operator = Convolution.of(layer, shape[1:])
    torch.testing.assert_close(operator.matmat(torch.eye(matrix.shape[1])), matrix)
    probe = torch.randn(matrix.shape[0], generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(operator.adjoint(probe), matrix.T @ probe)
    pair = top_singular_pair(operator, steps=40)
    side = operator @ pair.vector if operator.transposed else pair.vector
    bounds = [symbol_bound(operator), symbol_bound(operator, avoid=peak_frequency(operator, side))]
    for bound in bounds:
        assert bound.value >= exact, (layer, shape)
        if bound.exact and exact > 0:
            assert bound.value <= exact * (1 + 1e-10), (layer, shape)
    assert pair.rayleigh <= exact * (1 + 1e-12)
    assert pair.rayleigh >= 0.99 * exact, (layer, shape)
    bracket = ng.operator_norm(layer, shape)
    assert bracket.lower <= exact * (1 + 1e-13) and exact <= bracket.upper, (layer, shape)
    return bounds[0].value / exact if exact > 0 else 1.0


@pytest.mark.parametrize("block", range(4))
def test_certified_upper_never_below_dense_norm_and_adjoint_right(block):
    ratios = [check_bounds(seed) for seed in range(30 * block, 30 * (block + 1))]
    assert sorted(ratios)[len(ratios) // 2] < 1.5  # a bound that says nothing would pass the test above


@pytest.mark.heavy
def test_certified_upper_never_below_dense_norm_on_1000_layers():
    for seed in range(1000, 2000):
        check_bounds(seed)


@settings(deadline=None, max_examples=25)
@given(
    channels=st.tuples(st.integers(1, 12), st.integers(9, 14)),
    size=st.integers(3, 7),
    stride=st.integers(1, 2),
    seed=st.integers(0, 10**6),
    single=st.booleans(),
)
def test_bound_of_wide_layers_goes_through_cholesky_and_holds(channels, size, stride, seed, single):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(channels[1], channels[1] if single else channels[0], 3, 3, generator=generator)
    operator = Convolution(weight, (size, size), stride=(stride, stride), padding=((1, 1), (1, 1)))
    exact = float(torch.linalg.svdvals(operator.matmat(torch.eye(operator.shape[1])))[0])
    value = symbol_bound(operator).value
    assert exact <= value < 2 * exact
    assert symbol_bound(operator.to(torch.float32)).value == pytest.approx(value, rel=1e-6)


def research_layer(name):
    outputs, inputs, kernel, size, stride, kind = name
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    generator = torch.Generator().manual_seed(3)
    random = torch.randn(layer.weight.shape, generator=generator)
    layer.weight.data = random if kind == "random" else trained_like(outputs, inputs, kernel)
    return layer.float(), (inputs, size, size)


RESEARCH = {
    (64, 64, 3, 32, 1, "random"): 1.005,
    (64, 64, 3, 32, 1, "smooth"): 1.005,
    (128, 64, 3, 32, 2, "random"): 1.005,
    (64, 3, 7, 64, 2, "random"): 1.005,
    (256, 256, 3, 8, 1, "random"): 1.07,
    (256, 256, 3, 8, 1, "smooth"): 1.07,
    (512, 512, 3, 4, 1, "random"): 1.25,
    (512, 512, 3, 4, 1, "smooth"): 1.25,
}


def check_accuracy(name, allowed):
    layer, shape = research_layer(name)
    bracket = ng.operator_norm(layer, shape)
    double = Convolution.of(layer.double(), shape[1:])
    exact = float(svds(double.to_scipy(), k=1, tol=1e-10, return_singular_vectors=False, random_state=0)[0])
    assert exact * (1 - 1e-9) <= bracket.upper <= allowed * exact
    assert 0.997 * exact <= bracket.lower <= exact * (1 + 1e-9)
    assert bracket.kind == "certified"


def test_bracket_is_narrow_on_a_32x32_layer():
    check_accuracy((32, 32, 3, 32, 1, "random"), 1.005)
    check_accuracy((32, 32, 3, 8, 1, "smooth"), 1.07)


@pytest.mark.heavy
@pytest.mark.parametrize("name", RESEARCH, ids=str)
def test_bracket_is_narrow_on_the_research_layers(name):
    check_accuracy(name, RESEARCH[name])


def test_linear_and_pointwise_layers_are_exact():
    linear = nn.Linear(7, 5)
    bracket = ng.operator_norm(linear)
    exact = float(torch.linalg.svdvals(linear.weight.detach())[0])
    assert bracket.lower <= exact <= bracket.upper and bracket.gap < 1 + 1e-11
    point = nn.Conv2d(6, 9, 1, stride=2)
    bracket = ng.operator_norm(point, (8, 8))
    exact = float(torch.linalg.svdvals(point.weight.detach()[:, :, 0, 0])[0])
    assert bracket.lower <= exact * (1 + 1e-13) and exact <= bracket.upper and bracket.gap < 1 + 1e-11
    assert bracket.reshaped == pytest.approx(exact)


def test_patch_embedding_is_exact():
    layer = nn.Conv2d(3, 8, 4, stride=4)
    bracket = ng.operator_norm(layer, (3, 16, 16))
    assert bracket.gap < 1 + 1e-11
    assert bracket.upper == pytest.approx(dense_norm(layer, (3, 16, 16)))


def test_coarse_grid_holds_for_long_inputs():
    weight = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0))
    operator = Convolution(weight, (400,), padding=((1, 1),))
    exact = float(torch.linalg.svdvals(operator.matmat(torch.eye(800)))[0])
    bound = symbol_bound(operator)
    assert bound.frequencies < 100 and 1.0 < bound.factor < 1.0011
    assert exact <= bound.value < 1.002 * exact


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_copied_padding_states_its_factor(mode):
    layer = nn.Conv2d(12, 12, 3, padding=1, padding_mode=mode)
    bracket = ng.operator_norm(layer, (12, 10, 10))
    assert bracket.factor == pytest.approx(2.0)
    assert "factor 2" in str(bracket)
    exact = float(torch.linalg.svdvals(dense_matrix(layer, (12, 10, 10)))[0])
    assert bracket.lower <= exact <= bracket.upper


def test_reshaped_norm_is_below_the_norm_of_a_3x3_convolution():
    layer = nn.Conv2d(8, 8, 3, padding=1)
    bracket = ng.operator_norm(layer, (8, 12, 12))
    flat = float(torch.linalg.svdvals(layer.weight.detach().flatten(1))[0])
    assert bracket.reshaped == pytest.approx(flat)
    assert flat < bracket.lower < 3 * flat + 1e-9


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(6, 4), (6,)),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 5, 5)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 4, 4)),
    ],
)
def test_batch_norm_is_folded_after_and_before(layer, shape):
    generator = torch.Generator().manual_seed(1)
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    kind = nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d
    layer = layer.double()
    for before in (False, True):
        norm = kind(shape[0] if before else channels).double().eval()
        norm.running_var.uniform_(0.2, 3.0, generator=generator)
        norm.weight.data.normal_(generator=generator)
        norm.running_mean.normal_(generator=generator)
        stack = nn.Sequential(norm, layer) if before else nn.Sequential(layer, norm)
        exact = dense_norm(stack, shape)
        bracket = ng.operator_norm(stack, shape)
        assert bracket.lower <= exact * (1 + 1e-12) and exact <= bracket.upper * (1 + 1e-12)
        assert bracket.gap < 1.001
        alone = ng.operator_norm(norm)
        assert alone.upper == pytest.approx(
            float((norm.weight.detach() / (norm.running_var + norm.eps).sqrt()).abs().max())
        )


def test_probabilistic_bound_holds_and_tightens_a_loose_factor():
    layer = nn.Conv2d(12, 12, 3, padding=1, padding_mode="reflect")
    exact = dense_norm(layer, (12, 8, 8))
    certified = ng.operator_norm(layer, (12, 8, 8))
    chance = ng.operator_norm(layer, (12, 8, 8), kind="probabilistic", iterations=80, delta=1e-6)
    assert exact <= chance.upper < 1.05 * exact < certified.upper
    assert chance.kind == "probabilistic" and chance.delta == 1e-6


def test_random_start_bound_fails_no_more_often_than_delta():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(1, 1, 5, generator=generator)
    operator = Convolution(matrix, (60,), padding=((2, 2),))
    exact = float(torch.linalg.svdvals(operator.matmat(torch.eye(60)))[0])
    delta, failures = 0.1, 0
    for seed in range(100):
        ritz = top_singular_pair(operator, steps=6, seed=seed).ritz
        failures += random_start_bound(ritz, 60, 6, delta) < exact
    assert failures <= 100 * delta


def test_warm_start_needs_few_steps():
    layer = nn.Conv2d(16, 16, 3, padding=1)
    first = ng.operator_norm(layer, (16, 12, 12), iterations=60)
    with torch.no_grad():
        layer.weight.mul_(1.01).add_(1e-4 * torch.randn(layer.weight.shape))
    cold = ng.operator_norm(layer, (16, 12, 12), iterations=5)
    warm = ng.operator_norm(layer, (16, 12, 12), start=first)
    best = ng.operator_norm(layer, (16, 12, 12), iterations=80)
    assert warm.steps == 5
    assert warm.lower > 0.9999 * best.lower > cold.lower


def test_estimate_is_cheap_and_close():
    layer = nn.Conv2d(16, 16, 3, padding=1)
    estimate = ng.operator_norm(layer, (16, 12, 12), kind="estimate", iterations=40)
    certified = ng.operator_norm(layer, (16, 12, 12))
    assert estimate.kind == "estimate" and estimate.frequencies == 0
    assert estimate.lower <= certified.upper and estimate.upper == pytest.approx(certified.upper, rel=0.02)


def test_seed_repeats_and_nothing_is_left_behind():
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(16, 16, 3, padding=1)).train()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    state = torch.random.get_rng_state()
    first = ng.operator_norm(layer, (16, 12, 12), seed=4)
    assert ng.operator_norm(layer, (16, 12, 12), seed=4) == first
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert all(parameter.grad is None for parameter in layer.parameters()) and layer.training


def test_low_precision_and_extreme_scales():
    layer = nn.Conv2d(10, 10, 3, padding=1)
    reference = ng.operator_norm(layer, (10, 10, 10))
    tiny = nn.Conv2d(10, 10, 3, padding=1)
    tiny.weight.data = layer.weight.data * 1e-40
    assert ng.operator_norm(tiny, (10, 10, 10)).upper == pytest.approx(1e-40 * reference.upper)
    half = ng.operator_norm(layer.bfloat16(), (10, 10, 10))
    assert half.lower <= half.upper == pytest.approx(reference.upper, rel=1e-2)
    layer.weight.data.zero_()
    assert ng.operator_norm(layer, (10, 10, 10)).upper == 0.0


def test_ways_out():
    bracket = ng.operator_norm(nn.Conv2d(16, 16, 3, padding=1), (16, 12, 12))
    text = str(bracket)
    assert text.splitlines()[-1].startswith("kind upper, lower, exact") and "certified" in text and "seed 0" in text
    assert list(bracket.frame().columns) == ["layer", "lower", "upper", "gap", "reshaped", "kind"]
    assert "operator norm" in bracket.chart().to_json()
    assert math.isclose(bracket.gap, bracket.upper / bracket.lower)


CONVOLUTION = nn.Conv2d(3, 4, 3)
BAD = [
    (lambda: ng.operator_norm(nn.ReLU()), "Got ReLU"),
    (lambda: ng.operator_norm(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), "Got Linear, Linear"),
    (lambda: ng.operator_norm(nn.Sequential()), "Got nothing"),
    (lambda: ng.operator_norm(CONVOLUTION), r"Pass input_shape=\(3, 32, 32\)"),
    (lambda: ng.operator_norm(CONVOLUTION, (4, 8, 8)), r"3 channels and 2 sizes. Got \(4, 8, 8\)"),
    (lambda: ng.operator_norm(CONVOLUTION, (8, -1)), r"Got \(8, -1\)"),
    (lambda: ng.operator_norm(CONVOLUTION, (2, 2)), "must hold the kernel"),
    (lambda: ng.operator_norm(nn.Linear(3, 2), (4,)), "Leave input_shape out"),
    (lambda: ng.operator_norm(nn.BatchNorm2d(3)), "Call .eval"),
    (lambda: ng.operator_norm(nn.BatchNorm2d(3, track_running_stats=False).eval()), "track_running_stats=True"),
    (lambda: ng.operator_norm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(4).eval())), "must have 3 features"),
    (lambda: ng.operator_norm(CONVOLUTION, (8, 8), kind="certifed"), "Did you mean 'certified'"),
    (lambda: ng.operator_norm(CONVOLUTION, (8, 8), iterations=0), "iterations is a positive integer"),
    (lambda: ng.operator_norm(CONVOLUTION, (32, 32), kind="probabilistic", iterations=3), "Raise the iterations"),
    (lambda: ng.operator_norm(CONVOLUTION, (32, 32), kind="probabilistic", delta=2.0), "delta must lie"),
    (lambda: ng.operator_norm(CONVOLUTION, (32, 32), start=torch.ones(3)), "3072 entries"),
    (
        lambda: ng.operator_norm(CONVOLUTION, (32, 32), start=torch.ones(3072), kind="probabilistic"),
        "needs a random start",
    ),
]


@pytest.mark.parametrize("call, words", BAD, ids=[words for _, words in BAD])
def test_errors_say_the_rule_and_the_next_step(call, words):
    with pytest.raises(ng.NormgaugeError, match=words):
        call()


def test_non_finite_weights_are_refused():
    layer = nn.Linear(2, 2)
    layer.weight.data[0, 0] = math.nan
    with pytest.raises(ng.NormgaugeError, match="must be finite"):
        ng.operator_norm(layer)


def test_a_bound_below_a_stretched_vector_is_no_bracket(monkeypatch):
    honest = linalg.symbol_bound
    monkeypatch.setattr(
        linalg, "symbol_bound", lambda *a, **k: dataclasses.replace(b := honest(*a, **k), value=0.5 * b.value)
    )
    with pytest.raises(CertificateError, match="no vector is stretched"):
        ng.operator_norm(nn.Conv2d(8, 8, 3, padding=1), (8, 20, 20))
