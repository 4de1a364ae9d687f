"""The sentences of practice: their verdicts over seeds; judges with an ingredient broken notice it."""

from types import SimpleNamespace

import pytest
import torch

from mutation import judged, promoted, settled, swapped
from normgauge.papers.practice.claims import transformers

VERDICTS = {
    "P-1": "false_as_stated",
    "P-2": "holds_with_correction",
    "P-3": "holds_with_correction",
    "P-4": "holds",
    "P-5": "false_as_stated",
}


@pytest.mark.parametrize("id", VERDICTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_verdict_over_seeds(id, seed):
    found = settled(id, seed)
    assert (found.verdict, found.status) == (VERDICTS[id], "judged"), found.sentence


@pytest.mark.parametrize("id", [id for id, word in VERDICTS.items() if word != "holds"])
def test_exchanging_printed_and_corrected_changes_the_verdict(id):
    assert swapped(id) == "error"  # the printed statement, offered as the correction, fails
    assert promoted(id) == "holds"  # the corrected statement, had it been printed


@pytest.mark.parametrize(
    ("id", "name", "mutant"),
    [
        ("P-1", "_rms_norm", lambda x, eps=0.0: x),
        ("P-2", "_rotate", lambda x: x.flip(1)),
        ("P-3", "_norms", lambda generator, rate, decay, *rest, **kinds: torch.full((3,), 2.0)),
        ("P-4", "_norms", lambda generator, rate, decay: torch.ones(9)),
        ("P-5", "functional", SimpleNamespace(layer_norm=lambda y, shape, eps: y)),
    ],
)
def test_a_broken_ingredient_changes_the_verdict(monkeypatch, id, name, mutant):
    monkeypatch.setattr(transformers, name, mutant)
    assert judged(id) != VERDICTS[id]


def test_rotations_keep_the_length_of_every_row():
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(transformers._rotate(x).norm(dim=1), x.norm(dim=1)) and not torch.allclose(
        transformers._rotate(x), x
    )


def test_without_a_rotary_key_the_norm_before_attention_can_go(monkeypatch):
    monkeypatch.setattr(transformers, "_rotate", torch.zeros_like)  # nothing of the rotary parts reaches the logits
    assert judged("P-1") == "holds"
