"""Labels of language models stand where the loss puts them, found by behaviour; else nothing is said of decisions."""

import math

import pytest
import torch
from torch import nn

import normgauge as ng

IDS = torch.randint(0, 50, (8, 12), generator=torch.Generator().manual_seed(0))


class OwnGPT(nn.Module):
    """Tied weights and a residual: untrained, it repeats its input."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(50, 32), nn.Linear(32, 32)
        nn.init.normal_(self.mix.weight, std=0.02)

    def forward(self, ids):
        hidden = self.table(ids)
        return (hidden + self.mix(hidden)) @ self.table.weight.T / 4


def shifted_loss(logits, labels):
    return nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])


def plain_loss(logits, labels):
    return nn.functional.cross_entropy(logits.transpose(1, 2), labels)


def next_token_accuracy(logits, ids):
    return float((logits[:, :-1].argmax(-1) == ids[:, 1:]).double().mean())


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return OwnGPT()


def test_the_shift_of_the_loss_is_followed(gpt):
    objective = ng.Objective(gpt, shifted_loss, (IDS, IDS), mode="eval")
    told, truth = ng.margins(objective), next_token_accuracy(gpt(IDS), IDS)
    assert told.raw.numel() == 8 * 11 and told.accuracy == pytest.approx(truth) and truth < 0.2
    flat = ng.flatness(objective, sigmas=(0.01,), samples=1, noises=("absolute",), sharpness=())
    assert flat.accuracy == pytest.approx(truth)


def test_a_loss_without_shift_keeps_labels_where_they_are(gpt):
    objective = ng.Objective(gpt, plain_loss, (IDS[:, :-1], IDS[:, 1:]), mode="eval")
    assert ng.margins(objective).accuracy == pytest.approx(next_token_accuracy(gpt(IDS), IDS))


def test_a_sum_over_tokens_and_ignored_ones_are_understood(gpt):
    labels = IDS.clone()
    labels[:, 5:8] = -100

    def step(model, batch):
        logits = model(batch["input_ids"])[:, :-1].reshape(-1, 50)
        return nn.functional.cross_entropy(logits, batch["labels"][:, 1:].reshape(-1), reduction="sum")

    batch = {"input_ids": IDS, "labels": labels}
    objective = ng.Objective.from_step(
        gpt, step, batch, mode="eval", outputs=lambda model, batch: model(batch["input_ids"])
    )
    told = ng.margins(objective)
    assert told.raw.numel() == 8 * (11 - 3) and told.accuracy < 0.2


@pytest.mark.parametrize(
    ("loss", "labels", "words"),
    [
        (lambda out, y: nn.functional.cross_entropy(out.mT, y, label_smoothing=0.3), IDS, "neither does"),
        (lambda out, y: shifted_loss(0 * out, y), IDS, "neither does"),
        (plain_loss, IDS, "the inputs themselves"),
    ],
)
def test_what_cannot_be_placed_is_withheld_with_a_sentence(gpt, loss, labels, words):
    told = ng.margins(ng.Objective(gpt, loss, (IDS, labels), mode="eval"))
    assert told.status == "skipped" and words in told.sentence and math.isnan(told.accuracy)
    assert "nan" not in str(told)


def test_logits_that_say_nothing_are_withheld(gpt):
    nn.init.zeros_(gpt.table.weight)
    told = ng.margins(ng.Objective(gpt, shifted_loss, (IDS, IDS), mode="eval"))
    assert told.status == "skipped" and "both do" in told.sentence


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_the_shift_is_found_at_every_scale_of_the_logits(gpt, scale):
    objective = ng.Objective(gpt, shifted_loss, (IDS, IDS), mode="eval", forward=lambda model, ids: scale * model(ids))
    assert ng.margins(objective).raw.numel() == 8 * 11


def test_one_token_repeated_is_no_decision(gpt):
    told = ng.margins(ng.Objective(gpt, plain_loss, (IDS[:, :1], IDS[:, :1]), mode="eval"))
    assert told.status == "skipped" and "the inputs themselves" in told.sentence


def test_one_sequence_without_a_batch_is_shifted_too(gpt):
    def loss(logits, labels):
        return nn.functional.cross_entropy(logits[:-1], labels[1:])

    told = ng.margins(ng.Objective(gpt, loss, (IDS[0], IDS[0]), mode="eval"))
    assert told.raw.numel() == 11 and told.accuracy == pytest.approx(next_token_accuracy(gpt(IDS[:1]), IDS[:1]))


def test_classifiers_with_other_losses_keep_their_accuracy():
    model, x, y = nn.Linear(3, 4), torch.randn(20, 3), torch.arange(20) % 4
    smooth = ng.margins(
        ng.Objective(model, lambda o, t: nn.functional.cross_entropy(o, t, label_smoothing=0.3), (x, y), mode="eval")
    )
    assert smooth.raw.numel() == 20
    many = nn.Linear(3, 5), torch.randint(0, 2, (20, 5))
    labels = ng.margins(ng.Objective(many[0], lambda o, t: (o - t).square().mean(), (x, many[1]), mode="eval"))
    assert labels.raw.numel() == 100, "several yes-or-no labels are no sequence"


def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        settings = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, **size)
        return transformers.GPT2LMHeadModel(settings)
    settings = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        **size,
    )
    return transformers.LlamaForCausalLM(settings)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_hugging_face_models_shift_inside(kind, mode):
    model = hugging_face(kind)
    batch = {"input_ids": IDS, "labels": IDS}
    objective = ng.Objective.from_step(
        model, lambda m, b: m(**b).loss, batch, mode=mode, outputs=lambda m, b: m(**b).logits
    )
    told = ng.margins(objective)
    assert told.status == "ok" and told.raw.numel() == 8 * 11 and told.accuracy < 0.2
    assert ng.flatness(objective, sigmas=(0.01,), samples=1, noises=("absolute",), sharpness=()).accuracy < 0.2
    by_forward = ng.Objective(
        model, shifted_loss, (IDS, IDS), mode="eval", forward=lambda m, ids: m(input_ids=ids).logits
    )
    assert ng.margins(by_forward).accuracy < 0.2
