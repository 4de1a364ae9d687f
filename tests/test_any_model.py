"""Instruments on models of `transformers` they were not developed on; the docs' support table is made the same way."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from normgauge.records import Reading

pytest.importorskip("transformers")
PAGE = Path(__file__).parents[1] / "docs" / "generate_support.py"


@pytest.fixture(scope="module")
def support():
    spec = importlib.util.spec_from_file_location("generate_support", PAGE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_support"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["generate_support"]


QUICK = ("landscape", "loss_surface", "covariate_shift", "activations", "signal_propagation", "margins", "flatness")
QUICK = (*QUICK, "robustness", "drift", "stable_rate", "lipschitz", "lipschitz_ball")


def outcomes(support, name):
    torch.set_default_dtype(torch.float32)
    subject = support.make(name)
    before = {key: value.clone() for key, value in subject.model.state_dict().items()}
    found = {instrument: support.measure(name, instrument, subject) for instrument in QUICK}
    assert not any(outcome.silly for outcome in found.values())
    assert all(torch.equal(value, before[key]) for key, value in subject.model.state_dict().items())
    return found


def check(found, *, tokens, stores):
    for instrument, outcome in found.items():
        if (instrument == "robustness" and tokens) or (instrument == "drift" and not stores):
            assert outcome.entries["ok"] == 0 and outcome.sentences, f"{instrument} says why"
        elif instrument == "stable_rate":
            assert outcome.entries["ok"] or outcome.sentences
        else:
            assert outcome.entries["ok"] > 0, f"{instrument}: {outcome.sentences}"
        bad = sum(outcome.entries.values()) - outcome.entries["ok"]
        assert not bad or outcome.sentences, f"{instrument}: a status without a sentence"


def test_bert_and_resnet(support):
    check(outcomes(support, "bert"), tokens=True, stores=False)
    check(outcomes(support, "resnet"), tokens=False, stores=True)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["t5", "gpt2", "llama", "mamba", "swin", "vit", "mobilenet", "convnext", "wav2vec2"])
def test_the_others(support, name):
    check(outcomes(support, name), tokens=name in ("t5", "gpt2", "llama", "mamba"), stores=name == "mobilenet")


def test_the_page_shows_holes_and_their_sentences(support):
    made = [
        support.Outcome("bert", name, Counter(ok=2, skipped=name == "margins"), ("no gradient",) * (name == "margins"))
        for name in support.INSTRUMENTS
    ]
    text = support.page(made)
    assert "| bert |" in text and "2 of 3" in text and "- `margins` (bert): no gradient" in text
    written = support.TARGET.read_text(encoding="utf-8")
    assert all(f"| {name} |" in written for name in support.SUBJECTS), "run docs/generate_support.py again"


def test_numbers_that_cannot_be_are_called_silly(support):
    reading = lambda name, value, kind="exact": Reading(name, value, kind)  # noqa: E731

    class Told:
        log10_lower, log10_upper = 2.0, 1.0

        def readings(self):
            return reading("norm", -1.0), reading("top", float("nan")), reading("log10 upper", float("inf"), "upper")

    assert len(support.silly_numbers(Told())) == 3
    Told.log10_lower, Told.readings = 0.0, lambda self: [reading("x", 0.0)] * 3
    assert support.silly_numbers(Told()) == ["every number is 0"]


def test_no_stored_cell_is_silly_or_crashed(support):
    bad = [(o.model, o.instrument, o.cell()) for o in support.load().values() if o.silly or o.entries["crash"]]
    assert not bad
