"""Confidence against accuracy: the reading, by hand and on networks of known calibration."""

import pytest
import torch
from torch import nn

from normgauge.papers.akbar2025.studies.overconfidence import overconfidence


def test_overconfidence_is_confidence_minus_accuracy():
    network = nn.Identity()
    scores = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]]).log()
    targets = torch.tensor([0, 1, 1, 0])
    assert overconfidence(network, scores, targets) == pytest.approx((0.9 + 0.6 + 0.8 + 0.7) / 4 - 3 / 4)


@pytest.mark.parametrize(("scale", "sign"), [(0.25, -1), (4.0, 1)])
def test_longer_logits_are_surer_than_right(scale, sign):
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 5, generator=source)
    targets = torch.distributions.Categorical(logits=logits).probs.multinomial(1, generator=source)[:, 0]
    assert abs(overconfidence(nn.Identity(), logits, targets)) < 0.03  # drawn from these very probabilities
    assert sign * overconfidence(nn.Identity(), scale * logits, targets) > 0.05
