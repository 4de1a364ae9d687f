"""The constructed saddle of the saddle-escape study: no gradient on the full batch, and a way down."""

import pytest
import torch

from normgauge.papers.akbar2025.studies.saddle_escape import HIDDEN, SAMPLES, Saddle, most_negative


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_a_strict_saddle_of_the_full_batch_only(norm, seed):
    saddle = Saddle(norm, seed)
    leaves = [saddle.weight.clone().requires_grad_(), torch.zeros(HIDDEN).requires_grad_()]
    full = torch.autograd.grad(saddle.loss(*leaves, torch.arange(SAMPLES)), leaves)
    assert max(float(slope.abs().max()) for slope in full) < 1e-12
    part = torch.autograd.grad(saddle.loss(*leaves, torch.arange(32)), leaves)
    assert float(part[1].norm()) > 1e-2
    assert most_negative(saddle) < -0.05


def test_statistics_of_all_samples_make_rows_independent():
    saddle = Saddle("batch", 0)
    rows = torch.arange(10)
    whole = saddle.hidden(saddle.weight, torch.arange(SAMPLES), whole=False)
    assert torch.allclose(saddle.hidden(saddle.weight, rows, whole=True), whole[:10], atol=1e-12)
    assert not torch.allclose(saddle.hidden(saddle.weight, rows, whole=False), whole[:10], atol=1e-3)
