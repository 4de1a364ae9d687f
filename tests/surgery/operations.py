"""Models for the tests of surgery: small ones of every kind, and configurations of Hugging Face."""

import pytest
import torch
from torch import nn

TOKENS = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))
EXAMPLE = {"input_ids": TOKENS, "use_cache": False}
BASE = {
    **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "pad_token_id": None}
LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
    **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    **{"n_shared_experts": 1, "num_key_value_heads": 4, "experts_implementation": "eager"},
}
CONFIGS = {
    "llama": ("Llama", "ForCausalLM", {}),
    "qwen2": ("Qwen2", "ForCausalLM", {}),
    "qwen3": ("Qwen3", "ForCausalLM", {"head_dim": 4}),
    "mistral": ("Mistral", "ForCausalLM", {}),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", {}),
    "granite": ("Granite", "ForCausalLM", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "starcoder2": ("Starcoder2", "ForCausalLM", {}),
    "gemma2": ("Gemma2", "ForCausalLM", {"head_dim": 4}),
    "olmo2": ("Olmo2", "ForCausalLM", {}),
    "bert": ("Bert", "ForMaskedLM", {}),
    "deepseek": ("DeepseekV3", "ForCausalLM", {**LATENT, "first_k_dense_replace": 2}),
    "deepseek_experts": ("DeepseekV3", "ForCausalLM", {**LATENT, "first_k_dense_replace": 1}),
}
ROTATES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "granite", "starcoder2", "deepseek")


def quick(names, few=("llama", "gpt2", "gemma2")):
    """Return the names as parameters of a test, all but a few of them for the long suite."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.heavy) for name in names]


def hugging_face(name, **more):
    """Return a tiny model with gains, shifts and biases that differ from those of its initialization."""
    import transformers

    transformers.logging.set_verbosity_error()
    family, head, own = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **own, **more})
    return shaken(getattr(transformers, f"{family}{head}")(config).eval())


def shaken(model, seed=0):
    """Move every parameter, and give statistics values that differ between channels."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.add_((0.3 if value.ndim == 1 else 0.1) * torch.randn(value.shape, generator=source).to(value))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=source))
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=source) + 0.5)
    return model


def convolutional(padding=0):
    torch.manual_seed(0)
    return shaken(
        nn.Sequential(
            nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3, padding=padding), nn.BatchNorm2d(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 4, 2, groups=2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
            nn.Linear(4 * (7 + 2 * padding) ** 2, 6), nn.BatchNorm1d(6, affine=False),
        )
    ).eval()  # fmt: skip


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_state(model, before):
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], value) for name, value in before.items())
