"""Clean models: stock architectures with correct decay groups after fifty steps of training."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from benchmarks.doctor.cases import RMS, Former, conv_net, groups, images, mlp, sequences, train, vectors

STEPS = 50
TEXT = dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
LLAMA = dict(**TEXT, num_key_value_heads=2, max_position_embeddings=64, head_dim=8, pad_token_id=0)
#: class of transformers -> what its config is told
CAUSAL = {
    "GPT2": dict(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    "Llama": LLAMA, "Mistral": LLAMA, "Qwen2": LLAMA, "Qwen3": LLAMA, "Gemma": LLAMA, "Gemma2": LLAMA, "Olmo": LLAMA, "Olmo2": LLAMA,
    "Cohere": LLAMA, "Phi3": LLAMA, "Phi": TEXT, "Granite": LLAMA, "StableLm": LLAMA, "Starcoder2": LLAMA, "GPTNeoX": TEXT,
    "Bloom": dict(vocab_size=64, hidden_size=32, n_layer=3, n_head=4), "OPT": dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64),
    "Mamba": dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, state_size=8),
}  # fmt: skip
SMALL = dict(decoder_start_token_id=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
#: met only after all rules were written
LATER = {
    "T5": ("ForConditionalGeneration", dict(SMALL, vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)),
    "Bart": ("ForConditionalGeneration", dict(SMALL, vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64)),
    "Mixtral": ("ForCausalLM", dict(LLAMA, num_local_experts=2)), "Falcon": ("ForCausalLM", {k: v for k, v in TEXT.items() if k != "intermediate_size"}),
    "GPTJ": ("ForCausalLM", dict(vocab_size=64, n_embd=32, n_layer=3, n_head=4, rotary_dim=4, n_positions=64)),
    "MPNet": ("ForMaskedLM", dict(TEXT, max_position_embeddings=70)), "MobileBert": ("ForMaskedLM", dict(TEXT, embedding_size=16, intra_bottleneck_size=16)),
    "Mamba2": ("ForCausalLM", dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8)),
    "Olmo3": ("ForCausalLM", LLAMA), "Glm4": ("ForCausalLM", LLAMA), "Nemotron": ("ForCausalLM", LLAMA), "Cohere2": ("ForCausalLM", LLAMA), "SmolLM3": ("ForCausalLM", LLAMA),
    "Bit": ("ForImageClassification", dict(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], num_labels=2, num_groups=4)),
    "FocalNet": ("ForImageClassification", dict(image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3], num_labels=2)),
}  # fmt: skip
MASKED = {
    "Bert": dict(**TEXT, max_position_embeddings=64), "Roberta": dict(**TEXT, max_position_embeddings=70),
    "Albert": dict(**TEXT, embedding_size=16, max_position_embeddings=64), "Electra": dict(**TEXT, embedding_size=16),
    "DistilBert": dict(vocab_size=64, dim=32, n_layers=3, n_heads=4, hidden_dim=64), "DebertaV2": TEXT,
}  # fmt: skip
PICTURE = dict(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
)
VISION = {
    "ViT": PICTURE, "DeiT": PICTURE, "Beit": PICTURE, "Dinov2": PICTURE,
    "Swin": dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "ConvNext": dict(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, patch_size=2),
    "ConvNextV2": dict(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, patch_size=2),
    "ResNet": dict(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic"),
    "RegNet": dict(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], groups_width=8),
    "Segformer": dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    "PoolFormer": dict(num_encoder_blocks=2, depths=[2, 2], hidden_sizes=[16, 32], patch_sizes=[3, 3], strides=[2, 2], padding=[1, 1]),
}  # fmt: skip


class Residual(nn.Module):
    """A basic block."""

    def __init__(self, a, b, stride, norm):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), norm(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), norm(b)
        self.downsample = (
            nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), norm(b)) if a != b or stride > 1 else nn.Identity()
        )

    def forward(self, x):
        """Two convolutions and a skip."""
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.downsample(x))


def resnet18(norm=nn.BatchNorm2d, width=16):
    """Return a ResNet-18 for small images."""
    torch.manual_seed(0)
    layers, last = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width), nn.ReLU()], width
    for stage in range(4):
        for block in range(2):
            layers.append(Residual(last, width << stage, 2 if stage and not block else 1, norm))
            last = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 4))


class UNet(nn.Module):
    """One level down and up."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        cell = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())  # noqa: E731
        self.down, self.middle, self.up = cell(3, 16), cell(16, 32), cell(32, 16)
        self.lift, self.last = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        """Down, middle, up with a skip, mean over the image."""
        a = self.down(x)
        b = self.lift(self.middle(F.max_pool2d(a, 2)))
        return self.last(self.up(torch.cat([a, b], 1))).mean((2, 3))


class Mixer(nn.Module):
    """Two mixer blocks."""

    def __init__(self, width=16, length=10):
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    n1=nn.LayerNorm(width),
                    t=nn.Linear(length, length),
                    n2=nn.LayerNorm(width),
                    c=nn.Linear(width, width),
                )
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x):
        """Mix tokens, mix channels."""
        for b in self.blocks:
            x = x + F.gelu(b["t"](b["n1"](x).transpose(1, 2))).transpose(1, 2)
            x = x + F.gelu(b["c"](b["n2"](x)))
        return self.head(self.norm(x).mean(1))


class Recurrent(nn.Module):
    """An LSTM with LayerNorm."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.lstm, self.norm, self.head = nn.LSTM(16, 24, batch_first=True), nn.LayerNorm(24), nn.Linear(24, 4)

    def forward(self, x):
        """Last state, norm, head."""
        return self.head(self.norm(self.lstm(x)[0][:, -1]))


def own_model(build, batch):
    """Return what makes a trained model of ours."""

    def make():
        model = build()
        optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
        train(model, batch, STEPS, optimizer=optimizer)
        return dict(model=model, batch=batch, optimizer=optimizer)

    return make


def hf_model(kind, head, config, batch, step):
    """Return what makes a trained model of transformers."""

    def make():
        import transformers

        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}{head}")(getattr(transformers, f"{kind}Config")(**config))
        optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
        train(model, batch, STEPS, optimizer=optimizer, loss=step)
        outputs = lambda m, b: m(**{k: v for k, v in b.items() if k != "labels"}).logits  # noqa: E731
        objective = ng.Objective.from_step(model, step, batch, mode="train", outputs=outputs)
        return dict(objective=objective, optimizer=optimizer)

    return make


def zoo():
    """Return name -> what makes the arguments of `checkup`."""
    picture, flat, rows = images(32, 16), vectors(128), sequences(32)
    ids = torch.randint(1, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    text, shown = (
        dict(input_ids=ids, labels=ids),
        dict(pixel_values=images(16, 32)[0], labels=images(16, 32, classes=2)[1]),
    )
    own_loss = lambda m, b: m(**b).loss  # noqa: E731
    made = {
        "mlp_batch": own_model(mlp, flat), "mlp_layer": own_model(lambda: mlp(norm=nn.LayerNorm), flat),
        "mlp_deep_batch": own_model(lambda: mlp(depth=5, width=32), flat),
        "conv_batch": own_model(conv_net, picture), "conv_group": own_model(lambda: conv_net(norm=lambda w: nn.GroupNorm(4, w)), picture),
        "conv_instance": own_model(lambda: conv_net(norm=lambda w: nn.InstanceNorm2d(w, affine=True)), picture),
        "conv_bias_batch": own_model(lambda: conv_net(bias=True), picture),
        "resnet18_batch": own_model(resnet18, picture), "resnet18_group": own_model(lambda: resnet18(lambda w: nn.GroupNorm(4, w)), picture),
        "unet": own_model(UNet, picture), "mixer": own_model(Mixer, rows), "lstm_layer": own_model(Recurrent, rows),
        "former_pre": own_model(Former, rows), "former_post": own_model(lambda: Former(pre=False, final=False), rows),
        "former_rms": own_model(lambda: Former(norm=RMS), rows), "former_one_plus_w": own_model(lambda: Former(norm=lambda w: RMS(w, plus_one=True)), rows),
    }  # fmt: skip
    made |= {
        f"{kind}ForCausalLM": hf_model(kind, "LMHeadModel" if kind == "GPT2" else "ForCausalLM", config, text, own_loss)
        for kind, config in CAUSAL.items()
    }
    made |= {
        f"{kind}ForMaskedLM": hf_model(kind, "ForMaskedLM", config, text, own_loss) for kind, config in MASKED.items()
    }
    made |= {
        f"{kind}ForImageClassification": hf_model(
            kind, "ForImageClassification", dict(config, num_labels=2), shown, own_loss
        )
        for kind, config in VISION.items()
    }
    made |= {
        f"{kind}{head}": hf_model(kind, head, config, shown if "Image" in head else text, own_loss)
        for kind, (head, config) in LATER.items()
    }
    return made
