# ruff: noqa: C408, E501
"""`against`: seeded port faults are named with layer and cause; equal models have none."""

import copy

import pytest
import torch
from torch import nn

import normgauge as ng

transformers = pytest.importorskip("transformers")
IDS = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TEXT = dict(vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)


def build(kind):
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8))
    elif kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=32)
        )
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, max_position_embeddings=32))
    else:
        config = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=3
        )
        model = transformers.ResNetForImageClassification(config).train()
        with torch.no_grad():
            for _ in range(8):
                model(IMAGES.to(torch.get_default_dtype()))
    for name, p in model.named_parameters():  # gains away from their start, as in a trained checkpoint
        if p.ndim == 1:
            nn.init.uniform_(p, 0.5, 1.5) if "weight" in name else nn.init.normal_(p, 0, 0.1)
    return model.eval()


class Coarse(nn.Module):
    """A norm computed in bfloat16."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        w, eps = self.norm.weight, getattr(self.norm, "variance_epsilon", getattr(self.norm, "eps", 1e-5))
        y = x.to(torch.bfloat16)
        y = y - y.mean(-1, keepdim=True) if isinstance(self.norm, nn.LayerNorm) else y
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * w
        return y + self.norm.bias if isinstance(self.norm, nn.LayerNorm) else y


class PlusOne(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)).to(x.dtype)


class Full(nn.Module):
    """QK-norm over all heads at once."""

    def __init__(self, norm, heads):
        super().__init__()
        self.weight, self.eps, self.heads = norm.weight, norm.variance_epsilon, heads

    def forward(self, x):
        y = x.flatten(-2).float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y.view(x.shape) * self.weight).to(x.dtype)


def rope_first(attention):
    """Apply the rotation before the norms."""
    from transformers.models.qwen3 import modeling_qwen3 as source

    class RopeFirst(source.Qwen3Attention):
        def forward(self, hidden_states, position_embeddings, attention_mask=None, **rest):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q, k, v = (f(hidden_states).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
            q, k = source.apply_rotary_pos_emb(q, k, *position_embeddings)
            out, weights = source.eager_attention_forward(
                self, self.q_norm(q), self.k_norm(k), v, attention_mask, scaling=self.scaling, dropout=0.0
            )
            return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    attention.__class__ = RopeFirst


class Unbiased(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        unit = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.norm.eps).sqrt()
        return self.norm.weight * unit + self.norm.bias


class ToRms(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def set_eps(model, name, eps):
    norm = model.get_submodule(name)
    setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", eps)


def put(model, name, make):
    parent, _, last = name.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, last, make(getattr(owner, last)))


def all_eps(model, eps):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = eps
        elif isinstance(module, nn.LayerNorm):
            module.eps = eps


def shift_gain(model, name):
    with torch.no_grad():
        model.get_submodule(name).weight.add_(1)


def batch_statistics(norm):
    norm.train(True)
    norm.train = lambda mode=True: norm
    norm.momentum = 0.0
    return norm


LAYER = "model.layers.1."
FAULTS = {
    "llama eps everywhere": ("llama", lambda m: all_eps(m, 1e-5), "model.layers.0.input_layernorm", "eps"),
    "llama eps once": ("llama", lambda m: set_eps(m, LAYER + "input_layernorm", 1e-4), LAYER + "input_layernorm", "eps"),
    "llama norm skipped": (
        "llama", lambda m: put(m, LAYER + "post_attention_layernorm", lambda n: nn.Identity()),
        LAYER + "post_attention_layernorm", "skipped norm"),
    "llama last norm skipped": ("llama", lambda m: put(m, "model.norm", lambda n: nn.Identity()), "model.norm", "skipped norm"),
    "llama gain shifted by one": ("llama", lambda m: shift_gain(m, "model.norm"), "model.norm", "1+w"),
    "llama computes 1+w": ("llama", lambda m: put(m, LAYER + "input_layernorm", PlusOne), LAYER + "input_layernorm", "1+w"),
    "llama norm in bfloat16": ("llama", lambda m: put(m, LAYER + "input_layernorm", Coarse), LAYER + "input_layernorm", "precision"),
    "qwen3 norm over all heads": (
        "qwen3", lambda m: put(m, LAYER + "self_attn.q_norm", lambda n: Full(n, 4)), LAYER + "self_attn.q_norm",
        "QK-norm per head or full"),
    "qwen3 rope first": (
        "qwen3", lambda m: rope_first(m.model.layers[1].self_attn), LAYER + "self_attn.q_norm", "order with RoPE"),
    "qwen3 k_norm skipped": (
        "qwen3", lambda m: put(m, LAYER + "self_attn.k_norm", lambda n: nn.Identity()), LAYER + "self_attn.k_norm", "skipped norm"),
    "qwen3 eps of k_norm": ("qwen3", lambda m: set_eps(m, LAYER + "self_attn.k_norm", 1e-3), LAYER + "self_attn.k_norm", "eps"),
    "gpt2 eps": ("gpt2", lambda m: all_eps(m, 1e-6), "transformer.h.0.ln_1", "eps"),
    "gpt2 norm skipped": ("gpt2", lambda m: put(m, "transformer.h.1.ln_2", lambda n: nn.Identity()), "transformer.h.1.ln_2", "skipped norm"),
    "gpt2 without centring": ("gpt2", lambda m: put(m, "transformer.h.2.ln_1", ToRms), "transformer.h.2.ln_1", "kind of norm"),
    "gpt2 unbiased variance": (
        "gpt2", lambda m: put(m, "transformer.h.1.ln_1", Unbiased), "transformer.h.1.ln_1", "constant factor"),
    "bert eps": ("bert", lambda m: all_eps(m, 1e-5), "bert.embeddings.LayerNorm", "eps"),
    "bert norm in bfloat16": (
        "bert", lambda m: put(m, "bert.encoder.layer.1.output.LayerNorm", Coarse), "bert.encoder.layer.1.output.LayerNorm", "precision"),
    "resnet stale statistics": (
        "resnet", lambda m: m.get_submodule("resnet.encoder.stages.1.layers.0.layer.0.normalization").reset_running_stats(),
        "resnet.encoder.stages.1.layers.0.layer.0.normalization", "stale statistics"),
    "resnet batch statistics": (
        "resnet", lambda m: put(m, "resnet.encoder.stages.0.layers.1.layer.0.normalization", batch_statistics),
        "resnet.encoder.stages.0.layers.1.layer.0.normalization", "row dependence"),
    "resnet eps": (
        "resnet", lambda m: set_eps(m, "resnet.embedder.embedder.normalization", 1e-3), "resnet.embedder.embedder.normalization", "eps"),
}  # fmt: skip


def look(model, other, kind):
    batch = {"pixel_values": IMAGES.to(torch.get_default_dtype())} if kind == "resnet" else {"input_ids": IDS}
    return ng.checkup(model, batch, against=other, quick=True)


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_port_faults_are_named(name):
    kind, spoil, where, cause = FAULTS[name]
    model = build(kind)
    other = copy.deepcopy(model)
    spoil(other)
    for one, two in ((model, other), (other, model)):
        found = look(one, two, kind).divergence
        assert found is not None
        assert (found.where.removesuffix(".norm") if "norm." in found.where else found.where, found.cause) == (
            where,
            cause,
        ), found
        assert found.size > 0


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "bert", "resnet"])
def test_equal_models_do_not_diverge(kind):
    model = build(kind)
    checkup = look(model, copy.deepcopy(model), kind)
    assert checkup.divergence is None and "The two models agree" in checkup.text()
