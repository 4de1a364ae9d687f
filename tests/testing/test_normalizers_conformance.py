"""Every normalizer of the register keeps every law it declares, and keeps no common law it does not declare."""

import pytest
import torch

import normgauge as ng
from normgauge.errors import DataError, MissingExtraError
from normgauge.nn import registry
from normgauge.nn.registry import Invariance
from normgauge.testing import NonconformingError, check_normalizer
from normgauge.testing._normalizer import VANISHING, Case, deviation_of
from reference.normalizers import TWINS

DESIGN_POINTS = (
    "stat:center=median,scale=rms",
    "stat:axes=layer,center=median,scale=quantile",
    "stat:axes=group,scale=l1.5",
    "stat:axes=instance,center=none,scale=linf",
    "stat:scale=quantile,quantile=0.1",
)
ALL = (*registry.names(), *DESIGN_POINTS)

# A block that may have its own factor lies inside the coarser ones, which then may have theirs too.
COARSER = {
    "sample_row": {"sample_row", "sample_group", "sample", "row", "group", "tensor"},
    "sample_group": {"sample_group", "sample", "group", "tensor"},
    "sample": {"sample", "tensor"},
    "row": {"row", "group", "tensor"},
    "group": {"group", "tensor"},
    "tensor": {"tensor"},
}


@pytest.mark.parametrize("name", ALL)
def test_normalizer_keeps_its_laws(name):
    report = check_normalizer(name, twin=TWINS.get(name.partition(":")[0]))
    assert all(cases > 0 for _, cases, _ in report.checks)
    laws = registry.get(name).invariances
    assert all(any(str(law) in check for check, _, _ in report.checks) for law in laws)


def implied(declaration, of, kind, per, mode, spatial):
    return any(
        law.of == of and law.kind == kind and per in COARSER[law.per] and mode in law.modes and spatial in law.spatial
        for law in declaration.invariances
    )


@pytest.mark.parametrize("spatial", [0, 2])
@pytest.mark.parametrize("name", [name for name in ALL if registry.get(name).placement == "activation"])
def test_laws_not_declared_do_not_hold(name, spatial):
    declaration = registry.get(name)
    if spatial not in declaration.spatial:
        pytest.skip("no laws are declared without space")
    case = Case(3, 16, 32, spatial, 3, torch.float64, "contiguous", VANISHING)
    candidates = [("input", kind, per) for kind in ("scale", "shift") for per in COARSER]
    candidates += [("weights", "scale", per) for per in ("row", "group", "tensor")]
    candidates += [("weights", "shift", per) for per in ("group", "tensor")]
    wrong = []
    for of, kind, per in candidates:
        for mode in ("train", "eval"):
            law = Invariance(of, kind, per)
            (after, before), _ = deviation_of(declaration, law, case, mode, VANISHING)
            holds = bool((after - before).abs().max() < 1e-6)
            if holds != implied(declaration, of, kind, per, mode, spatial) and not _one_group(
                declaration, law, spatial
            ):
                wrong.append((of, kind, per, mode, holds))
    assert not wrong


def _one_group(declaration, law, spatial):
    """A layer without groups has one: its group laws are its tensor laws, which are judged by themselves."""
    layer = declaration.layer(32, spatial)
    groups = getattr(layer, "num_groups", getattr(layer, "groups", 1))
    return groups == 1 and law.per in ("group", "sample_group")


def test_weight_norm_is_not_invariant_to_exchanging_scale_with_the_gain():
    layer = registry.get("weight").wrap(torch.nn.Linear(3, 2, bias=False))
    x = torch.randn(4, 3)
    before = layer(x).detach()
    with torch.no_grad():
        layer.parametrizations.weight.original1.mul_(2.0)
        layer.parametrizations.weight.original0.div_(2.0)
    assert torch.allclose(layer(x), before / 2)


def test_a_false_law_is_found_out():
    def make(channels, spatial):
        return torch.nn.GroupNorm(1, channels)

    with pytest.raises(NonconformingError, match="positive scale of the input per row"):
        check_normalizer(make, invariances=[Invariance("input", "scale", "row", exact=False)], spatial=(0, 2))


def test_a_false_exactness_is_found_out():
    def make(channels, spatial):
        return ng.nn.LpBatchNorm(channels)

    with pytest.raises(NonconformingError, match="positive scale of the input per row"):
        check_normalizer(make, invariances=[Invariance("input", "scale", "row", modes=("train",))], smallest=2)


class Leaky(ng.nn.ChannelRMSNorm):
    def forward(self, x):
        self.weight.data = self.weight.data * 1.01
        return super().forward(x)


class Forgetful(ng.nn.ChannelRMSNorm):
    def forward(self, x):
        return super().forward(x) + torch.randn(())


class Inventive(ng.nn.ChannelRMSNorm):
    def forward(self, x):
        return super().forward(x) if x.numel() else torch.zeros(1)


class Spoiled(ng.nn.ChannelRMSNorm):
    def __init__(self, channels):
        super().__init__(channels)
        self.register_buffer("mean", torch.zeros(channels))

    def forward(self, x):
        if not x.numel():
            self.mean.copy_(x.flatten(2).mean((0, 2)) if x.dim() > 2 else x.mean(0))
            return x
        return super().forward(x)


class Wrong(ng.nn.ChannelRMSNorm):
    def forward(self, x):
        return super().forward(x.detach()) + x - x.detach()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Leaky, "evaluation writes nothing"),
        (Forgetful, r"precision and memory format|state_dict|global random state"),
        (Inventive, "empty inputs raise an error or give an empty output"),
        (Spoiled, "empty inputs leave the state finite"),
        (Wrong, "derivative of order 1"),
    ],
)
def test_a_misbehaving_layer_is_found_out(layer, message):
    def make(channels, spatial):
        return layer(channels)

    with pytest.raises(NonconformingError, match=message):
        check_normalizer(make, twin=lambda module, x: TWINS["rms"](module, x))


def test_the_suite_leaves_the_global_random_state_alone():
    before = torch.random.get_rng_state()
    check_normalizer("layer", examples=2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_hypothesis_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "hypothesis", None)
    with pytest.raises(MissingExtraError, match=r"normgauge\[dev\]"):
        check_normalizer("rms")


@pytest.mark.parametrize("name", [name for name in ALL if registry.get(name).smallest > 1])
def test_one_value_per_channel_is_refused_with_the_rule(name):
    layer = registry.get(name).layer(4, 2)
    with pytest.raises(DataError, match=r"at least (2|two) values"):
        layer(torch.randn(1, 4, 1, 1))


@pytest.mark.parametrize(
    ("make", "smallest"),
    [
        (lambda channels, spatial: torch.nn.GroupNorm(1, channels), 1),
        (lambda channels, spatial: (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d)[spatial // 2](channels), 2),
    ],
    ids=["group", "batch"],
)
def test_layers_of_torch_conform(make, smallest):
    law = Invariance("input", "scale", "sample" if smallest == 1 else "tensor", exact=False, modes=("train",))
    report = check_normalizer(make, invariances=[law], spatial=(0, 2), smallest=smallest, examples=4)
    assert str(report).startswith("normalizer '<lambda>' conforms")


def test_a_normalizer_without_declared_laws_is_told_so():
    report = check_normalizer(lambda channels, spatial: torch.nn.GroupNorm(1, channels), spatial=(0, 2), examples=2)
    assert report.laws == 0 and "declares no invariance, so none was tried" in str(report)


def test_all_failures_are_named():
    class Twice(Leaky):
        def forward(self, x):
            if not x.numel():
                return torch.zeros(1)
            return super().forward(x)

    laws = [Invariance("input", "scale", "row", exact=False), Invariance("input", "shift", "sample")]
    with pytest.raises(NonconformingError) as caught:
        check_normalizer(lambda channels, spatial: Twice(channels), invariances=laws, spatial=(0, 2), examples=4)
    named = str(caught.value).splitlines()
    assert len(named) >= 4
    for part in (
        "positive scale of the input per row",
        "shift of the input",
        "evaluation writes nothing",
        "empty inputs",
    ):
        assert any(part in line for line in named), part


def test_a_layer_that_raises_fails_its_checks_by_name():
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise KeyError("no")

    with pytest.raises(NonconformingError, match="output: KeyError: 'no'"):
        check_normalizer(lambda channels, spatial: Broken(), spatial=(0, 2), examples=2)
