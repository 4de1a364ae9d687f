"""The search against the Jacobian's null space, on every architecture, at initialization and after training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import normgauge as ng
from architectures import NETS
from normgauge.errors import OutOfMemoryError
from reference.symmetry import generator_rank, nullity


def objective_of(net, batch, mode="train", **options):
    return ng.Objective(net, lambda out, _: out.square().mean(), (batch, torch.zeros(len(batch))), mode=mode, **options)


def jiggled(net, size):
    """Leave the special points of initialization, where the Jacobian has a larger null space than nearby."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return net


def trained(net, batch, steps=30):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    goal = torch.randn_like(net(batch))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(batch), goal).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("name", NETS)
def test_dimension_is_the_nullity_of_the_jacobian(name):
    factory, data = NETS[name]
    net, batches = jiggled(factory(), 0.1), data()
    found = ng.symmetries(objective_of(net, batches[0]))
    assert found.unobserved == {}
    assert all(family.status != "undecided" for family in found.families)
    assert found.dimension + found.matrix_dimension == nullity(net, batches, mode="train")[0]


@pytest.mark.parametrize("name", ["batch", "layer_stream", "residual_zero", "post_norm_transformer", "weight_norm"])
def test_dimension_counts_independent_generator_vectors(name):
    factory, data = NETS[name]
    net = jiggled(factory(), 0.1)
    found = ng.symmetries(objective_of(net, data()[0]))
    assert found.dimension == generator_rank(found)


@pytest.mark.parametrize("name", ["plain", "batch", "layer", "residual_zero", "rms_stream", "pre_norm_transformer"])
def test_initialization_training_and_precision_do_not_change_the_answer(name):
    factory, data = NETS[name]
    batches = data()
    generic = ng.symmetries(objective_of(jiggled(factory(), 0.1), batches[0]))
    start = ng.symmetries(objective_of(factory(), batches[0]))
    later = ng.symmetries(objective_of(trained(factory(), batches[0]), batches[0]))
    single = factory().float()
    narrow = ng.symmetries(objective_of(single, _single(batches[0])))
    expected = (generic.dimension, generic.matrix_dimension)
    for other in (start, later, narrow):
        assert (other.dimension, other.matrix_dimension) == expected


@pytest.mark.parametrize("name", ["batch", "residual_zero", "pre_norm_transformer"])
def test_trained_fixtures_have_the_nullity_of_their_jacobian(name):
    """Weights after 400 steps of Adam (tests/symmetry/fixtures/train.py), loaded as a checkpoint would be."""
    factory, data = NETS[name]
    net, batches = factory(), data()
    stored = np.load(Path(__file__).parent / "fixtures" / f"{name}.npz")
    net.load_state_dict({key: torch.as_tensor(stored[key]) for key in stored.files})
    found = ng.symmetries(objective_of(net, batches[0]))
    assert found.dimension + found.matrix_dimension == nullity(net, batches, mode="train")[0]


def _single(batch):
    return batch.float() if batch.is_floating_point() else batch


def test_eval_mode_has_no_batch_statistics():
    factory, data = NETS["batch"]
    net, batches = jiggled(factory(), 0.1), data()
    kinds = {g.kind for g in ng.symmetries(objective_of(net, batches[0], mode="eval")).generators}
    assert "dead" not in kinds and "scale" not in kinds and "rescale" in kinds


def test_statuses_tell_eps_and_batch_statistics_apart():
    torch.manual_seed(3)
    batch = torch.randn(64, 5)

    def statuses(norm):
        net = nn.Sequential(nn.Linear(5, 6, bias=False), norm, nn.ReLU(), nn.Linear(6, 3))
        found = ng.symmetries(objective_of(net, batch))
        return {family.kind: family for family in found.families}

    with_batch, with_layer = statuses(nn.BatchNorm1d(6)), statuses(nn.LayerNorm(6))
    assert with_batch["scale"].status == "batch_statistics_only"
    assert with_layer["scale"].status == "exact_without_eps"
    assert 0 < with_layer["scale"].certificate["eps_effect"] < 1e-3
    assert with_layer["rescale"].status == with_batch["rescale"].status == "exact"


def test_spectral_norm_frees_the_scale_of_its_weight():
    from architectures import spectral

    found = ng.symmetries(objective_of(spectral(), torch.randn(60, 5)))
    scales = [g for g in found.generators if g.kind == "scale"]
    assert [g.parameters for g in scales] == [("0.parametrizations.weight.original",)]
    assert scales[0].status == "exact"


def test_common_logit_shift_belongs_to_the_loss_only():
    net, batch = nn.Linear(5, 4), torch.randn(64, 5)
    data = (batch, torch.randint(0, 4, (64,)))
    objective = ng.Objective(net, nn.functional.cross_entropy, data, mode="eval")
    assert ng.symmetries(objective).dimension == 0
    assert ng.symmetries(objective, of="loss").dimension == 6  # one per input, and the bias


def test_frozen_parameters_take_part_in_nothing():
    net = NETS["plain"][0]()
    net[2].weight.requires_grad_(False)
    found = ng.symmetries(objective_of(net, torch.randn(64, 5)))
    assert found.dimension == 1  # unit by unit the frozen weight forbids it; all units at once pass through it
    assert all("2.weight" not in g.parameters for g in found.generators)


def test_tied_weights_lose_the_symmetries_of_their_parts():
    class Tied(nn.Module):
        def __init__(self, tie):
            super().__init__()
            self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
            if tie:
                self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).relu())

    batch = torch.randn(64, 5)
    assert ng.symmetries(objective_of(Tied(tie=False), batch)).dimension == 5
    assert ng.symmetries(objective_of(Tied(tie=True), batch)).dimension == 0


def test_unobserved_rows_are_kept_apart():
    net = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    found = ng.symmetries(objective_of(net, torch.randint(0, 6, (64, 2))))
    assert found.unobserved == {"0.weight": 12}


def test_dead_units_are_reported_and_not_counted():
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        net[0].weight[2], net[0].bias[2] = 0.01, -50.0
    found = ng.symmetries(objective_of(net, torch.randn(64, 5)))
    dead = [g for g in found.generators if g.kind == "dead"]
    assert [g.index for g in dead] == [2]
    assert found.dimension == 6
    assert "never active" in found.explain()


@pytest.mark.parametrize("seed", [1, 2])
def test_seeds_agree(seed):
    factory, data = NETS["pre_norm_transformer"]
    net, batches = jiggled(factory(), 0.1), data()
    first = ng.symmetries(objective_of(net, batches[0]))
    other = ng.symmetries(objective_of(net, batches[0]), seed=seed)
    assert (first.dimension, first.matrix_dimension) == (other.dimension, other.matrix_dimension)


def test_a_model_that_does_not_fit_is_refused_before_the_work():
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda *_: pytest.fail("the work has begun"))
    objective = ng.Objective(model, nn.functional.mse_loss, (torch.randn(8, 4), torch.randn(8, 3)), mode="eval")
    with pytest.raises(OutOfMemoryError, match=r"15 parameters need about 6\.71e-07 GiB.*\(memory=500\)"):
        ng.symmetries(objective, memory=500)
