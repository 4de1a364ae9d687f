"""Python's help texts as data, and the small GPT that reads them."""

import pytest
import torch

import normgauge as ng
from normgauge.errors import InputError, UnknownNameError
from normgauge.lab import data, models
from normgauge.lab.runs.digests import own_digests
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train


@pytest.fixture(scope="module")
def text():
    return data.load("text")


def rows(split):
    return {bytes(row.tolist()) for row in split[0]}


def test_text_is_the_same_at_every_load_and_nothing_held_out_was_trained_on(text):
    again = data.load("text")
    assert all(torch.equal(a, b) for a, b in zip(text.train + text.test, again.train + again.test, strict=True))
    assert sum(split[0].numel() for split in (text.train, text.validation, text.test)) > 300_000
    for inputs, targets in (text.train, text.validation, text.test):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert 0 <= int(targets.min()) <= int(targets.max()) < text.classes == len(data.ALPHABET)
    trained = rows(text.train)
    for held in (text.validation, text.test):
        assert len(held[0]) > 400 and not rows(held) & trained
    readable = "".join(data.ALPHABET[token] for token in text.train[0].flatten())
    assert "statement" in readable and readable.count("?") < 0.002 * len(readable)


def test_texts_of_another_python_make_other_runs(text):
    assert data.is_own("text") and own_digests([{"model": "gpt"}], text).keys() == {"data_digest"}


def test_loss_and_accuracy_are_means_over_characters(text):
    class Last(torch.nn.Module):
        def forward(self, inputs):
            return 3.0 * torch.nn.functional.one_hot(inputs, text.classes).float()

    inputs, targets = text.test
    found = evaluate(Last(), text)
    assert found.accuracy == pytest.approx(float((inputs == targets).float().mean()))
    by_hand = torch.nn.functional.cross_entropy(Last()(inputs).transpose(1, 2), targets)
    assert found.loss == pytest.approx(float(by_hand), rel=1e-6)


@pytest.mark.parametrize("norm", ["none", "layer", "rms", "batch", "weight", "spectral"])
@pytest.mark.parametrize("place", ["pre", "post", "sandwich"])
def test_the_past_alone_decides_and_seeds_draw_the_weights(text, norm, place):
    network = models.gpt(norm, text.shape, text.classes, width=16, heads=2, place=place, qk="rms").eval()
    inputs = text.test[0][:3].clone()
    before = network(inputs)
    inputs[:, 40:] = 5
    assert torch.equal(before[:, :40], network(inputs)[:, :40])
    assert not torch.equal(before[:, 40:], network(inputs)[:, 40:])
    one, other = (models.build("gpt", norm, text.shape, text.classes, seed=3).eval() for _ in range(2))
    assert torch.equal(one(inputs), other(inputs))


def test_a_gpt_learns_and_can_be_measured(text):
    network = models.build("gpt", "rms", text.shape, text.classes, seed=0)
    training = train(network, text, torch.optim.AdamW(network.parameters(), lr=5e-3), steps=40, batch=16, seed=0)
    assert training.losses[0] > 4.0 and evaluate(network, text, limit=50).loss < 3.0  # log 96 = 4.56
    objective = ng.Objective(network, text.loss, tuple(part[:2, :8] for part in text.train), mode="eval")
    assert ng.spectrum(objective, top=1, tol=0.1).top[0] > 0


def test_what_makes_no_gpt_is_refused_by_name(text):
    with pytest.raises(InputError, match="rows of tokens"):
        models.build("gpt", "layer", (1, 8, 8), 10, seed=0)
    with pytest.raises(InputError, match="divide"):
        models.gpt("layer", text.shape, text.classes, width=10, heads=4)
    with pytest.raises(UnknownNameError, match="sandwich"):
        models.gpt("layer", text.shape, text.classes, place="sandwitch")
