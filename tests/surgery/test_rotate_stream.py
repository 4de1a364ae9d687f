"""The stream: centred, rotated, the same function; and where it is not, the reason."""

import pytest
import torch
from operations import CONFIGS, EXAMPLE, ROTATES, hugging_face, quick, same_state, shaken, state
from torch import nn

import normgauge as ng
from normgauge.errors import InputError, UnknownNameError
from normgauge.surgery import ShiftedRMSNorm

pytestmark = pytest.mark.usefixtures("single_precision")
LAYER_NORM = ("gpt2", "gpt_neox", "starcoder2")


def block(norm=nn.RMSNorm, width=8, out=True):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = norm(width), nn.Linear(width, 12), nn.Linear(12, width)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    ends = [norm(width), nn.Linear(width, 3)] if out else []
    return shaken(nn.Sequential(nn.Linear(5, width), Block(), Block(), *ends))


@pytest.mark.parametrize("name", quick(ROTATES))
def test_rotation_of_hugging_face_models(name):
    pytest.importorskip("transformers")
    model = hugging_face(name)
    before = state(model)
    done = ng.rotate_stream(model, example=EXAMPLE, untie=True)
    assert same_state(model, before) and not done.refused and done.cost.forwards == 5
    assert done.proof <= 1e-10 and done.change <= 1e-5
    table = model.get_input_embeddings().weight
    assert (done.model.get_input_embeddings().weight - table).norm() > 0.3 * table.norm()


@pytest.mark.parametrize("name", quick(sorted(set(CONFIGS) - set(ROTATES)), ("gemma2", "deepseek_experts")))
def test_sandwich_post_norm_and_experts_are_refused(name):
    pytest.importorskip("transformers")
    model = hugging_face(name)
    done = ng.rotate_stream(model, example=EXAMPLE, untie=True)
    assert done.refused and same_state(done.model, state(model))
    reason = "experts" if name == "deepseek_experts" else "added to other values"
    assert any(reason in why for _, why in done.refused)


@pytest.mark.parametrize("name", quick(LAYER_NORM))
def test_layer_norm_becomes_rms_norm(name):
    pytest.importorskip("transformers")
    model = hugging_face(name)
    done = ng.layer_to_rms(model, example=EXAMPLE, untie=True)
    assert not done.refused and done.proof <= 1e-10
    assert not any(isinstance(module, nn.LayerNorm) for module in done.model.modules())
    assert sum(isinstance(module, ShiftedRMSNorm) for module in done.model.modules()) == 5
    if name != "gpt_neox":
        assert all("untie" in why for _, why in ng.layer_to_rms(model, example=EXAMPLE).refused)


def test_tied_embeddings_may_stay_where_the_last_gain_is_one():
    pytest.importorskip("transformers")
    model = hugging_face("gpt2")
    nn.init.ones_(model.transformer.ln_f.weight)
    nn.init.zeros_(model.transformer.ln_f.bias)
    done = ng.rotate_stream(model, example=EXAMPLE)
    assert not done.refused and done.proof <= 1e-10
    assert done.model.lm_head.weight is done.model.transformer.wte.weight


def test_post_norm_is_refused_by_name():
    pytest.importorskip("transformers")
    done = ng.layer_to_rms(hugging_face("bert"), example=EXAMPLE, untie=True)
    assert "writes into the stream" in dict(done.refused)["bert.encoder.layer.0.output.LayerNorm"]
    assert done.proof <= 1e-10


@pytest.mark.parametrize("rotation", ["random", "pca", "hadamard", None, torch.eye(8).flip(0)])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_rotations(rotation, norm):
    done = ng.rotate_stream(block(norm), rotation, example=torch.randn(4, 6, 5))
    assert not done.refused and done.proof <= 1e-10


def test_principal_axes_are_ordered_by_variance():
    model = block()
    turned = ng.rotate_stream(model, "pca", example=(inputs := torch.randn(40, 5))).model
    seen = []
    for module in (turned[1].norm, turned[2].norm, turned[3]):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    turned(inputs)
    second = torch.cat(seen).T @ torch.cat(seen)
    assert (second.diagonal().diff() <= 1e-3).all()
    assert (second - torch.diag(second.diagonal())).abs().max() < 1e-3 * second.max()


def test_streams_that_meet_anything_else_are_refused():
    class Reader(nn.Module):
        def __init__(self, read):
            super().__init__()
            self.inside, self.read = block(out=False), read

        def forward(self, x):
            return self.read(self.inside(x))

    cases = {
        "output of the model": block(out=False),
        "no linear map (relu)": Reader(torch.relu),
        "no linear map (mul)": Reader(lambda x: (x * x).sum(-1)),
        "no linear map (add)": Reader(lambda x: (x + 1.0).sum(-1)),
    }
    for reason, model in cases.items():
        done = ng.rotate_stream(model, example=torch.randn(4, 5))
        assert any(reason in why for _, why in done.refused), (reason, done.refused)
        assert same_state(done.model, state(model))
    done = ng.rotate_stream(block()[1:], example=torch.randn(4, 8))
    assert any("input is part" in why for _, why in done.refused)
    done = ng.rotate_stream(nn.Sequential(nn.Linear(3, 3)), example=torch.randn(4, 3))
    assert "no normalizer" in done.refused[0][1]


def test_a_linear_layer_that_reads_the_mean_keeps_layer_norm():
    class Peeking(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.norm, self.a, self.b = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            x = self.start(x)
            return self.a(self.norm(x)) + self.b(x)

    done = ng.layer_to_rms(shaken(Peeking()), example=torch.randn(5, 3))
    assert "b: it reads the mean" in dict(done.refused)["norm"] and isinstance(done.model.norm, nn.LayerNorm)


def test_wrong_rotations_are_explained():
    with pytest.raises(UnknownNameError, match="hadamard"):
        ng.rotate_stream(block(), "hadamrd", example=torch.randn(4, 5))
    with pytest.raises(InputError, match="orthogonal"):
        ng.rotate_stream(block(), torch.ones(8, 8), example=torch.randn(4, 5))
    with pytest.raises(InputError, match="power of two"):
        ng.rotate_stream(block(width=6), "hadamard", example=torch.randn(4, 5))


@pytest.mark.parametrize("name", quick(["llama", "gpt2"], ("llama",)))
def test_greedy_tokens_are_the_same_on_200_prompts(name):
    pytest.importorskip("transformers")
    model = hugging_face(name)
    turned = ng.rotate_stream(ng.fold_norms(model, example=EXAMPLE, untie=True).model, example=EXAMPLE).model
    prompts = torch.randint(3, 64, (200, 6), generator=torch.Generator().manual_seed(5))
    for _ in range(8):
        steps = [m(prompts, use_cache=False).logits[:, -1].argmax(-1) for m in (model, turned)]
        assert torch.equal(*steps)
        prompts = torch.cat([prompts, steps[0][:, None]], 1)


@pytest.mark.heavy
def test_folding_gpt2_small_takes_five_forward_passes():
    transformers = pytest.importorskip("transformers")
    model = shaken(transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval())
    example = {"input_ids": torch.randint(0, 50257, (1, 8)), "use_cache": False}
    done = ng.fold_norms(model, example=example, untie=True)
    assert done.cost.forwards <= 5 and done.proof <= 1e-10 and not done.refused
