"""Bounds on balls against dense brute force, and models that only torch.export can read."""

import math

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.errors import DataError, ModelError
from normgauge.measure.lipschitz import enclosure
from reference.lipschitz import slope_at, steepest_near


class Added(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.part = nn.Sequential(*parts)

    def forward(self, x):
        return x + self.part(x)


def relu_mlp():
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), *layers, nn.Linear(64, 3)), torch.randn(3, 8)


def group_norms():
    blocks = [Added(nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2)]
    head = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *blocks, *head), torch.randn(2, 1, 6, 6)


def encoder():
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 4, 16)


@pytest.mark.parametrize(
    ("make", "radius", "factor"),
    [(relu_mlp, 1e-6, 1.01), (relu_mlp, 0.01, 2), (group_norms, 0.05, 2), (encoder, 0.05, 3)],
)
def test_the_ball_is_local(make, radius, factor):
    torch.manual_seed(0)
    net, data = make()
    net = net.eval().double()
    data = data.double()
    bracket = ng.lipschitz(net, data, radius=radius, climbs=2)
    truth = max(slope_at(net, x) for x in data)
    near = max(truth, steepest_near(net, data, radius, torch.Generator().manual_seed(0), draws=4))
    assert near * 0.98 <= bracket.upper and bracket.lower <= bracket.upper <= factor * near
    assert not bracket.fallback and bracket.jacobian_exact
    assert 10 ** float(bracket.jacobian.max()) == pytest.approx(truth, rel=1e-6)


def test_where_patterns_are_fixed_the_bound_is_the_jacobian_and_a_large_network_says_why_not(monkeypatch):
    torch.manual_seed(1)
    net, data = relu_mlp()
    bracket = ng.lipschitz(net, data, radius=1e-9, climbs=0)
    assert bracket.upper == pytest.approx(bracket.lower, rel=1e-6)
    monkeypatch.setattr(enclosure, "LIMIT", 500)
    large = ng.lipschitz(net, data, radius=1e-3, climbs=0)
    assert "entries" in large.fallback and "product over layers" in str(large)


@pytest.mark.parametrize("outputs", [3, 60])
def test_at_a_kink_the_bound_at_the_data_holds_on_both_sides(outputs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4, bias=False), nn.ReLU(), nn.Linear(4, outputs)).double()
    data = torch.zeros(1, 2).double()  # automatic differentiation gives 0 there
    steepest = max(slope_at(net, x) for x in 1e-6 * torch.randn(50, 2).double())
    for radius in (None, 1e-3):
        found = ng.lipschitz(net, data, radius=radius, climbs=1)
        assert steepest <= found.at_data <= 3 * steepest
        assert not found.jacobian_exact or 10 ** float(found.jacobian[0]) >= steepest, (
            "one side of a kink, called exact"
        )


class Einsums(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6) / 2)

    def forward(self, x):
        y = torch.einsum("bti,ij->btj", x, self.weight)
        return torch.einsum("bts,bsj->btj", torch.einsum("btj,bsj->bts", y, y).softmax(-1), y)


class Crossed(nn.Module):
    """Queries that do not depend on the input, as the first decoder layer of a translator has them."""

    def forward(self, x):
        queries = torch.linspace(-1, 1, 6).reshape(1, 2, 3).to(x).expand(len(x), 2, 3)
        return nn.functional.scaled_dot_product_attention(queries, 2 * x, x)


class WrittenNorm(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        if self.form == "rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2)
        if self.form == "layer":
            return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-2)
        if self.form == "std":
            return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 0.1)
        return nn.functional.normalize(x, dim=-1, eps=0.1)


# Made inside the test, after the seed is set: a model made at import would differ from run to run.
SINGLE = {
    "LSTM": (lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), 0),
    "LSTM, batch second": (lambda: nn.LSTM(3, 4, proj_size=2), 1),
    "GRU": (lambda: nn.GRU(3, 4, batch_first=True), 0),
    "RNN": (lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False), 1),
    "encoder, batch second": (lambda: nn.TransformerEncoderLayer(3, 1, 5), 1),
    "attention": (lambda: nn.MultiheadAttention(3, 1, batch_first=True, add_bias_kv=True), 0),
    "einsum": (Einsums, 0),
    "crossed": (Crossed, 0),
    **{f"written {form}": (lambda form=form: WrittenNorm(form), 0) for form in ("rms", "layer", "std", "normalize")},
}


def first_output(model, x):
    out = model(x, x, x) if isinstance(model, nn.MultiheadAttention) else model(x)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", SINGLE)
def test_what_export_reads_is_bounded(name):
    torch.manual_seed(0)
    make, axis = SINGLE[name]
    model = make().double().eval()
    data = torch.randn(2, 4, 4 if name == "einsum" else 3).double()
    alone = lambda x: first_output(model, x.movedim(0, axis)).movedim(axis, 0)  # noqa: E731
    inputs = data.movedim(0, axis)
    bracket = ng.lipschitz(model, inputs, radius=0.05, forward=first_output, batch_axis=axis, climbs=1)
    near = steepest_near(alone, data, 0.05, torch.Generator().manual_seed(0))
    assert near <= bracket.upper <= 30 * near
    if name.startswith("written"):  # alone, the rule of the step is sharper than entries added up
        assert bracket.upper <= 1.2 * near and bracket.fallback == "it is below the enclosure's bound"
    else:
        assert not bracket.fallback
    free = ng.lipschitz(model, inputs, forward=first_output, batch_axis=axis, climbs=1)
    assert free.lower <= free.upper
    if name.startswith("written"):
        assert free.upper == pytest.approx(10, rel=1e-6)


def test_a_bound_that_says_nothing_is_called_vacuous_with_the_local_one_beside():
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    bracket = ng.lipschitz(net, torch.randn(2, 3, 8), climbs=1)
    assert bracket.vacuous and bracket.upper == math.inf and "has no constant on all inputs" in bracket.meaning()
    assert f"vacuous; at the data {bracket.at_data:.4g}" in str(bracket).splitlines()[0]
    assert "valid for this shape" in str(bracket) and bracket.shape == (1, 3, 8)


def test_ids_vary_in_their_embedding_and_others_are_refused():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.place = nn.Embedding(9, 4), nn.Embedding(5, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, ids):
            return self.head(self.place(torch.arange(ids.shape[1])) + self.table(ids)).tanh().sum(1)

    torch.manual_seed(0)
    model, ids = Bag(), torch.randint(9, (3, 5))
    bracket = ng.lipschitz(model, ids, radius=1e-4, climbs=1)
    embedded = model.table(ids).detach()
    after = lambda e: model.head(model.place(torch.arange(5)) + e).tanh().sum(1)  # noqa: E731
    truth = max(slope_at(after, e) for e in embedded)
    assert bracket.respect_to == "embedding of input by table"
    assert truth * 0.999 <= bracket.upper <= 1.01 * truth
    with pytest.raises(DataError, match="ids that an embedding reads"):
        ng.lipschitz(nn.Linear(3, 3), torch.arange(6).reshape(2, 3))
    with pytest.raises(ModelError, match="2 tensors"):
        ng.lipschitz(nn.GRU(3, 4, batch_first=True), torch.randn(2, 4, 3))


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
CONFIGURED = {
    "Bert": ("SequenceClassification", {"vocab_size": 40, **SIZES}),
    "GPT2": ("LMHeadModel", {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "Llama": ("ForCausalLM", {"vocab_size": 40, "num_key_value_heads": 1, **SIZES}),
    "T5": ("EncoderModel", {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}),
    "ViT": ("ImageClassification", {"image_size": 8, "patch_size": 4, **SIZES}),
    "ResNet": ("ImageClassification", {
        "embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}),
    "ConvNext": ("ImageClassification", {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURED)
def test_models_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    head, settings = CONFIGURED[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    head = head if head in ("LMHeadModel", "EncoderModel", "ForCausalLM") else f"For{head}"
    model = getattr(transformers, f"{name}{head}")(config).eval()
    images = name in ("ViT", "ResNet", "ConvNext")
    inputs = {"pixel_values": torch.rand(2, 3, 8, 8)} if images else {"input_ids": torch.randint(2, 40, (2, 4))}
    forward = lambda m, x: m(**x)[0] if name == "T5" else m(**x).logits  # noqa: E731
    bracket = ng.lipschitz(model, inputs, radius=1e-4, forward=forward, climbs=1)
    assert not bracket.fallback and bracket.jacobian_exact
    assert bracket.lower <= bracket.upper <= 20 * bracket.at_data < math.inf
    assert ("embedding of input_ids" in bracket.respect_to) is not images
