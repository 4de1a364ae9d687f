"""What instruments say of a healthy network and of a sick one: other sentences, with thresholds, and no nonsense."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.errors import InputError, ModelError
from normgauge.results import INSTRUMENTS


def plain(scale=1.0, depth=8, norm=False, width=8):
    torch.manual_seed(0)
    layers = []
    for _ in range(depth):
        layer = nn.Linear(width, width)
        nn.init.orthogonal_(layer.weight, scale)
        layers += [layer, *([nn.BatchNorm1d(width)] if norm else []), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def batch(samples=60):
    source = torch.Generator().manual_seed(1)
    return torch.randn(samples, 8, generator=source), torch.randint(3, (samples,), generator=source)


def objective(model, mode="eval", loss=F.cross_entropy, data=None):
    return ng.Objective(model, loss, data or batch(), mode=mode)


def quadratic(*curvatures):
    """A loss whose Hessian has these eigenvalues."""
    values = torch.tensor(curvatures, dtype=torch.float64)
    model = nn.Linear(len(curvatures), 1, bias=False).double()
    step = lambda m, _: (values * m.weight[0].square()).sum() / 2  # noqa: E731
    return ng.Objective.from_step(model, step, torch.ones(1), mode="eval")


def rate(model):
    return ng.weight_dynamics(objective(model, "train"), torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01))


def tracked(rate):
    """A quadratic of curvature 2, trained at a rate whose threshold is 2 / rate."""
    here = quadratic(1.0, 2.0)
    track = ng.sharpness_track(here, torch.optim.SGD(here.model.parameters(), lr=rate))
    track.measure(0)
    return track


def invariant():
    """A loss of the angle alone: plain descent survives any rate by growing."""
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data = torch.tensor([[1.0, 0.4]], dtype=torch.float64)
    step = lambda m, _: (m.weight[0, 0] / m.weight.norm() + 1).square()  # noqa: E731
    return ng.Objective.from_step(model, step, torch.ones(1), mode="eval")


def identity_times(factor):
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.data = factor * torch.eye(4)
    return layer


def landscapes(*curvatures):
    return {k: ng.landscape(quadratic(value, value), steps=[0.1, 1.0]) for k, value in enumerate(curvatures)}


def minimum():
    """A quadratic at its minimum."""
    return quadratic(1.0, 2.0, 3.0).at(torch.zeros(3, dtype=torch.float64))


def smooth():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 3))


def teacher():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 3))


def taught(samples=60):
    """Inputs the teacher classifies without a doubt."""
    inputs = batch(10 * samples)[0]
    logits = teacher()(inputs).detach()
    top = logits.topk(2).values
    sure = (top[:, 0] - top[:, 1]).argsort(descending=True)[:samples]
    return inputs[sure], logits.argmax(1)[sure]


def settled(shift):
    """A network whose stored statistics are those of these inputs, or of inputs so far away."""
    torch.manual_seed(0)
    first, second = (nn.BatchNorm1d(8, momentum=None) for _ in range(2))
    model = nn.Sequential(first, nn.Linear(8, 8), second, nn.ReLU(), nn.Linear(8, 3))
    model.train()
    with torch.no_grad():
        model(batch(400)[0] + shift)
    return model.eval()


def each_loss(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def memorizer(data, seed):
    model = plain(1.0, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    return model


def half_plane():
    source = torch.Generator().manual_seed(3)
    points = torch.randn(40, 3, generator=source)
    return points - points.mean(0), torch.where(points[:, 0] > 0, 1.0, -1.0)


def halfspace():
    return ng.optim.halfspace(*half_plane())


# instrument -> healthy, sick, a threshold or limit both sentences rest on, what only the sick one says
CASES = {
    "spectrum": (
        lambda: ng.spectrum(quadratic(1.0, 2.0, 3.0), top=1, bottom=1),
        lambda: ng.spectrum(quadratic(-1.0, 2.0, 3.0), top=1, bottom=1),
        "", ""),
    "density": (
        lambda: ng.density(quadratic(*[1.0] * 10, 2.0)),
        lambda: ng.density(quadratic(*[-1.0] * 5, *[1e-9] * 4, 1.0, 2.0), iterations=11),
        "1%", ""),
    "stable_rate": (
        lambda: ng.stable_rate(quadratic(1.0, 2.0)), lambda: ng.stable_rate(invariant()),
        "curvature allows", "survival"),
    "sharpness_track": (lambda: tracked(0.1), lambda: tracked(3.0), "edge", "lower the rate"),
    "smoothing": (
        lambda: ng.smoothing(objective(plain(1.0, 2, norm=True), "train")),
        lambda: ng.smoothing(objective(plain(1.0, 2, norm=True), "eval")), "0|5%", "stored statistics"),
    "batch_noise": (
        lambda: ng.batch_noise(objective(plain(1.0, 1), "train"), sizes=[4, 8], draws=4),
        lambda: ng.batch_noise(objective(plain(1.0, 3, norm=True), "train"), sizes=[3, 6], draws=8), "", ""),
    "lipschitz": (
        lambda: ng.lipschitz(plain(1.0, 2).eval(), batch()[0], radius=0.1),
        lambda: ng.lipschitz(plain(30.0, 8).eval(), batch()[0]),
        "factor of 10|over 10", "is vacuous"),
    "operator_norm": (
        lambda: ng.operator_norm(identity_times(0.5)), lambda: ng.operator_norm(identity_times(5.0)),
        "1", ""),
    "weight_lipschitz": (
        lambda: ng.weight_lipschitz(objective(plain(1.0, 2))), lambda: ng.weight_lipschitz(objective(plain(8.0, 8))),
        "", ""),
    "signal_propagation": (
        lambda: ng.signal_propagation(objective(plain(1.0, 6, norm=True), "train")),
        lambda: ng.signal_propagation(objective(plain(0.2, 8))),
        "100", "they vanish"),
    "activations": (
        lambda: ng.activations(objective(plain(1.0, 2))), lambda: ng.activations(objective(plain(50.0, 2))), "", ""),
    "covariate_shift": (
        lambda: ng.covariate_shift(objective(plain(1.0, 2), "train"), 1e-6),
        lambda: ng.covariate_shift(objective(plain(1.0, 4), "train"), 50.0), "", ""),
    "generalization": (
        lambda: ng.generalization(plain(0.01, 1), batch(600), partition=1, margin=100.0),
        lambda: ng.generalization(plain(8.0, 6), batch(60), partition=2), "", ""),
    "weight_dynamics": (lambda: rate(plain(1.0, 2, norm=True)), lambda: rate(plain(1.0, 2)), "", ""),
    "layer_spectra": (
        lambda: ng.layer_spectra(objective(plain(1.0, 2))), lambda: ng.layer_spectra(objective(plain(5.0, 4))), "", ""),
    "trace": (
        lambda: ng.trace(quadratic(1.0, 2.0)), lambda: ng.trace(quadratic(1.0, -3.0)), "", ""),
    "quotient_spectrum": (
        lambda: ng.quotient_spectrum(objective(plain(1.0, 1, norm=True), "train"), top=1),
        lambda: ng.quotient_spectrum(objective(plain(6.0, 2, norm=True), "train"), top=1), "", ""),
    "landscape": (
        lambda: ng.landscape(quadratic(1.0, 2.0), steps=[0.1]), lambda: ng.landscape(quadratic(1.0, 2.0), steps=[50.0]),
        "", "has risen"),
    "landscape_bands": (
        lambda: ng.landscape_bands(landscapes(1.0, 1.0)),
        lambda: ng.landscape_bands(landscapes(1.0, 90.0)), "", ""),
    "loss_surface": (
        lambda: ng.loss_surface(minimum(), points=5), lambda: ng.loss_surface(objective(plain(1.0, 2)), points=5),
        "", ""),
    "flatness": (
        lambda: ng.flatness(objective(plain(1.0, 1)), samples=3),
        lambda: ng.flatness(objective(plain(40.0, 6)), sigmas=[3.0], samples=3), "10%", ""),
    "activation_history": (
        lambda: ng.activation_history({k: ng.activations(objective(plain(1.0, 2))) for k in (0, 1)}),
        lambda: ng.activation_history({k: ng.activations(objective(plain(1.0 + 40 * k, 2))) for k in (0, 1)}), "", ""),
    "margins": (
        lambda: ng.margins(objective(teacher(), data=taught())), lambda: ng.margins(objective(plain())),
        "5%", "train on"),
    "robustness": (
        lambda: ng.robustness(teacher(), taught(), attack="fgsm", radius=1e-4),
        lambda: ng.robustness(teacher(), taught(), attack="fgsm", radius=5.0), "", ""),
    "drift": (
        lambda: ng.drift(settled(0.0), [batch(400)]), lambda: ng.drift(settled(9.0), [batch(400)]), "limit", "shifted"),
    "stability": (
        lambda: ng.stability(lambda data, seed: plain(1.0, 1), batch(12), batch(8), loss=each_loss, pairs=2, seeds=1),
        lambda: ng.stability(memorizer, batch(12), batch(8), loss=each_loss, pairs=2, seeds=1), "", ""),
    "symmetries": (
        lambda: ng.symmetries(objective(smooth())), lambda: ng.symmetries(objective(plain(1.0, 1, norm=True), "train")),
        "", "Scales are free"),
    "param_groups": (
        lambda: ng.param_groups(objective(smooth()), {"weight_decay": 0.1}),
        lambda: ng.param_groups(objective(plain(1.0, 1, norm=True), "train"), {"weight_decay": 0.1}), "", ""),
    "prune_norms": (
        lambda: ng.prune_norms(settled(0.0), "gamma", 0.0, batch()[0]),
        lambda: ng.prune_norms(settled(0.0), "gamma", 0.9, batch()[0]), "", ""),
    "layer_geometry": (
        lambda: ng.nn.layer_geometry(torch.eye(4), torch.randn(40, 4)),
        lambda: ng.nn.layer_geometry(torch.diag(torch.tensor([1.0, 1.0, 1.0, 1e-4])), torch.randn(40, 4)), "", ""),
    "gdnp": (
        lambda: ng.optim.gdnp(halfspace(), iterations=40), lambda: ng.optim.gdnp(halfspace(), iterations=1), "", ""),
    "gdnp_network": (
        lambda: ng.optim.gdnp_network(*half_plane(), output=torch.ones(2), sweeps=6),
        lambda: ng.optim.gdnp_network(*half_plane(), output=torch.ones(2), sweeps=1), "", ""),
    "gradient_flow": (
        lambda: ng.gradient_flow(objective(plain(1.0, 1)), 0.1, iterations=10, rates=[0.01]),
        lambda: ng.gradient_flow(objective(plain(5.0, 3)), 2.0, iterations=10, rates=[2.0]), "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_sick_network_is_told_from_a_healthy_one(name):
    healthy, sick, threshold, only_sick = CASES[name]
    sentences = [measure().meaning() for measure in (healthy, sick)]
    for sentence in sentences:
        assert len(sentence) > 30 and sentence.endswith(".")
        assert not re.search(r"\bnan\b|grows? by (a factor of )?0\.|shrinks? by (a factor of )?0\.", sentence)
        assert re.search(threshold, sentence)
    assert sentences[0] != sentences[1]
    assert only_sick in sentences[1] and (not only_sick or only_sick not in sentences[0])


def test_every_instrument_is_tried_on_a_healthy_and_a_sick_network():
    """By a line in CASES, or in a test file of its own that looks at two meanings."""
    rooms = ("normgauge.measure", "normgauge.symmetry")  # operations of surgery say what they changed, by their proof
    ours = {name for name, function in INSTRUMENTS.items() if function.__module__.startswith(rooms)}
    tests = {path.stem.removeprefix("test_"): path for path in Path(__file__).parents[1].rglob("test_*.py")}
    elsewhere = {name for name in ours if name in tests and tests[name].read_text().count("meaning()") > 1}
    assert ours - elsewhere <= set(CASES)


def test_the_usable_rate_comes_first():
    found = ng.stable_rate(invariant())
    assert found.readings()[0].name == "rate to use" and found.rate <= found.limit == found.predicted
    assert f"{found.rate:.4g}" in str(found).splitlines()[0] and "observed" not in str(found).splitlines()[0]


def test_a_bulk_near_zero_is_not_called_negative():
    bulk = [1e-5 * (-1) ** k for k in range(40)]
    found = ng.density(quadratic(*bulk, -1.0, 3.0), iterations=20)
    shares = {reading.name: reading.value for reading in found.readings()}
    assert shares["share below -width"] < 0.2 < 0.6 < shares["share within width of zero"]
    assert sum(shares[k] for k in shares if k.startswith("share") and "width" in k) == pytest.approx(1.0)
    assert "nan" not in str(found) and "one probe has no standard error" in str(found)
    assert "one probe" not in str(ng.density(quadratic(1.0, 3.0), probes=2))
    pair = ng.density(quadratic(*bulk, 3.0, 3.001), iterations=20)  # not single: the walk from the end stops at once
    assert not pair.outliers and "0 eigenvalues stand alone" in pair.meaning() and "bulk" not in pair.meaning()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ng.flatness(objective(plain()), radius=math.inf), "radius is positive"),
        (lambda: ng.flatness(objective(plain()), radius=-1.0), "radius is positive"),
        (lambda: ng.operator_norm(nn.Linear(2, 2), delta=1.0), "delta must lie"),
        (lambda: ng.lipschitz(plain().eval(), batch()[0], climbs=-1), "climbs is a whole number"),
        (lambda: ng.lipschitz(plain().eval(), batch()[0], radius=0.0), "radius is positive"),
        (lambda: ng.stable_rate(quadratic(1.0), nudge=0.0), "nudge positive"),
        (lambda: ng.density(quadratic(1.0), width=math.inf), "width is positive"),
        (lambda: ng.density(quadratic(1.0), width=0.0), "width is positive"),
        (lambda: ng.spectrum(quadratic(1.0, 2.0), top=1, max_products=0), "max_products is at least 1"),
        (lambda: ng.spectrum(objective(plain()), of="quotient", max_products=0), "max_products is at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: ng.flatness(objective(plain()), radius=math.nan), "flatness: radius"),
        (lambda: ng.operator_norm(nn.Linear(2, 2), delta=math.nan), "operator_norm: delta"),
        (lambda: ng.lipschitz(plain().eval(), batch()[0], radius=math.nan), "lipschitz: radius"),
        (lambda: ng.stable_rate(quadratic(1.0), nudge=math.nan), "stable_rate: nudge"),
        (lambda: ng.density(quadratic(1.0), width=math.nan), "density: width"),
    ],
)
def test_nan_is_refused_in_one_place(call, argument):
    """`results.instrument` looks for nan; ranges are the instrument's own."""
    with pytest.raises(InputError, match=f"{argument} must be a number. Got nan"):
        call()


def test_a_network_at_chance_is_not_called_robust():
    inputs, labels = batch(12)
    said = ng.robustness(plain(), (inputs, labels), attack="fgsm", radius=1e-6).meaning()
    assert "robust" not in said and "train first" in said


def test_a_mapping_of_inputs_is_not_taken_for_tokens():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = plain()

        def forward(self, pixel_values):
            return self.net(pixel_values)

    with pytest.raises(ModelError, match="unexpected keyword argument 'pixel_values'"):
        ng.lipschitz(plain().eval(), {"pixel_values": batch()[0]})
    named = ng.lipschitz(Named().eval(), {"pixel_values": batch()[0]})
    assert named.respect_to == "pixel_values" and named.upper == ng.lipschitz(plain().eval(), batch()[0]).upper
