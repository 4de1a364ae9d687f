"""Run every instrument on models it was not developed on and write docs/_generated/support.md from what happened.

Run with `python docs/generate_support.py`; needs the extra `transformers`. The models are tiny, randomly
initialized, and made from their configurations alone: nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normgauge as ng

TARGET = Path(__file__).parent / "_generated" / "support.md"


@dataclass
class Subject:
    """A model, a batch (inputs, labels), how to call it, and the name of its real input if it has one."""

    model: nn.Module
    inputs: dict[str, Tensor]
    labels: Tensor
    real: str | None = None

    def objective(self, mode: str = "train") -> ng.Objective:
        return ng.Objective(self.model, cross_entropy, (self.inputs, self.labels), mode=mode, forward=call)

    def attackable(self) -> tuple[Any, Callable[[nn.Module, Any], Tensor]]:
        if self.real is None:
            return (self.inputs, self.labels), call
        return (self.inputs[self.real], self.labels), lambda m, x: m(**{self.real: x}).logits


def call(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).logits


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _tokens(model: nn.Module, vocabulary: int = 40) -> Subject:
    ids = torch.randint(2, vocabulary, (4, 7))
    return Subject(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.randint(3, (4,)))


def _images(model: nn.Module, size: int = 32) -> Subject:
    return Subject(model, {"pixel_values": torch.rand(4, 3, size, size)}, torch.randint(3, (4,)), "pixel_values")


def bert() -> Subject:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return _tokens(BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=3, **sizes)))


def t5() -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ids, targets = torch.randint(2, 40, (4, 7)), torch.randint(2, 40, (4, 5))
    inputs = {"input_ids": ids, "decoder_input_ids": torch.cat([torch.zeros(4, 1).long(), targets[:, :-1]], dim=1)}
    return Subject(T5ForConditionalGeneration(config), inputs, targets)


def gpt2() -> Subject:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, num_labels=3, pad_token_id=0)
    return _tokens(GPT2ForSequenceClassification(config))


def llama() -> Subject:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return _tokens(LlamaForSequenceClassification(LlamaConfig(vocab_size=40, num_labels=3, pad_token_id=0, **sizes)))


def mamba() -> Subject:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=2, use_mambapy=False)
    ids = torch.randint(2, 40, (4, 7))
    return Subject(MambaForCausalLM(config), {"input_ids": ids}, ids.roll(-1, dims=1))


def swin() -> Subject:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4, num_labels=3
    )
    return _images(SwinForImageClassification(config))


def vit() -> Subject:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return _images(ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=3, **sizes)), 16)


def mobilenet() -> Subject:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(image_size=32, depth_multiplier=0.25, num_labels=3, min_depth=4)
    return _images(MobileNetV2ForImageClassification(config))


def resnet() -> Subject:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    return _images(ResNetForImageClassification(config))


def convnext() -> Subject:
    from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

    config = ConvNextV2Config(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3)
    return _images(ConvNextV2ForImageClassification(config))


def wav2vec2() -> Subject:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        num_labels=3,
        apply_spec_augment=False,
    )
    model = Wav2Vec2ForSequenceClassification(config)
    return Subject(model, {"input_values": torch.randn(4, 200)}, torch.randint(3, (4,)), "input_values")


SUBJECTS = {f.__name__: f for f in (bert, t5, gpt2, llama, mamba, swin, vit, mobilenet, resnet, convnext, wav2vec2)}


def _robustness(s: Subject) -> Any:
    data, forward = s.attackable()
    return ng.robustness(s.model, data, attack="fgsm", radius=0.05, forward=forward)


INSTRUMENTS: dict[str, Callable[[Subject], Any]] = {
    "landscape": lambda s: ng.landscape(s.objective(), steps=[0.01, 0.1], random=1),
    "loss_surface": lambda s: ng.loss_surface(s.objective(), points=2),
    "covariate_shift": lambda s: ng.covariate_shift(s.objective(), 0.01),
    "activations": lambda s: ng.activations(s.objective()),
    "signal_propagation": lambda s: ng.signal_propagation(s.objective()),
    "margins": lambda s: ng.margins(s.objective("eval")),
    "flatness": lambda s: ng.flatness(s.objective(), sigmas=[0.01], samples=2),
    "robustness": _robustness,
    "drift": lambda s: ng.drift(s.model, [(s.inputs, s.labels)], forward=call),
    "stable_rate": lambda s: ng.stable_rate(s.objective(), iterations=4, tol=1.0),
}


@dataclass(frozen=True)
class Outcome:
    """What became of one instrument on one model: how many entries by status, and the sentences."""

    model: str
    instrument: str
    entries: Counter[str]
    sentences: tuple[str, ...]

    def cell(self) -> str:
        good, total = self.entries["ok"], sum(self.entries.values())
        if good == total:
            return "yes"
        return f"{good} of {total}" if good else "no"


def measure(name: str, instrument: str, subject: Subject) -> Outcome:
    """Run one instrument; an error that normgauge raises on purpose is a status with its sentence."""
    try:
        found = INSTRUMENTS[instrument](subject)
    except ng.NormgaugeError as error:
        return Outcome(name, instrument, Counter(skipped=1), (str(error),))
    str(found)
    rows = found._rows()
    statuses = Counter(str(row.get("status", "ok")) for row in rows) if rows else Counter(skipped=1)
    if hasattr(found, "status"):  # one verdict for the whole
        statuses = Counter([str(found.status)])
    sentences = [str(row["sentence"]) for row in rows if row.get("sentence")]
    own = getattr(found, "sentence", "")
    own = own() if callable(own) else own
    return Outcome(name, instrument, statuses, tuple(dict.fromkeys([*sentences, *([own] if own else [])])))


def make(name: str) -> Subject:
    torch.manual_seed(0)
    return SUBJECTS[name]()


def page(outcomes: list[Outcome]) -> str:
    """Return the support table and, below it, every sentence met."""
    names = list(INSTRUMENTS)
    table = {(o.model, o.instrument): o for o in outcomes}
    models = list(dict.fromkeys(o.model for o in outcomes))
    lines = [
        "# Which models can be measured?",
        "",
        "<!-- Generated by python docs/generate_support.py; do not edit. -->",
        "",
        "Every instrument ran on tiny models made from configurations of `transformers` that it was not developed on.",
        "*yes*: every entry has a number. *3 of 5*: the other entries have a status and a sentence, listed below.",
        "*no*: there is no such quantity here, and the result says why.",
        "",
        "| model | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for model in models:
        lines.append(f"| {model} | " + " | ".join(table[model, name].cell() for name in names) + " |")
    lines += ["", "## What the results say", ""]
    said: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for sentence in outcome.sentences:
            said.setdefault((outcome.instrument, sentence), []).append(outcome.model)
    lines += [f"- `{name}` ({', '.join(who)}): {sentence}" for (name, sentence), who in said.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="one model")
    arguments = parser.parse_args()
    chosen = [name for name in SUBJECTS if arguments.only in name]
    outcomes = []
    for name in chosen:
        subject = make(name)
        for instrument in INSTRUMENTS:
            outcomes.append(measure(name, instrument, subject))
            print(name, instrument, outcomes[-1].cell(), dict(outcomes[-1].entries), flush=True)
    if not arguments.only:
        TARGET.write_text(page(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
