"""S2's claims: their verdicts over seeds; judges with an ingredient broken notice it; the experiment's criterion."""

from dataclasses import replace

import pytest
import torch

from mutation import judged, promoted, settled, swapped
from normgauge.papers.court import ledger
from normgauge.papers.instances import feedforward
from normgauge.papers.than2025.claims import consequences, layers, networks
from normgauge.theory import lipschitz_norms, partition_bound

VERDICTS = {
    "S2-L1": "holds_with_correction",
    "S2-L1b": "holds",
    "S2-L23": "holds",
    "S2-L2a": "holds",
    "S2-L2b": "holds",
    "S2-L3": "holds",
    "S2-L5": "holds",
    "S2-T6": "holds",
    "S2-T9": "holds",
    "S2-C11": "holds",
    "S2-LNred": "false_as_stated",
    "S2-T12": "holds",
    "S2-T13a": "holds_with_correction",
    "S2-T13b": "holds",
    "S2-C14": "holds_with_correction",
    "S2-T15": "holds",
    "S2-R16": "holds_with_correction",
    "S2-C18": "false_as_stated",
    "S2-C19": "false_as_stated",
    "S2-T20": "holds",
    "S2-C21": "holds",
    "S2-C22": "holds_with_correction",
    "S2-curse": "false_as_stated",
}
EXPERIMENTS = ["S2-E1"]


@pytest.mark.parametrize("id", VERDICTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_verdict_over_seeds(id, seed):
    found = settled(id, seed)
    assert (found.verdict, found.status) == (VERDICTS[id], "judged"), found.sentence


def test_every_claim_of_the_paper_is_here():
    assert {claim.id for claim in ledger(paper="S2")} == {*VERDICTS, *EXPERIMENTS}


@pytest.mark.parametrize("id", [id for id, word in VERDICTS.items() if word != "holds"])
def test_exchanging_printed_and_corrected_changes_the_verdict(id):
    assert swapped(id) == "error"  # the printed statement, offered as the correction, fails
    assert promoted(id) == "holds"  # the corrected statement, had it been printed


def euclidean(variances, eps):
    return (variances + eps).rsqrt().norm()


def without_centring(x, eps):
    n = len(x)
    scale = (x.square().mean() + eps).rsqrt()
    return scale * (torch.eye(n) - torch.outer(x, x) / (x @ x + n * eps))


def summed(x, groups, eps):
    return sum(lipschitz_norms.layer_norm_slope(x[list(group)], eps) for group in groups)


def halved_product(self, start=0):
    return 0.3 ** (len(self.weights) - start) * WEIGHT_PRODUCT(self, start)


WEIGHT_PRODUCT = feedforward.Feedforward.weight_product


@pytest.mark.parametrize(
    ("id", "module", "name", "mutant"),
    [
        ("S2-L1", layers, "batch_norm_constant", euclidean),
        ("S2-L1b", layers, "project", lambda yh: torch.eye(len(yh))),
        ("S2-L23", layers, "layer_norm_jacobian", without_centring),
        ("S2-L2a", layers, "layer_norm_slope", lambda x, eps: 1 / layers.standardize(x, eps)[1]),  # forgets n = 2
        ("S2-L2b", layers, "layer_norm_constant", lambda eps: 1 / eps),
        ("S2-L3", layers, "group_norm_slope", summed),
        ("S2-L5", feedforward.Feedforward, "weight_product", halved_product),
        ("S2-T6", networks, "padded_identity", lambda rows, columns: torch.ones(rows, columns)),
        ("S2-T9", networks, "batch_norm_constant", lambda variances, eps: 0.1 * (variances + eps).rsqrt().min()),
        ("S2-C11", networks, "layer_norm_constant", lambda eps: 1.0),
        ("S2-LNred", networks, "layer_norm", lambda eps: feedforward.layer_norm(1e9)),  # no blow-up at constant inputs
        ("S2-T12", networks, "layer_norm_constant", lambda eps: 1e-3),
        ("S2-T13a", networks, "padded_identity", lambda rows, columns: torch.eye(rows, columns).flip(0) * 2),
        ("S2-T13b", networks, "padded_identity", lambda rows, columns: torch.eye(rows, columns) * 2),
        ("S2-C14", networks, "_l1_slope", lambda net, h, label: net.weight_slope(1, h)),
        ("S2-T15", networks, "padded_identity", lambda rows, columns: torch.eye(rows, columns).flip(0)),
        ("S2-R16", networks, "_outer_loss", lambda u: 1e3 * u.sin()),
        ("S2-C18", consequences, "gradient", lambda loss, W: torch.ones_like(W)),  # units that never die
        ("S2-C19", consequences, "goldstein_evaluations", lambda drop, lipschitz, radius, slope: lipschitz / slope**2),
        ("S2-T20", consequences, "partition_slack", lambda *a: 0.05 * partition_bound.partition_slack(*a)),
        ("S2-C22", consequences, "layer_norm_constant", lambda eps: 1e-3),
        ("S2-curse", consequences, "_samples_needed", lambda reach, cells: 100.0),
    ],
)
def test_a_broken_ingredient_changes_the_verdict(monkeypatch, id, module, name, mutant):
    monkeypatch.setattr(module, name, mutant)
    assert judged(id) != VERDICTS[id]


def test_with_the_slope_of_a_step_function_the_corollary_fails(monkeypatch):
    monkeypatch.setattr(consequences._Cell, "lipschitz_term", torch.zeros(()))
    assert judged("S2-C21") == "false_as_stated"


def test_with_labels_that_do_not_vary_the_corollary_is_as_printed(monkeypatch):
    generous = lambda *arguments: 2 + partition_bound.partition_slack(*arguments)  # noqa: E731
    monkeypatch.setattr(consequences, "partition_slack", generous)
    assert judged("S2-C22") == "holds"


def test_the_networks_are_those_of_the_paper():
    generator = torch.Generator().manual_seed(0)
    net = feedforward.random_network(generator, (3, 4, 2))
    x = torch.randn(3, generator=generator)
    by_hand = torch.relu(net.weights[1] @ torch.relu(net.weights[0] @ x))
    assert torch.allclose(net(x), by_hand)
    assert torch.allclose(net.output_by_hidden(1, net.hidden(x, 1)), by_hand)
    assert torch.allclose(net.output_by_total_input(net.weights[0] @ x, 1), by_hand)
    assert torch.allclose(net.output_by_weight(net.weights[1].flatten(), 2, net.hidden(x, 1)), by_hand)
    batch = torch.randn(50, 3, generator=generator)
    normed, variances = feedforward.with_population_statistics(net, batch, 0.0)
    first = normed.norms[0](batch @ net.weights[0].T)
    assert torch.allclose(first.mean(0), torch.zeros(4), atol=1e-12)
    assert torch.allclose(first.var(0, correction=0), torch.ones(4))
    assert [len(v) for v in variances] == [4, 2]
    assert replace(net, activation=torch.tanh)(x).abs().max() < 1


def test_the_slack_bounds_multinomial_deviations_over_many_draws():
    p = torch.tensor([0.9, 0.05, 0.03, 0.02])
    m, delta = 400, 0.1
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(p.expand(2000, -1), m, replacement=True, generator=generator)
    counts = torch.nn.functional.one_hot(draws, 4).sum(1)
    rise = (p - counts / m).clamp(min=0).sum(1)
    slack = torch.tensor([partition_bound.partition_slack(int((row > 0).sum()), 4, m, delta) for row in counts])
    assert (rise > slack).double().mean() <= delta


def test_statistics_that_move_with_the_weights_are_steeper_than_fixed_ones_allow():
    for seed in range(5):
        assert networks._moving_statistics(torch.Generator().manual_seed(seed)) > 1.1
