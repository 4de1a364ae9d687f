"""`Network`: what a model calls, who reads what, what each parameter is for; and nothing stays behind."""

import copy
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from cases import CASES
from normgauge.errors import ModelError
from normgauge.network import (
    Network,
    copy_model,
    fix_parametrizations,
    fold_channels,
    folded_affine,
    stored_affine,
)
from normgauge.objective import tensors
from reference import network as naive
from reference.tracks import same, tracks


class Residual(nn.Module):
    """Conv, BatchNorm, a residual addition, a functional LayerNorm, a layer called twice, one never called."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.conv = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.second, self.head, self.spare = nn.GroupNorm(2, 4), nn.Linear(4, 4), nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        h = F.relu(self.norm(self.stem(x)))
        h = F.max_pool2d(self.second(h + self.conv(h)), 2).mean((2, 3))
        return self.head(F.layer_norm(self.head(h), (4,), self.scale))


class Recurrent(nn.Module):
    """A forward torch.export cannot follow: it asks for values."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x):
        x = self.norm(self.layer(x))
        return x if float(x.sum()) > 1e9 else torch.tanh(x)


def residual():
    return Network(Residual(), torch.randn(2, 2, 8, 8))


def named(neighbours):
    return [(one.name, one.between) for one in neighbours]


# -- calls ------------------------------------------------------------------------------------------------------------


def test_calls_come_in_order_with_shapes_and_types():
    calls = residual().calls
    kinds = [call.kind for call in calls]
    assert kinds == ["Conv2d", "BatchNorm2d", "Conv2d", "GroupNorm", "Linear", "layer_norm", "Linear"]
    assert [call.name for call in calls][-3:] == ["head", "layer_norm", "head"]
    assert calls[0].inputs == ((2, 2, 8, 8),) and calls[0].outputs == ((2, 4, 8, 8),)
    assert calls[0].dtype == "torch.float64" and calls[5].module is None
    assert residual().record().times("head") == 2


def test_uses_count_the_operations_that_read_a_parameter():
    uses = residual().uses
    assert [len(uses[name]) for name in ("head.weight", "scale", "spare.weight")] == [2, 1, 0]
    assert uses["stem.weight"][0] < uses["norm.weight"][0] < uses["scale"][0]
    attention = Network(nn.MultiheadAttention(4, 2, batch_first=True), (torch.randn(2, 3, 4),) * 3)
    assert all(attention.uses.values())  # read without a call of out_proj


def noise_floor(network, seed=0):
    """The relative noise of the outputs: their second difference on a step too small to have any."""
    own = {name: value.detach() for name, value in network.model.named_parameters()}
    source, size = torch.Generator().manual_seed(seed), torch.finfo(next(iter(own.values())).dtype).eps ** 0.5
    steps = {name: size * value * torch.randn(value.shape, generator=source).to(value) for name, value in own.items()}

    def shifted(sign):
        outputs = network.outputs({name: value + sign * steps[name] for name, value in own.items()})
        return torch.cat([t.detach().double().flatten() for t in tensors(outputs) if t.is_floating_point()])

    middle = shifted(0.0)
    return float((shifted(1.0) - 2 * middle + shifted(-1.0)).abs().max() / middle.abs().max())


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_nothing_stays_behind(mode):
    model = Residual()
    model.norm.train(mode == "eval")
    inputs = torch.randn(2, 2, 8, 8)
    before = tracks(model)
    network = Network(model, inputs, mode=mode)
    assert network.calls and network.edges and network.roles and noise_floor(network.float64()) < 1e-12
    assert same(before, tracks(model))


@cache
def export_takes_power_iterations():
    """Return whether torch.export takes a spectral norm in train mode; older ones fail at its writes in place."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    try:
        torch.export.export(layer, (torch.randn(2, 3),))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_objective_is_read_without_a_trace(case, mode):
    iterates = (case.name, mode) == ("weight_norm_parametrized", "train")
    how = "recorded" if iterates and not export_takes_power_iterations() else "exported"
    objective = case.make(mode)
    before = tracks(objective.model)
    network = Network.of(objective)
    assert network.graph.how == how and set(network.roles) == set(network.uses)
    assert all(edge.producers and edge.consumers for edge in network.edges)
    assert same(before, tracks(objective.model))


def test_nothing_stays_behind_after_an_exception():
    model, wrong = Residual(), torch.randn(2, 5, 8, 8)
    before = tracks(model)
    for answer in ("calls", "edges", "roles"):
        with pytest.raises(RuntimeError):
            getattr(Network(model, wrong), answer)
    assert same(before, tracks(model))


def test_an_objective_is_read_on_its_first_batch():
    data = [(torch.randn(2, 2, 8, 8), torch.zeros(2, 4))] * 2
    objective = ng.Objective(Residual(), F.mse_loss, data, mode="train")
    network = Network.of(objective)
    assert len(network.calls) == 7 and network.mode == "train"
    assert network.graph.how == "exported" and network.edges[0].normalizer == "norm"
    assert network.roles["norm.weight"].kind == "gain"


# -- edges ------------------------------------------------------------------------------------------------------------


def test_edges_go_through_activations_additions_and_pooling():
    network = residual()
    assert network.graph.how == "exported"
    first, second, third = network.edges
    assert named(first.producers) == [("stem", ())]
    assert named(first.consumers) == [("conv", ("relu",)), ("second", ("relu", "add"))]
    assert sorted(named(second.producers)) == [("conv", ("add",)), ("norm", ("relu", "add"))]
    assert [one.name for one in second.consumers] == ["head"] and second.consumers[0].between[-1] == "mean"
    assert named(third.producers) == [("head", ())] and named(third.consumers) == [("head", ())]


def test_producers_and_consumers_are_those_that_move():
    model, inputs = Residual().eval(), torch.randn(2, 2, 8, 8)
    forward = lambda m, x: m(x)  # noqa: E731
    for edge in Network(model, inputs).edges[:2]:
        for one in edge.producers:
            assert edge.normalizer in naive.readers(model, inputs, forward, one.name)
        assert {one.name for one in edge.consumers} <= naive.readers(model, inputs, forward, edge.normalizer)


def test_a_forward_that_asks_for_values_is_recorded_and_says_so():
    network = Network(Recurrent(), torch.randn(2, 3))
    assert network.graph.how == "recorded" and network.graph.why
    assert network.graph.steered == ("__float__",)
    assert named(network.edges[0].producers) == [("layer", ())]
    assert named(network.edges[0].consumers) == [("(output)", ()), ("(output)", ("tanh",))][1:]


def test_recorded_and_exported_edges_agree():
    network, other = residual(), residual()
    other.__dict__["graph"] = other.record()
    assert [[one.name for one in edge.producers + edge.consumers] for edge in network.edges] == [
        [one.name for one in edge.producers + edge.consumers] for edge in other.edges
    ]


def test_what_is_done_in_place_has_a_new_maker():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act, self.norm = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.LayerNorm(3)

        def forward(self, x):
            h = self.layer(x)
            self.act(h)
            return self.norm(h)

    steps = Network(InPlace(), torch.randn(2, 3)).record().steps
    assert [step.reads for step in steps] == [(-1,), (0,), (1,)]


# -- roles ------------------------------------------------------------------------------------------------------------


class Misnamed(nn.Module):
    """y = gain * x / rms(x) + shift, under names that say otherwise."""

    def __init__(self):
        super().__init__()
        self.bias, self.weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.bias * x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt() + self.weight


def test_roles_are_found_by_behaviour():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.odd, self.bn = nn.Embedding(7, 4), Misnamed(), nn.BatchNorm1d(4)
            self.made = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head, self.spare = nn.Linear(4, 7, bias=False), nn.Linear(2, 2)
            self.head.weight = self.words.weight
            self.place = nn.Parameter(torch.zeros(5, 4))

        def forward(self, x):
            h = self.made(self.odd(self.words(x) + self.place))
            h = self.bn(h.transpose(1, 2)).transpose(1, 2)
            return self.head(self.mix(h, h, h)[0])

    roles = Network(Model(), torch.randint(0, 7, (3, 5))).roles
    kinds = {name: role.kind for name, role in roles.items()}
    assert kinds == {
        "place": "other",  # asked of the whole model
        "words.weight": "embedding",
        "odd.bias": "gain",
        "odd.weight": "shift",
        "bn.weight": "gain",
        "bn.bias": "shift",
        "made.bias": "bias",
        "made.parametrizations.weight.original0": "original",
        "made.parametrizations.weight.original1": "original",
        "mix.in_proj_weight": "weight",
        "mix.in_proj_bias": "other",
        "mix.out_proj.weight": "weight",
        "mix.out_proj.bias": "bias",
        "spare.weight": "unused",
        "spare.bias": "unused",
    }
    assert roles["words.weight"].tied == ("head.weight",)


NORMALIZERS = [name for name in ng.nn.registry.names() if ng.nn.registry.get(name).placement == "activation"]


@pytest.mark.parametrize("kind", NORMALIZERS)
def test_gains_and_shifts_of_all_normalizers(kind):
    norm = ng.nn.registry.get(kind).layer(channels=8, spatial=2)
    roles = Network(norm, torch.randn(6, 8, 4, 4)).roles
    inside = (
        {"layer.alpha", "layer.shift"} if kind in ("dyt", "derf") else set()
    )  # of tanh and erf: neither scale nor shift
    assert {role.kind for name, role in roles.items() if name not in inside} <= {"gain", "shift"}, roles


# -- folding and copies -----------------------------------------------------------------------------------------------


def norm_with_statistics(channels):
    norm = nn.BatchNorm1d(channels).eval()
    with torch.no_grad():
        for value in (norm.weight, norm.bias, norm.running_mean):
            value.copy_(torch.randn(channels))
        norm.running_var.copy_(torch.rand(channels) + 0.5)
    return norm


def test_folding_is_what_layer_and_norm_do_together():
    layer, norm = nn.Linear(3, 5), norm_with_statistics(5)
    factors, shift = stored_affine(norm)
    weight, bias = naive.folded(copy.deepcopy(layer), copy.deepcopy(norm))
    torch.testing.assert_close(fold_channels(layer, layer.weight.double(), factors, after=True), weight)
    torch.testing.assert_close(layer.bias.double() * factors + shift, bias)
    plain = folded_affine(None, norm.running_var, None, None, norm.eps)
    torch.testing.assert_close(plain[0], (norm.running_var.double() + norm.eps).rsqrt())
    with pytest.raises(ModelError, match="evaluation mode"):
        stored_affine(nn.BatchNorm1d(2))
    with pytest.raises(ModelError, match="5 features"):
        fold_channels(layer, layer.weight, factors[:2], after=True)


def test_copies_survive_generators_ties_parametrizations_and_kept_tensors():
    model = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model.source, model.kept = torch.Generator().manual_seed(5), [model(torch.randn(2, 3))]
    twin = copy_model(model)
    assert twin[2].weight is twin[0].weight and twin[2].weight is not model[0].weight
    assert torch.equal(torch.rand(3, generator=twin.source), torch.rand(3, generator=model.source))
    assert twin.kept[0].grad_fn is None and model.kept[0].grad_fn is not None
    inputs = torch.randn(2, 3)
    assert torch.equal(fix_parametrizations(twin.eval())(inputs), model.eval()(inputs))

    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("no")

    with pytest.raises(ModelError, match="deepcopy"):
        copy_model(Stubborn(1, 1))


def test_instruments_leave_parametrized_models_whole():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2))
    inputs = torch.randn(40, 3)
    before = model(inputs)
    ng.generalization(model, (inputs, torch.randint(0, 2, (40,))), partition=2)
    ng.weight_lipschitz(ng.Objective(model, F.mse_loss, (inputs, torch.zeros(40, 2)), mode="eval"))
    assert torch.equal(model(inputs), before)


# -- double precision -------------------------------------------------------------------------------------------------

TINY = {
    "vocab_size": 11, "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 6,
}  # fmt: skip
GROUPED = {**TINY, "num_key_value_heads": 1, "head_dim": 6, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


def published(name):
    hub = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"vocab_size": 11, "n_positions": 6, "n_embd": 8, "n_layer": 2, "n_head": 2, "use_cache": False}
        return hub.GPT2LMHeadModel(hub.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    if name == "bert":
        return hub.BertForSequenceClassification(hub.BertConfig(**TINY))
    config = {"llama": hub.LlamaConfig, "qwen3": hub.Qwen3Config}[name](**GROUPED)
    return {"llama": hub.LlamaForCausalLM, "qwen3": hub.Qwen3ForCausalLM}[name](config)


def logits(model, inputs):
    return model(**inputs).logits


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "bert"])
def test_published_models_are_exact_in_float64(name, attention):
    model = published(name).float()
    model.set_attn_implementation(attention)
    inputs = {"input_ids": torch.arange(10).reshape(2, 5)}
    coarse = noise_floor(Network(copy.deepcopy(model).double(), inputs, forward=logits))
    fine = Network(model, inputs, forward=logits).float64()
    assert noise_floor(fine) < 1e-13 and (coarse > 1e-8 or name in ("gpt2", "bert"))
    values = dict(fine.model.named_parameters())
    source = torch.Generator().manual_seed(1)
    step = {n: 1e-3 * torch.randn(v.shape, generator=source, dtype=torch.float64) for n, v in values.items()}

    def along(size):
        return fine.outputs({n: v.detach() + size * step[n] for n, v in values.items()})

    steps = [(along(h) - along(-h)) / (2 * h) for h in (0.02, 0.01, 0.005)]  # Richardson: errors of order h^6
    first, second = ((4 * b - a) / 3 for a, b in pairwise(steps))
    slope = (16 * second - first) / 15
    assert float((second - slope).abs().max() / slope.abs().max()) < 1e-10
    assert model.dtype == torch.float32 and torch.ones(1).double().float().dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "bert"])
def test_published_models_have_edges_and_roles(name):
    network = Network(published(name), {"input_ids": torch.arange(10).reshape(2, 5)}, forward=logits)
    assert network.graph.how == "exported"
    recorded = Network(network.model, network.inputs, forward=logits)
    recorded.__dict__["graph"] = recorded.record()
    for edge, other in zip(network.edges, recorded.edges, strict=True):
        assert {one.name for one in edge.producers} == {one.name for one in other.producers}
        assert {one.name for one in edge.consumers} == {one.name for one in other.consumers}
    kinds = {role.kind for role in network.roles.values()}
    assert kinds <= {"embedding", "weight", "bias", "gain", "shift"}
    norms = {edge.normalizer for edge in network.edges}
    gains = {role.module for role in network.roles.values() if role.kind == "gain"}
    assert gains == norms


class NoDouble(nn.Module):
    """A layer whose kernel refuses float64, as grouped products of experts do."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        if x.dtype == torch.float64:
            raise RuntimeError("Expected mat_a to be Float32")
        return nn.functional.linear(x, self.weight, self.bias)


def test_a_kernel_without_float64_has_the_roles_its_shapes_say():
    net = nn.Sequential(nn.Linear(4, 4), NoDouble()).float()
    roles = Network(net, torch.randn(5, 4, dtype=torch.float32)).roles
    assert [roles[name].kind for name in ("0.weight", "0.bias", "1.weight", "1.bias")] == [
        "weight",
        "bias",
        "weight",
        "other",
    ]
    groups = ng.param_groups(
        ng.Objective(net, nn.functional.mse_loss, (torch.randn(8, 4).float(), torch.zeros(8, 3).float()), mode="train")
    )
    assert sum(len(group["params"]) for group in groups) == 4
