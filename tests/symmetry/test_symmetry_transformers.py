"""Models people download, built small from their configurations."""

import pytest
import torch

import normgauge as ng
from reference.symmetry import nullity
from symmetry.hunt import examine, table
from symmetry.zoo import Subject

transformers = pytest.importorskip("transformers")
EPS = 1e-14


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=9, n_positions=5, n_embd=8, n_layer=2, n_head=2, n_inner=10, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, layer_norm_epsilon=EPS, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), torch.randint(0, 9, (24, 5)), _logits("input_ids")


def llama():
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=12, intermediate_size=10, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, max_position_embeddings=6, rms_norm_eps=1e-6, use_cache=False,
        bos_token_id=0, eos_token_id=0, initializer_range=0.4,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), torch.randint(0, 11, (32, 5)), _logits("input_ids")


def vit():
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=10, image_size=8, patch_size=4,
        num_channels=2, hidden_dropout_prob=0, attention_probs_dropout_prob=0, layer_norm_eps=EPS, num_labels=6,
        initializer_range=0.4,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), torch.randn(160, 2, 8, 8), _logits("pixel_values")


def resnet():
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=4, hidden_sizes=[4, 6], depths=[1, 2], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config), torch.randn(48, 3, 16, 16), _logits("pixel_values")


def convnext():
    config = transformers.ConvNextConfig(
        num_channels=3, patch_size=2, num_stages=2, hidden_sizes=[4, 6], depths=[1, 2], image_size=16, num_labels=5,
        layer_scale_init_value=0.5,
    )  # fmt: skip
    return transformers.ConvNextForImageClassification(config), torch.randn(48, 3, 16, 16), _logits("pixel_values")


def _logits(key):
    return lambda model, inputs: model(**{key: inputs}).logits


def searched(build):
    model, inputs, forward = build()
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    data = (inputs, torch.zeros(len(inputs)))
    found = ng.symmetries(ng.Objective(model, lambda out, _: out.square().mean(), data, mode="train", forward=forward))
    return model, inputs, forward, found


def counts(found):
    """(kind, parameters without the block's number) -> generators."""
    table = {}
    for family in found.families:
        modules = (name.split(".")[-2] if "." in name else name for name in family.parameters)
        key = (family.kind, tuple(dict.fromkeys(modules)))
        table[key] = table.get(key, 0) + len(family)
    return table


def test_gpt2_has_the_nullity_of_its_jacobian():
    model, inputs, forward, found = searched(gpt2)
    batches = [inputs, *(torch.randint(0, 9, inputs.shape) for _ in range(1))]
    assert found.dimension + found.matrix_dimension == nullity(model, batches, mode="train", forward=forward)[0]
    heads = 2 * 2  # blocks, heads
    table = counts(found)
    assert table["dead", ("c_attn",)] == 2 * 8  # the keys' biases
    assert table["matrix", ("c_attn",)] == heads  # queries against keys
    assert table["matrix", ("c_attn", "c_proj")] == heads  # values against the output projection
    (stream,) = [f for f in found.families if f.size == 1 and f.kind == "rescale"]
    assert stream.status == "exact_without_eps"  # tied embeddings: the last gain pays for the stream's scale
    assert "transformer.ln_f.weight" in stream.parameters


def test_llama_has_rotary_planes_grouped_heads_and_a_rotating_stream():
    _, _, _, found = searched(llama)
    table = counts(found)
    assert table["rescale", ("q_proj", "k_proj")] == 3  # one per rotary plane, shared by the group's queries
    assert table["matrix", ("q_proj", "k_proj")] == 3
    assert table["matrix", ("v_proj", "o_proj")] == 1
    assert table["rescale", ("up_proj", "down_proj")] == 10
    groups = sorted((f.group, f.block) for f in found.families if f.kind == "matrix")
    assert groups == [("GL", 6), ("O", 2), ("O", 12)]
    (stream,) = [f for f in found.families if f.kind == "scale"]
    assert stream.status == "exact_without_eps" and stream.certificate["eps_effect"] > 0
    assert found.dimension == 1 + 3 * 12 + 10 + 6 + 3


def test_vit_absorbs_class_token_patches_and_positions():
    _, _, _, found = searched(vit)
    shifts = [f for f in found.families if f.kind == "shift" and any("position_embeddings" in n for n in f.parameters)]
    together = {name.split(".")[-1] for f in shifts for name in f.parameters}
    assert together >= {"cls_token", "position_embeddings", "bias"}
    assert [f.group for f in found.families if f.kind == "matrix" and f.block == 8] == ["O1"]


@pytest.mark.heavy
def test_vit_has_the_nullity_of_its_jacobian():
    model, inputs, forward, found = searched(vit)
    batches = [inputs, torch.randn_like(inputs)]
    assert found.dimension + found.matrix_dimension == nullity(model, batches, mode="train", forward=forward)[0]


def test_resnet_frees_every_filter_and_couples_every_gain():
    model, _, _, found = searched(resnet)
    filters = sum(m.out_channels for m in model.modules() if isinstance(m, torch.nn.Conv2d))
    scales = [f for f in found.families if f.kind == "scale"]
    assert sum(len(f) for f in scales) == filters
    assert {f.status for f in scales} == {"batch_statistics_only"}
    shifts = [f for f in found.families if f.kind == "shift"]
    assert [len(f) for f in shifts] == [6]  # the shortcut's beta against that of the main branch
    blocks = {f.size for f in found.families if f.kind == "rescale"}
    assert blocks == {4, 6}


def test_convnext_has_layer_scales_and_joint_scales_of_its_depthwise_filters():
    _, _, _, found = searched(convnext)
    table = counts(found)
    scale = next(k for k in table if k[0] == "scale" and "dwconv" in k[1])
    assert table[scale] == 3  # blocks
    rescaled = [f for f in found.families if any("layer_scale_parameter" in n for n in f.parameters)]
    assert sum(len(f) for f in rescaled if f.kind == "rescale" and f.size > 1) == 4 + 6 + 6
    assert {f.status for f in found.families} <= {"exact", "exact_without_eps"}


def test_half_a_table_of_positions_is_not_certified_against_the_unused_half():
    """Rows i and 16 + i changed against each other move the unused one alone: that is no news about the network."""
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=6,
        max_position_embeddings=32, type_vocab_size=1, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model, tokens = transformers.BertModel(config).double(), torch.randint(1, 60, (16, 16))
    forward = lambda net, inputs: net(input_ids=inputs).last_hidden_state  # noqa: E731
    data = (tokens, torch.zeros(16))
    result = ng.symmetries(ng.Objective(model, lambda out, _: out.square().mean(), data, mode="eval", forward=forward))
    table = "embeddings.position_embeddings.weight"
    assert result.unobserved[table] == 16 * 8
    for family in result.families:
        if family.kind != "matrix" and table in family.parameters:
            field = family.field(dict(result.parameters), torch.randn(len(family), dtype=torch.float64))
            field[table][16:] = 0.0
            assert max(float(value.abs().max()) for value in field.values()) > 0, family.describe()


# -- at default initialization --------------------------------------------------------------------------------------


class Outputs(torch.nn.Module):
    def __init__(self, model, key):
        super().__init__()
        self.model, self.key = model, key

    def forward(self, inputs):
        out = self.model(**{self.key: inputs})
        return out.logits if "logits" in out else out.last_hidden_state


SMALL = {"hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 13}
PADS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "use_cache": False, "max_position_embeddings": 6}
GROUPED = SMALL | PADS | {"num_key_value_heads": 1, "head_dim": 6}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DEFAULTS = {  # class, configuration, settings
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": 9, "n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 6, "bos_token_id": 0,
        "eos_token_id": 0, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "use_cache": False}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GROUPED),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL | PADS),
    "opt": ("OPTForCausalLM", "OPTConfig", {
        "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "ffn_dim": 6, "num_attention_heads": 2,
        "max_position_embeddings": 6, "word_embed_proj_dim": 8, "dropout": 0.0, "pad_token_id": None, "bos_token_id": 0,
        "eos_token_id": 0, "use_cache": False}),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL | QUIET | {
        "max_position_embeddings": 6, "type_vocab_size": 1, "pad_token_id": None}),
    "t5": ("T5EncoderModel", "T5Config", {
        "vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 6, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
        "relative_attention_num_buckets": 8}),
    "vit": ("ViTForImageClassification", "ViTConfig", SMALL | QUIET | {  # one layer would read one query
        "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4,
        "num_channels": 2, "num_labels": 5}),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", {
        "num_channels": 2, "patch_size": 2, "num_stages": 2, "hidden_sizes": [4, 6], "depths": [1, 1],
        "image_size": 16, "num_labels": 5}),
}  # fmt: skip


def subject_of(name):
    cls, configuration, settings = DEFAULTS[name]
    torch.manual_seed(0)
    settings = {k: v for k, v in settings.items() if not (k == "vocab_size" and "image_size" in settings)}
    model = getattr(transformers, cls)(getattr(transformers, configuration)(**settings)).double()
    if "image_size" in settings:
        size, channels = settings["image_size"], settings["num_channels"]
        return Subject(name, Outputs(model, "pixel_values"), torch.randn(48, channels, size, size), "eval", name)
    tokens = torch.randint(0, settings["vocab_size"], (24, 6))
    return Subject(name, Outputs(model, "input_ids"), tokens, "eval", name)


# directions without closed form that walks do not count (docs/dev/symmetry-discovery.md)
MISSED = {"convnext": 26}


@pytest.mark.heavy
def test_twelve_configurations_at_default_initialization(record_property):
    outcomes = [examine(0, subject_of(name)) for name in DEFAULTS]
    record_property("counts", table(outcomes))
    assert len(outcomes) == 12 and not any(outcome.false for outcome in outcomes)
    assert [(o.kind, o.missed) for o in outcomes if o.missed > MISSED.get(o.kind, 0)] == []
