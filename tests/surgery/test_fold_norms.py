"""Folding: exact or refused; the failures of torch.fx's fusion and of others are cases here."""

import sys

import pytest
import torch
from operations import CONFIGS, EXAMPLE, convolutional, hugging_face, quick, same_state, shaken, state
from torch import nn

import normgauge as ng
from normgauge.errors import ModelError

pytestmark = pytest.mark.usefixtures("single_precision")
IMAGES = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


def folded(model, example=IMAGES, **options):
    before, training = state(model), model.training
    done = ng.fold_norms(model, example=example, **options)
    assert same_state(model, before) and model.training == training == done.model.training
    assert done.proof <= 1e-10 and done.change <= 1e-5
    return done


def test_batch_norms_before_and_after_convolutions_transposed_ones_and_linear_layers():
    model = convolutional()
    done = folded(model)
    assert not done.refused and done.cost.forwards == 5
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in done.model.modules())
    fresh = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(done.model(fresh), model(fresh), rtol=1e-4, atol=1e-4)
    assert {row["precision"] for row in done.proofs} == {"float64", "float32"}
    assert {row["inputs"] for row in done.proofs} == {"example", "fresh"}
    torch.testing.assert_close(done.undo()(fresh), model(fresh), rtol=0, atol=0)


def test_a_shift_does_not_go_through_padding():
    done = folded(convolutional(padding=1))
    assert dict(done.refused).keys() == {"0"} and "padding of 1" in dict(done.refused)["0"]
    reflecting = shaken(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect"))).eval()
    assert not folded(reflecting).refused
    transposed = shaken(nn.Sequential(nn.BatchNorm2d(3), nn.ConvTranspose2d(3, 2, 3))).eval()
    assert "borders" in folded(transposed).refused[0][1]


class Reused(nn.Module):
    """The convolution's output is read without its normalizer too: torch.fx's fusion is silently wrong here."""

    def __init__(self, twice=False):
        super().__init__()
        self.conv, self.bn, self.twice = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), twice

    def forward(self, x):
        y = self.conv(x)
        return self.bn(y) + (self.bn(self.conv(y)) if self.twice else y)


@pytest.mark.parametrize("twice", [False, True])
def test_a_producer_that_is_used_twice_is_refused(twice):
    done = folded(shaken(Reused(twice)).eval())
    assert len(done.refused) == (2 if twice else 1) and isinstance(done.model.bn, nn.BatchNorm2d)


def test_what_is_no_map_of_stored_statistics_is_refused():
    class WithActivation(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x).relu()

    batch = nn.BatchNorm1d(4, track_running_stats=False)
    broken = shaken(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    broken[1].running_var[0] = torch.nan
    tied = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    cases = {
        "does more": nn.Sequential(nn.Linear(3, 4), WithActivation(4)),
        "running statistics": nn.Sequential(nn.Linear(3, 4), batch),
        "finite": broken,
        "parametrization": nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4)),
        "tied": tied,
    }
    for reason, model in cases.items():
        done = ng.fold_norms(model, example=torch.randn(6, model[0].in_features))
        assert reason in done.refused[0][1], reason
        assert type(done.model[1]) is type(model[1]) and done.proof == 0


def test_other_axes_than_the_channels_are_refused():
    model = shaken(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))).eval()  # (N, 4, 5) -> channels on axis 1
    done = ng.fold_norms(model, example=torch.randn(3, 4, 5))
    assert done.refused and isinstance(done.model[1], nn.BatchNorm1d)


def test_a_train_mode_model_is_folded_by_its_stored_statistics():
    model = convolutional().train()
    done = folded(model)
    torch.testing.assert_close(done.model.eval()(IMAGES), model.eval()(IMAGES), rtol=1e-4, atol=1e-4)


def test_inplace_changes_the_model_itself_and_undo_brings_it_back():
    model = convolutional()
    weight, before, expected = model[1].weight, state(model), model(IMAGES)
    done = ng.fold_norms(model, example=IMAGES, inplace=True)
    assert done.model is model and model[1].weight is weight and isinstance(model[2], nn.Identity)
    torch.testing.assert_close(model(IMAGES), expected, rtol=1e-4, atol=1e-4)
    assert done.undo() is model and same_state(model, before)


def test_scales_of_any_size_and_half_precision():
    for scale in (1e-3, 1e3):
        model = convolutional()
        with torch.no_grad():
            for value in model.parameters():
                value.mul_(scale)
        assert ng.fold_norms(model, example=IMAGES).proof <= 1e-10
    halved = convolutional().bfloat16()
    done = ng.fold_norms(halved, example=IMAGES.bfloat16())
    assert done.proof <= 1e-10 and done.proofs[-1]["precision"] == "bfloat16" and done.change < 0.1
    assert all(value.dtype == torch.bfloat16 for value in done.model.parameters())


def test_layer_norm_gains_go_into_all_that_read_them_or_stay():
    class Branches(nn.Module):
        def __init__(self, gate):
            super().__init__()
            self.norm, self.a, self.b, self.gate = nn.LayerNorm(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4), gate

        def forward(self, x):
            y = self.norm(x)
            return self.a(y) * (torch.sigmoid(y) if self.gate else self.b(y.reshape(-1, 1, 4)).reshape(x.shape))

    done = folded(shaken(Branches(gate=False)), torch.randn(6, 4))
    assert (done.model.norm.weight == 1).all() and (done.model.norm.bias == 0).all() and done.model.a.bias is not None
    done = folded(shaken(Branches(gate=True)), torch.randn(6, 4))
    assert "sigmoid" in dict(done.refused)["norm"]


def test_the_transformer_of_torch():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, norm_first=True, batch_first=True)
    model = shaken(nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))).eval()
    done = folded(model, torch.randn(2, 5, 3))
    assert not done.refused and sum("folded" in row["what"] for row in done.rows) == 4
    post = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    done = folded(shaken(nn.Sequential(nn.Linear(3, 8), post)).eval(), torch.randn(2, 5, 3))
    assert len(done.refused) == 2


REFUSED = {
    "qwen3": 4, "gpt2": 1, "starcoder2": 1, "gemma2": 5, "olmo2": 8, "bert": 5, "deepseek_experts": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", quick(CONFIGS))
def test_hugging_face(name):
    pytest.importorskip("transformers")
    done = folded(hugging_face(name), EXAMPLE)
    assert len(done.refused) == REFUSED.get(name, 0), done.refused
    assert any("folded" in row["what"] for row in done.rows)
    if name == "gemma2":  # 1 + w: a gain of one is stored as zero
        assert (done.model.model.layers[0].input_layernorm.weight == 0).all()
        assert "added" in dict(done.refused)["model.layers.0.post_attention_layernorm"]
    if name in ("gpt2", "gemma2", "starcoder2"):
        assert any("untie=True" in reason for _, reason in done.refused)
        parted = folded(hugging_face(name), EXAMPLE, untie=True)
        head, table = parted.model.get_output_embeddings().weight, parted.model.get_input_embeddings().weight
        assert head is not table and not parted.model.config.tie_word_embeddings


def test_a_forward_that_asks_for_values_is_refused_and_wrong_examples_are_explained():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(3), nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(self.norm(x)) if x.sum() > 0 else x

    done = ng.fold_norms(Branching(), example=torch.ones(2, 3))
    assert "hold for all" in done.refused[0][1] and done.model.norm.weight is not None
    with pytest.raises(ModelError, match="example"):
        ng.fold_norms(convolutional(), example=torch.ones(2, 5))


def test_a_mistake_is_caught_by_the_proof(monkeypatch):
    room = sys.modules["normgauge.surgery.fold_norms"]
    monkeypatch.setattr(room, "fold_channels", lambda layer, weight, *_, **__: weight * 1.001)
    done = ng.fold_norms(convolutional(), example=IMAGES)
    assert "would move by" in done.refused[0][1] and done.proof == 0
    assert same_state(done.model, state(convolutional()))


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)])
def test_a_model_that_is_one_layer_is_left_alone(model):
    example = torch.randn(6, 4)
    assert ng.fold_norms(model.eval(), example=example).meaning().startswith("Nothing was done")
    assert ng.prune_norms(model.eval(), "gamma", 0.4, example).meaning().startswith("Nothing was done")
