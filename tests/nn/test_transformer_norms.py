"""Normalizers of transformers: published code, what the doctor reads off them, placements and what these hide."""

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge import errors
from normgauge.lab.models.gpt import Branch
from normgauge.nn import registry
from normgauge.testing import NonconformingError, check_normalizer

KINDS = {"rms": "rms", "rms_plus_one": "rms", "rms_eps_outside": "rms", "scale_norm": "l2", "unit_stream": "l2",
         "qk_full": "rms", "layer": "layer"}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in KINDS if name != "layer"])
def test_the_doctor_reads_the_declared_gain_and_eps_off_the_layer(name):
    declaration = registry.get(name)
    layer = declaration.layer(12, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    identity = ng.identify(layer, example=torch.randn(5, 12))
    assert identity.kind == KINDS[name] and identity.residual < 1e-7
    assert (identity.gain, identity.eps_place) == (declaration.gain, declaration.eps_place)


@pytest.mark.parametrize("name", ["dyt", "derf"])
def test_the_doctor_finds_no_normalizer_in_a_squashing(name):
    layer = registry.get(name).layer(12, 0)
    assert ng.identify(layer, example=torch.randn(5, 12)).kind == "unknown"
    assert not registry.get(name).invariances


def test_published_code_computes_the_same():
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    qwen = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    x = torch.randn(3, 5, 12)
    pairs = [
        (gemma.GemmaRMSNorm(12, eps=1e-3), ng.nn.RMSNorm(12, eps=1e-3, gain="1+w"), x),
        (qwen.Qwen3RMSNorm(4, eps=1e-3), ng.nn.HeadRMSNorm(3, 12, eps=1e-3), x),
    ]
    for theirs, ours, inputs in pairs:
        weight = torch.randn(theirs.weight.shape)
        with torch.no_grad():
            theirs.weight.copy_(weight), ours.weight.copy_(weight)
        if isinstance(ours, ng.nn.HeadRMSNorm):  # Hugging Face hands over heads, (batch, positions, heads, width)
            expected = theirs(inputs.unflatten(-1, (3, 4))).flatten(-2)
        else:
            expected = theirs(inputs)
        torch.testing.assert_close(ours(inputs), expected, rtol=1e-5, atol=1e-6)


def test_a_false_convention_is_found_out():
    import dataclasses

    rms = registry.get("rms")
    for change in ({"gain": "1+w"}, {"eps_place": "outside"}):
        with pytest.raises(NonconformingError, match="gain|eps"):
            check_normalizer(dataclasses.replace(rms, name="other", spatial=(0,), **change), examples=4)
    with pytest.raises(errors.InputError, match="inside, outside"):
        ng.nn.RMSNorm(4, eps_place="below")


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("place", registry.PLACEMENTS.values(), ids=lambda place: place.name)
def test_placements_hide_what_they_declare(place):
    block = Branch(Twice(), "rms", 8, place.name).double()
    for part in block.modules():
        if hasattr(part, "eps"):
            part.eps = 1e-30
    x = torch.randn(6, 8)

    def seen_by_branch(stream):
        kept = []
        with block.branch.register_forward_hook(lambda module, inputs, output: kept.append(output)):
            block(stream)
        return kept[0]

    before = block(x)
    assert torch.allclose(seen_by_branch(3 * x), seen_by_branch(x)) == place.before
    with torch.no_grad():
        block.branch.last.weight.mul_(3.0)
    assert torch.allclose(block(x), before) == place.behind
    sizes = block(10 * x).square().mean(-1).sqrt()
    assert torch.allclose(sizes, torch.ones(6)) == place.around


@pytest.mark.parametrize("place", ["pre", "sandwich", "output"])
def test_the_symmetry_finder_sees_the_scale_a_placement_hides(place):
    model = nn.Sequential(nn.Linear(8, 8), Branch(Twice(), "rms", 8, place), nn.Linear(8, 3))
    data = (torch.randn(12, 8), torch.randint(3, (12,)))
    found = ng.symmetries(ng.Objective(model, nn.functional.cross_entropy, data, mode="eval"))
    free = {name for family in found.families if family.kind == "scale" for name in family.parameters}
    assert ("1.branch.last.weight" in free) == registry.PLACEMENTS[place].behind


def test_half_precision_does_not_overflow_where_squares_do():
    x = torch.full((2, 8), 300.0, dtype=torch.float16)
    for name in ("rms_eps_outside", "scale_norm", "unit_stream", "qk_head", "qk_full", "rms_plus_one"):
        assert registry.get(name).layer(8, 0).half()(x).isfinite().all(), name


def test_zero_inputs_give_zeros():
    for name in ("rms_eps_outside", "scale_norm", "unit_stream", "qk_head", "dyt", "derf"):
        x = torch.zeros(2, 8, requires_grad=True)
        y = registry.get(name).layer(8, 0)(x)
        y.sum().backward()
        assert (y == 0).all() and x.grad.isfinite().all(), name
