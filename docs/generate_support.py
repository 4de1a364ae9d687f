"""Run every instrument on models it was not developed on and write docs/_generated/support.md from what happened.

`python docs/generate_support.py --measure` runs what docs/_generated/support.json does not hold yet (`--again` anything
named by `--only`); without it the page is written from that file alone. Needs the extra `transformers`. The models are
tiny, randomly initialized, and made from their configurations alone: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
from torch import Tensor, nn

import normgauge as ng

TARGET = Path(__file__).parent / "_generated" / "support.md"
STORED = TARGET.with_suffix(".json")
SECONDS = 60  # of CPU, for one instrument on one model


@dataclass
class Subject:
    """A model, a batch (inputs, labels), how to call it, and the name of its real input if it has one."""

    model: nn.Module
    inputs: Any
    labels: Tensor
    real: str | None = None
    forward: Callable[[nn.Module, Any], Tensor] = field(default=lambda m, x: m(**x).logits)

    def objective(self, mode: str = "train") -> ng.Objective:
        return ng.Objective(self.model, cross_entropy, (self.inputs, self.labels), mode=mode, forward=self.forward)

    def attackable(self) -> tuple[Any, Callable[[nn.Module, Any], Tensor]]:
        if self.real is None or isinstance(self.inputs, Tensor):
            return (self.inputs, self.labels), self.forward
        return (self.inputs[self.real], self.labels), lambda m, x: m(**{self.real: x}).logits


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
OPT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "word_embed_proj_dim": 16}
# name -> class of the model without "For...", its head, settings; vocabulary, labels and special ids are added
TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "SequenceClassification", SIZES),
    "roberta": ("Roberta", "SequenceClassification", SIZES),
    "electra": ("Electra", "SequenceClassification", {**SIZES, "embedding_size": 8}),
    "albert": ("Albert", "SequenceClassification", {**SIZES, "embedding_size": 8}),
    "distilbert": ("DistilBert", "SequenceClassification", {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}),
    "deberta-v2": ("DebertaV2", "SequenceClassification", SIZES),
    "modernbert": ("ModernBert", "SequenceClassification", SIZES),
    "gpt2": ("GPT2", "SequenceClassification", {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "gpt-neox": ("GPTNeoX", "CausalLM", SIZES),
    "opt": ("OPT", "CausalLM", OPT),
    "bloom": ("Bloom", "CausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "llama": ("Llama", "SequenceClassification", SIZES),
    "mistral": ("Mistral", "CausalLM", {**SIZES, "num_key_value_heads": 1}),
    "mixtral": ("Mixtral", "CausalLM", {**SIZES, "num_key_value_heads": 1, "num_local_experts": 2}),
    "qwen2": ("Qwen2", "CausalLM", {**SIZES, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", "CausalLM", {**SIZES, "num_key_value_heads": 1, "head_dim": 8}),
    "gemma2": ("Gemma2", "CausalLM", {**SIZES, "num_key_value_heads": 1, "head_dim": 8}),
    "olmo2": ("Olmo2", "CausalLM", {**SIZES, "num_key_value_heads": 1}),
    "cohere": ("Cohere", "CausalLM", {**SIZES, "num_key_value_heads": 1}),
    "phi3": ("Phi3", "CausalLM", {**SIZES, "num_key_value_heads": 1}),
    "falcon": ("Falcon", "CausalLM", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}),
    "mamba": ("Mamba", "CausalLM", {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "use_mambapy": False}),
}
IMAGES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "vit": ("ViT", 16, {**SIZES, "image_size": 16, "patch_size": 4}),
    "deit": ("DeiT", 16, {**SIZES, "image_size": 16, "patch_size": 4}),
    "dinov2": ("Dinov2", 16, {**SIZES, "image_size": 16, "patch_size": 4, "mlp_ratio": 2}),
    "beit": ("Beit", 16, {**SIZES, "image_size": 16, "patch_size": 4}),
    "swin": ("Swin", 32, {
        "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
    "resnet": ("ResNet", 32, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}),
    "regnet": ("RegNet", 32, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4}),
    "convnext": ("ConvNextV2", 32, {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "mobilenet": ("MobileNetV2", 32, {"image_size": 32, "depth_multiplier": 0.25, "min_depth": 4}),
    "segformer": ("Segformer", 32, {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
        "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8}),
}  # fmt: skip


def _configured(name: str, head: str, settings: dict[str, Any]) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}For{head}")(config)


def _text(name: str) -> Subject:
    family, head, settings = TEXT[name]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}
    model = _configured(family, head, {"vocab_size": 40, "num_labels": 3, **special, **settings})
    ids = torch.randint(2, 40, (4, 7))
    inputs = {"input_ids": ids} if name == "mamba" else {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Subject(model, inputs, ids.roll(-1, dims=1) if head == "CausalLM" else torch.randint(3, (4,)))


def _images(name: str) -> Subject:
    family, size, settings = IMAGES[name]
    model = _configured(family, "ImageClassification", {"num_labels": 3, **settings})
    return Subject(model, {"pixel_values": torch.rand(4, 3, size, size)}, torch.randint(3, (4,)), "pixel_values")


def t5() -> Subject:
    settings = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    model = _configured("T5", "ConditionalGeneration", {**settings, "decoder_start_token_id": 0})
    ids, targets = torch.randint(2, 40, (4, 7)), torch.randint(2, 40, (4, 5))
    inputs = {"input_ids": ids, "decoder_input_ids": torch.cat([torch.zeros(4, 1).long(), targets[:, :-1]], dim=1)}
    return Subject(model, inputs, targets)


def bart() -> Subject:
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
             (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))}  # fmt: skip
    special = {"pad_token_id": 0, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}
    model = _configured("Bart", "ConditionalGeneration", {
        "vocab_size": 40, "d_model": 16, "max_position_embeddings": 32, "forced_eos_token_id": 1, **sizes, **special
    })  # fmt: skip
    ids, targets = torch.randint(2, 40, (4, 7)), torch.randint(2, 40, (4, 5))
    return Subject(model, {"input_ids": ids, "decoder_input_ids": targets.roll(1, 1)}, targets)


def wav2vec2() -> Subject:
    model = _configured("Wav2Vec2", "SequenceClassification", {
        **SIZES, "num_hidden_layers": 1, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3),
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
        "classifier_proj_size": 8, "num_labels": 3, "apply_spec_augment": False,
    })  # fmt: skip
    return Subject(model, {"input_values": torch.randn(4, 200)}, torch.randint(3, (4,)), "input_values")


def _own(model: nn.Module, inputs: Tensor) -> Subject:
    return Subject(model, inputs, torch.randint(3, (len(inputs),)), "x", lambda m, x: m(x))


class Pooled(nn.Module):
    """A body on sequences, its mean over time, and a classifier."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Transformer(16, 2, 1, 1, 24, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x, x[:, :3]).mean(1))


class Added(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.part = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


class Turned(nn.Module):
    def __init__(self, part: nn.Module, *axes: int) -> None:
        super().__init__()
        self.part, self.axes = part, axes

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x.transpose(*self.axes)).transpose(*self.axes)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up, self.end = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        down = self.down(x)
        return self.end(torch.cat([down, self.up(self.middle(down))], dim=1)).mean((2, 3))


def transformer() -> Subject:
    return _own(Translator(), torch.randn(4, 5, 16))


def lstm() -> Subject:
    return _own(Pooled(nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True), 16), torch.randn(4, 5, 6))


def unet() -> Subject:
    return _own(UNet(), torch.randn(4, 3, 8, 8))


def convnext_like() -> Subject:
    block = Added(
        nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.GroupNorm(1, 8), nn.Conv2d(8, 24, 1), nn.GELU(), nn.Conv2d(24, 8, 1)
    )
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3))
    return _own(nn.Sequential(nn.Conv2d(3, 8, 2, 2), block, *head), torch.randn(4, 3, 8, 8))


def mixer_like() -> Subject:
    tokens = Added(nn.LayerNorm(12), Turned(nn.Sequential(nn.Linear(9, 18), nn.GELU(), nn.Linear(18, 9)), 1, 2))
    channels = Added(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
    return _own(Pooled(nn.Sequential(nn.Linear(10, 12), tokens, channels), 12), torch.randn(4, 9, 10))


OTHERS = (t5, bart, wav2vec2, transformer, lstm, unet, convnext_like, mixer_like)
SUBJECTS: dict[str, Callable[[], Subject]] = {
    **{name: partial(_text, name) for name in TEXT},
    **{name: partial(_images, name) for name in IMAGES},
    **{make.__name__.replace("_", "-"): make for make in OTHERS},
}


def _robustness(s: Subject) -> Any:
    data, forward = s.attackable()
    return ng.robustness(s.model, data, attack="fgsm", radius=0.05, forward=forward)


def _lipschitz(s: Subject, **options: Any) -> Any:
    few = ng.lipschitz(s.model.eval(), _first(s.inputs, 2), forward=s.forward, climbs=1, **options)
    s.model.train()
    return few


def _first(inputs: Any, count: int) -> Any:
    return inputs[:count] if isinstance(inputs, Tensor) else {name: value[:count] for name, value in inputs.items()}


def _sgd(s: Subject) -> torch.optim.Optimizer:
    return torch.optim.SGD(s.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)


INSTRUMENTS: dict[str, Callable[[Subject], Any]] = {
    "symmetries": lambda s: ng.symmetries(s.objective()),
    "param_groups": lambda s: ng.param_groups(s.objective()),
    "checkup": lambda s: ng.checkup(s.objective(), quick=True),
    "spectrum": lambda s: ng.spectrum(s.objective(), top=1, tol=1e-2),
    "density": lambda s: ng.density(s.objective(), iterations=8, probes=2),
    "trace": lambda s: ng.trace(s.objective(), relative_error=1.0),
    "layer_spectra": lambda s: ng.layer_spectra(s.objective(), tol=0.1),
    "batch_noise": lambda s: ng.batch_noise(s.objective(), sizes=[2], draws=3),
    "stable_rate": lambda s: ng.stable_rate(s.objective(), iterations=4, tol=1.0),
    "landscape": lambda s: ng.landscape(s.objective(), steps=[0.01, 0.1], random=1),
    "loss_surface": lambda s: ng.loss_surface(s.objective(), points=2),
    "flatness": lambda s: ng.flatness(s.objective(), sigmas=[0.01], samples=2),
    "smoothing": lambda s: ng.smoothing(s.objective()),
    "covariate_shift": lambda s: ng.covariate_shift(s.objective(), 0.01),
    "activations": lambda s: ng.activations(s.objective()),
    "signal_propagation": lambda s: ng.signal_propagation(s.objective()),
    "trainable_depth": lambda s: ng.trainable_depth(s.model, s.inputs, forward=s.forward),
    "weight_dynamics": lambda s: ng.weight_dynamics(s.objective(), _sgd(s)),
    "gradient_flow": lambda s: ng.gradient_flow(s.objective(), 0.01, iterations=2, max_gradients=30),
    "lipschitz": _lipschitz,
    "lipschitz_ball": lambda s: _lipschitz(s, radius=1e-3),
    "margins": lambda s: ng.margins(s.objective("eval")),
    "robustness": _robustness,
    "drift": lambda s: ng.drift(s.model, [(s.inputs, s.labels)], forward=s.forward),
}


@dataclass(frozen=True)
class Outcome:
    """What became of one instrument on one model: how many entries by status, the sentences, the cost."""

    model: str
    instrument: str
    entries: Counter[str]
    sentences: tuple[str, ...]
    seconds: float = 0.0
    gradients: float = 0.0
    silly: tuple[str, ...] = ()

    def cell(self) -> str:
        if self.silly:
            return "silly"
        if self.entries["crash"] or self.entries["overtime"]:
            return "**crash**" if self.entries["crash"] else "overtime"
        good, total = self.entries["ok"], sum(self.entries.values())
        return "yes" if good == total else f"{good} of {total}" if good else "no"


class Overtime(BaseException):
    """One instrument took too long."""


def _stop(*_: Any) -> None:
    raise Overtime


_SIZES = ("norm", "variance", "loss", "distance", "radius", "deviation", "share", "accuracy", "moment", "rate")


def silly_numbers(result: Any) -> list[str]:
    """Return what no measurement can say: nan called ok, infinite estimates, sizes below 0, crossed limits, zeros."""
    readings = list(result.readings()) if hasattr(result, "readings") else []
    wrong = []
    for reading in readings:
        if reading.status != "ok":
            continue
        bound = reading.kind in ("upper", "lower") or reading.name.startswith("log10")
        if math.isnan(reading.value) or (math.isinf(reading.value) and not bound):
            wrong.append(f"{reading.name} of {reading.layer or 'the network'} is {reading.value}")
        elif reading.value < 0 and any(reading.name.endswith(size) for size in _SIZES):
            wrong.append(f"{reading.name} of {reading.layer or 'the network'} is {reading.value:g}, below 0")
    values = [reading.value for reading in readings if reading.status == "ok"]
    if len(values) > 2 and not any(values) and type(result).__name__ != "Checkup":  # which counts findings
        wrong.append("every number is 0")
    low, high = getattr(result, "log10_lower", None), getattr(result, "log10_upper", None)
    if low is not None and high is not None and low > high:
        wrong.append(f"lower 10^{low:g} above upper 10^{high:g}")
    return wrong[:3]


def measure(name: str, instrument: str, subject: Subject, seconds: int = 0) -> Outcome:
    """Run one instrument; an error that normgauge raises on purpose is a status with its sentence."""
    start = time.process_time()
    if seconds:
        signal.signal(signal.SIGPROF, _stop)
        signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        result = INSTRUMENTS[instrument](subject)
        str(result)
        result.meaning() if hasattr(result, "meaning") else None
    except ng.NormgaugeError as error:
        return Outcome(name, instrument, Counter(skipped=1), (str(error),), time.process_time() - start)
    except Overtime:
        return Outcome(name, instrument, Counter(overtime=1), (f"not done after {seconds} s",), float(seconds))
    except Exception as error:
        if not seconds:
            raise
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Outcome(name, instrument, Counter(crash=1), (message[:300],), time.process_time() - start)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    spent = time.process_time() - start
    rows = result._rows() if hasattr(result, "_rows") else [{}]
    statuses = Counter(str(row.get("status", "ok")) for row in rows) if rows else Counter(ok=1)
    known = {"ok", "skipped", "diverged", "nonconverged", "error"}
    if hasattr(result, "status") and not any(set(statuses) - {"ok"}):  # one verdict for the whole
        statuses = Counter([str(result.status)])
    statuses = Counter({key: n for key, n in statuses.items() if key in known} or {"ok": 1})
    sentences = [str(row["sentence"]) for row in rows if row.get("sentence")]
    own = getattr(result, "sentence", "")
    own = own() if callable(own) else own
    said = tuple(dict.fromkeys([*sentences, *([own] if own else [])]))
    worth = getattr(getattr(result, "cost", None), "gradients_worth", 0.0)
    return Outcome(name, instrument, statuses, said, spent, worth, tuple(silly_numbers(result)))


def make(name: str) -> Subject:
    torch.manual_seed(0)
    return SUBJECTS[name]()


def page(outcomes: Iterable[Outcome]) -> str:
    """Return the support table and, below it, every sentence met."""
    outcomes = list(outcomes)
    names = [name for name in INSTRUMENTS if any(o.instrument == name for o in outcomes)]
    table = {(o.model, o.instrument): o for o in outcomes}
    models = list(dict.fromkeys(o.model for o in outcomes))
    cells = Counter(outcome.cell().partition(" ")[0] for outcome in outcomes)
    lines = [
        "# Which models can be measured?",
        "",
        "<!-- Generated by python docs/generate_support.py; do not edit. -->",
        "",
        f"Instruments on {len(models)} tiny models that they were not developed on: most are made from",
        "configurations of `transformers`, some of torch's own layers. *yes*: every entry has a number. *3 of 5*: the",
        "other entries have a status and a sentence, listed below. *no*: no such quantity here, or no way to it, and",
        f"the result or error says why. *overtime*: more than {SECONDS} s of CPU. *silly*: what cannot be (not",
        "finite but called ok, sizes below 0, a lower bound above its upper one, all zeros), looked for by rule.",
        f"Cells: {len(outcomes)}. " + ", ".join(f"{word} {cells[word]}" for word in ("yes", "no", "overtime", "silly")),
        f"and crashes {cells['**crash**']}; the rest in part. An empty cell has not been run.",
        "",
        "| model | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for model in models:
        row = [table[model, name].cell() if (model, name) in table else "" for name in names]
        lines.append(f"| {model} | " + " | ".join(row) + " |")
    spent = {name: sorted(o.seconds for o in outcomes if o.instrument == name and o.entries["ok"]) for name in names}
    worth = {name: sorted(o.gradients for o in outcomes if o.instrument == name and o.entries["ok"]) for name in names}
    lines += ["", "## What it costs", "", "Seconds of CPU on one core, export included; median over the models.", ""]
    lines += ["| instrument | seconds | worth of gradients |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {spent[name][len(spent[name]) // 2]:.1f} | {worth[name][len(worth[name]) // 2]:.3g} |"
        for name in names
        if spent[name]
    ]
    lines += ["", "## What the results say", ""]
    said: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for sentence in (*outcome.sentences, *outcome.silly):
            said.setdefault((outcome.instrument, _plain(sentence)), []).append(outcome.model)
    lines += [f"- `{name}` ({', '.join(dict.fromkeys(who))}): {sentence}" for (name, sentence), who in said.items()]
    return "\n".join(lines) + "\n"


def _plain(sentence: str) -> str:
    return " ".join(sentence.split()).replace("|", "\\|").replace("<", "&lt;")[:400]


def load() -> dict[tuple[str, str], Outcome]:
    rows = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else []
    made = [
        Outcome(
            **{
                **row,
                "entries": Counter(row["entries"]),
                "sentences": tuple(row["sentences"]),
                "silly": tuple(row["silly"]),
            }
        )
        for row in rows
    ]
    return {(outcome.model, outcome.instrument): outcome for outcome in made}


def store(outcomes: dict[tuple[str, str], Outcome]) -> list[Outcome]:
    ordered = [outcomes[m, i] for m in SUBJECTS for i in INSTRUMENTS if (m, i) in outcomes]
    rounded = [{"seconds": round(o.seconds, 2), "gradients": round(o.gradients, 2)} for o in ordered]
    rows = [{**vars(o), "entries": dict(o.entries), **new} for o, new in zip(ordered, rounded, strict=True)]
    STORED.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
    return ordered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run what is not stored yet")
    parser.add_argument("--only", default="", help="models, separated by commas")
    parser.add_argument("--instruments", default="", help="instruments, separated by commas")
    parser.add_argument("--again", action="store_true", help="run what is stored as well")
    arguments = parser.parse_args()
    outcomes = load()
    models = arguments.only.split(",") if arguments.only else list(SUBJECTS)
    instruments = arguments.instruments.split(",") if arguments.instruments else list(INSTRUMENTS)
    for name in models if arguments.measure else ():
        left = [i for i in instruments if arguments.again or (name, i) not in outcomes]
        try:
            subject = make(name)
        except Exception as error:  # noqa: BLE001 (another version of transformers may not have it)
            print(name, "cannot be built:", error, flush=True)
            continue
        for instrument in left:
            with warnings.catch_warnings(action="ignore"):
                outcome = outcomes[name, instrument] = measure(name, instrument, subject, SECONDS)
            print(
                name,
                instrument,
                outcome.cell(),
                f"{outcome.seconds:.1f} s",
                *outcome.silly,
                *outcome.sentences[:1],
                flush=True,
            )
        store(outcomes)
    TARGET.write_text(page(store(outcomes)), encoding="utf-8")


if __name__ == "__main__":
    main()
