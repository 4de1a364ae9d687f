"""What makes large models possible: everything is certified at once, nothing as large as the model held twice."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.rng import generator
from normgauge.symmetry._axes import Slot
from normgauge.symmetry._certify import Certifier
from normgauge.symmetry._family import Family
from normgauge.symmetry._terms import Scale
from normgauge.symmetry._values import Function


def objective_of(net, inputs, mode="eval", **options):
    data = (inputs, torch.zeros(len(inputs)))
    return ng.Objective(net, lambda out, _: out.square().mean(), data, mode=mode, **options)


def language_model(layers, kind="gpt2"):
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=layers, n_embd=16, n_head=2, n_inner=20, n_positions=16, **common)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=20, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16, **common,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def logits(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize(("kind", "depths"), [("gpt2", (2, 6)), ("llama", (1, 3))])
def test_passes_over_one_sequence_do_not_grow_with_depth(kind, depths):
    costs = []
    for layers in depths:
        torch.manual_seed(0)
        objective = objective_of(language_model(layers, kind), torch.randint(0, 40, (1, 14)), forward=logits)
        found = ng.symmetries(objective)
        costs.append(found.cost.gradients_worth)
        assert {family.status for family in found.families} == {"exact", "exact_without_eps"}
    assert costs[0] == costs[1] <= 40


# -- certificates of many families at once --------------------------------------------------------------------------


class Tower(nn.Module):
    """Residual blocks, one of them with an activation of its own."""

    def __init__(self, blocks, odd, activation):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(6, 9) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(9, 6) for _ in range(blocks))
        self.odd, self.activation = odd, activation

    def forward(self, x):
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            x = x + down((self.activation if number == self.odd else F.relu)(up(x)))
        return x


def rescaling(number):
    names = (f"up.{number}.weight", (9, 6), (0,), 1.0), (f"up.{number}.bias", (9,), (0,), 1.0)
    terms = [Scale(Slot(name, shape, keep), c) for name, shape, keep, c in names]
    reader = Scale(Slot(f"down.{number}.weight", (6, 9), (1,)), -1.0)
    return Family("rescale", (*terms, reader), 9, residuals=(0.0,) * 9)


def bent(x):
    """Linear up to 1e-6: the change of its scale moves the outputs by little."""
    return F.relu(x) + 1e-6 * torch.tanh(x)


def certifier_of(net, inputs):
    return Certifier(Function(objective_of(net, inputs), "outputs", 0), 0)


@pytest.mark.parametrize("activation", [F.gelu, torch.tanh, F.softplus, bent])
@pytest.mark.parametrize("odd", [0, 3])
def test_one_layer_that_differs_is_not_certified_with_the_others(odd, activation):
    torch.manual_seed(0)
    certifier = certifier_of(Tower(5, odd, activation), torch.randn(32, 6))
    verdicts = certifier.certify([rescaling(number) for number in range(5)])
    exact = {f.parameters[0] for f in verdicts if f.status == "exact"}
    assert exact == {f"up.{number}.weight" for number in range(5) if number != odd}
    found = ng.symmetries(certifier.function.objective)
    assert not any(f"up.{odd}.weight" in f.parameters for f in found.families if f.status != "undecided")


def test_one_unit_that_differs_is_not_certified_with_the_others():
    """One unit of one block has another activation; the family is split until it stands alone."""

    def mostly(x):
        return torch.cat([torch.tanh(x[:, :1]), F.relu(x[:, 1:])], 1)

    torch.manual_seed(0)
    certifier = certifier_of(Tower(4, 2, mostly), torch.randn(32, 6))
    verdicts = certifier.certify([rescaling(number) for number in range(4)])
    exact = {f.parameters[0]: 0 for f in verdicts if f.status == "exact"}
    items = {name: [i for f in verdicts if f.status == "exact" and f.parameters[0] == name for i in f.items]
             for name in exact}  # fmt: skip
    assert 0 not in items["up.2.weight"] and all(len(items[f"up.{number}.weight"]) == 9 for number in (0, 1, 3))


def test_changes_that_undo_each_other_are_not_certified_apart():
    """Each family has amounts of its own, so that a writer's scale and its reader's do not cancel by chance."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7, bias=False), nn.ReLU(), nn.Linear(7, 3, bias=False))
    one = Family("scale", (Scale(Slot("0.weight", (7, 5), (0,))),), 7, residuals=(0.0,) * 7)
    other = Family("scale", (Scale(Slot("2.weight", (3, 7), (1,)), -1.0),), 7, residuals=(0.0,) * 7)
    verdicts = certifier_of(net, torch.randn(32, 5)).certify([one, other])
    assert not any(family.status == "exact" for family in verdicts)


# -- memory ---------------------------------------------------------------------------------------------------------


def test_gradients_handed_over_one_by_one_are_the_gradient():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    net.unused = nn.Parameter(torch.ones(2))
    function = Function(objective_of(net, torch.randn(8, 5)), "outputs", 0)
    whole, seen = function.probe(function.user, 0, generator(1)), {}
    assert function.probe(function.user, 0, generator(1), visit=seen.__setitem__) == {}
    assert seen.keys() == whole.keys() == dict(net.named_parameters()).keys()
    assert all(torch.equal(seen[name], whole[name]) for name in whole)


class Writes(nn.Module):
    """A forward that decays its own weight, as some do in place of an optimizer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x @ self.weight.mT


def test_parameters_are_copied_only_for_forwards_that_write_into_them():
    torch.manual_seed(0)
    for net, writes in ((Writes(), True), (nn.Linear(4, 3), False)):
        function = Function(objective_of(net, torch.randn(8, 4)), "outputs", 0)
        point, before = function.user, net.weight.detach().clone()
        first = function.outputs(point)
        assert function.writes is writes
        assert torch.equal(function.outputs(point), first)
        assert torch.equal(point["weight"], before.double()) and torch.equal(net.weight, before)


@pytest.mark.parametrize("between", [nn.Identity(), nn.Tanh()])
def test_changes_of_basis_of_wide_layers_are_found(between):
    """Of blocks this wide some of the moments are asked for, not all."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 150, bias=False), between, nn.Linear(150, 5, bias=False))
    blocks = [(f.group, f.block, f.status) for f in ng.symmetries(objective_of(net, torch.randn(32, 6))).families]
    assert (("GL", 150, "exact") in blocks) == isinstance(between, nn.Identity)
