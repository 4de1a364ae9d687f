"""A network that cannot be trained is what the study of exploding gradients looks for: it is measured, not lost."""

import pytest
import torch

from normgauge.papers.batchnorm_article.studies import gradient_explosion as study
from normgauge.papers.court import StudyTable, criteria
from normgauge.papers.studies import find
from normgauge.records import Run

SPEC = {"part": "train", "data": "digits", "batch": 16, "steps": 3, "width": 8, "depth": 2, "skip": False, "seed": 0}


@pytest.mark.parametrize(("rate", "diverged"), [(0.01, 0.0), (1e30, 1.0)])
def test_a_network_that_broke_has_an_accuracy_and_says_that_it_broke(rate, diverged):
    torch.set_default_dtype(torch.float32)  # as the studies run
    run = Run({**SPEC, "lr": rate})
    study.run(run.spec, run.record)
    assert run.last("diverged") == diverged
    assert 0 <= run.last("train_accuracy") <= 1 and 0 <= run.last("validation_accuracy") <= 1


def test_the_finding_is_about_the_activations_no_listed_claim_speaks_of():
    rows = [
        {"part": "batch", "activation": activation, "batch_size": size, "seed": seed, "norm_growth": growth}
        for activation in ("relu", "tanh")
        for size, growth in ((8, 1.5), (64, 1.2))
        for seed in range(3)
    ]
    (claim,) = (claim for claim in criteria("gradient-explosion") if claim.kind == "finding")
    margins = claim.margins(StudyTable(tuple(rows)))
    assert len(margins) == 2 and all("activation tanh" in name for name in margins)
    assert all(value > 0 for values in margins.values() for value in values)


def test_every_remedy_is_what_it_says():
    torch.set_default_dtype(torch.float32)
    (part,) = [p for p in find("gradient-explosion").parts("small") if "remedy" in p.scientific]
    for remedy in part.scientific["remedy"]:
        run = Run({**SPEC, "part": "remedies", "remedy": remedy, "lr": 0.01})
        study.run(run.spec, run.record)
        assert run.last("diverged") == 0, remedy
    network = study.DeepBatchNorm(4, 8, 3, 2, seed=0)
    network.make_orthogonal(0)
    weights = [layer.weight.detach() for layer in network.layers]
    assert all(torch.allclose(w @ w.T, torch.eye(8), atol=1e-5) for w in weights)
    assert not torch.allclose(weights[0], weights[1])
