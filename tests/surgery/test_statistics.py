"""Stored statistics: frozen, guarded, recalibrated, split; biases before them; old hooks."""

import copy
import pickle
import warnings

import pytest
import torch
from operations import same_state, shaken, state
from torch import nn
from torch.utils.checkpoint import checkpoint

import normgauge as ng
from normgauge.errors import DataError, InputError

pytestmark = pytest.mark.usefixtures("single_precision")


def chain():
    torch.manual_seed(0)
    layers = (
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4, 2),
        nn.BatchNorm1d(2, affine=False),
    )
    return shaken(nn.Sequential(*layers))


# -- freeze -----------------------------------------------------------------------------------------------------------


def test_frozen_statistics_survive_train_copies_and_pickles():
    model, inputs = chain(), torch.randn(6, 3)
    before = state(model)
    done = ng.freeze_norms(model, example=inputs, where="1")
    assert same_state(model, before) and done.proof == 0 and isinstance(done.model[1], nn.BatchNorm1d)
    for frozen in (done.model, copy.deepcopy(done.model), pickle.loads(pickle.dumps(done.model))):
        kept = frozen[1].running_mean.clone()
        frozen.train()(inputs)
        assert torch.equal(frozen[1].running_mean, kept) and not frozen[1].training
        assert frozen[5].training and not torch.equal(frozen[5].running_mean, before["5.running_mean"])
    assert done.model[1].weight.requires_grad
    assert not ng.freeze_norms(model, example=inputs, affine=True).model[1].weight.requires_grad


def test_a_half_frozen_norm_is_frozen_and_a_broken_one_is_not():
    model = chain()
    model[1].track_running_stats = False  # what Lightning's BaseFinetuning does: train mode uses the batch
    frozen = ng.freeze_norms(model, example=torch.randn(6, 3)).model.train()
    assert torch.equal(frozen[1](torch.ones(2, 4)), model.eval()[1](torch.ones(2, 4)))
    model[1].running_var[0] = torch.inf
    assert "finite" in dict(ng.freeze_norms(model, example=torch.randn(6, 3)).refused)["1"]
    with pytest.raises(InputError, match="selects nothing"):
        ng.freeze_norms(model, example=torch.randn(6, 3), where="encoder.*")


def test_inplace_freezing_keeps_the_parameters_an_optimizer_holds():
    model = chain()
    held = [id(value) for value in model.parameters()]
    done = ng.freeze_norms(model, example=torch.randn(6, 3), inplace=True)
    assert [id(value) for value in model.parameters()] == held and not model.train()[1].training
    done.undo()
    assert model.train()[1].training and type(model[1]) is nn.BatchNorm1d


# -- guard ------------------------------------------------------------------------------------------------------------


def test_one_bad_batch_does_not_poison_the_statistics():
    model, bad = chain(), torch.full((6, 3), torch.inf)
    guarded = ng.guard_norms(model, example=torch.randn(6, 3)).model.train()
    guarded(bad)
    assert same_state(guarded, state(model))
    good = torch.randn(6, 3)
    torch.manual_seed(1)
    guarded(good).sum().backward()
    torch.manual_seed(1)
    model.train()(good)
    assert same_state(guarded, state(model))
    model(bad)
    assert not model[1].running_mean.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_count_once(reentrant):
    inputs = torch.randn(6, 3, requires_grad=True)
    plain, guarded = chain().train(), ng.guard_norms(chain(), example=torch.randn(6, 3)).model.train()
    for model, times in ((plain, 2), (guarded, 1)):
        checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()
        assert int(model[1].num_batches_tracked) == times


def test_momentum_under_accumulation_is_one_update_in_all():
    inputs = torch.randn(6, 3)
    guarded = ng.guard_norms(chain(), example=inputs, accumulation=4).model.train()[1]
    plain, values = chain().train()[1], torch.randn(8, 4)
    plain(values)
    for _ in range(4):
        guarded(values)
    torch.testing.assert_close(guarded.running_mean, plain.running_mean)
    torch.testing.assert_close(guarded.running_var, plain.running_var)
    with pytest.raises(InputError, match="accumulation"):
        ng.guard_norms(chain(), example=inputs, accumulation=0)


# -- recalibrate ------------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_all_values():
    norm = nn.Sequential(nn.BatchNorm2d(3))
    batches = [torch.randn(n, 3, 4, 5) * 2 + 1 for n in (2, 5, 3)]
    done = ng.recalibrate_norms(norm, batches)
    values = torch.cat(batches).transpose(0, 1).flatten(1)
    torch.testing.assert_close(done.model[0].running_mean, values.mean(1))
    torch.testing.assert_close(done.model[0].running_var, values.var(1))
    assert int(norm[0].num_batches_tracked) == 0 and int(done.model[0].num_batches_tracked) == 3


def test_dropout_is_off_any_call_signature_is_taken_and_the_better_is_kept():
    model, batches = chain(), [(torch.randn(6, 3), torch.randint(0, 2, (6,))) for _ in range(3)]
    by_pairs = ng.recalibrate_norms(model, batches)
    by_names = ng.recalibrate_norms(model, [{"input": x} for x, _ in batches])
    own = ng.recalibrate_norms(model, [{"x": x} for x, _ in batches], forward=lambda m, batch: m(batch["x"]))
    assert same_state(by_names.model, state(by_pairs.model)) and same_state(own.model, state(by_pairs.model))
    with pytest.raises(DataError, match="empty"):
        ng.recalibrate_norms(model, [])


def test_old_statistics_stay_where_they_are_better():
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False))
    model[0].running_mean.fill_(1.0)
    batches = [(torch.randn(20, 2), torch.zeros(20, 2))]
    done = ng.recalibrate_norms(model, batches, loss=lambda out, _: (out + 1).square().mean())
    assert "better" in done.refused[0][1] and same_state(done.model, state(model))
    poisoned = nn.Sequential(nn.BatchNorm1d(2))
    poisoned[0].running_mean.fill_(torch.nan)
    assert ng.recalibrate_norms(poisoned, batches).model[0].running_mean.isfinite().all()


# -- split ------------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(5 + 3 * self.b(self.norm(self.a(x))))


def test_each_use_gets_statistics_of_its_own():
    model, inputs = shaken(Shared()), torch.randn(50, 3)
    done = ng.split_norms(model, example=inputs)
    assert done.proof == 0 and len(list(done.model.parameters())) == len(list(model.parameters()))
    split = copy.deepcopy(done.model).train()
    for _ in range(60):
        split(inputs)
    first, second = (use.running_mean for use in split.norm.uses)
    torch.testing.assert_close(first, split.a(inputs).mean(0), rtol=1e-2, atol=1e-2)
    assert (second - first).abs().max() > 1
    torch.testing.assert_close(split.eval()(inputs), split.train()(inputs), rtol=0.1, atol=0.2)
    assert not ng.split_norms(chain(), example=torch.randn(6, 3)).rows


# -- biases -----------------------------------------------------------------------------------------------------------


def test_dead_biases_go_in_both_modes_and_live_ones_stay():
    model = shaken(nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 1),
        nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1), nn.GroupNorm(4, 4), nn.Flatten(1), nn.Linear(144, 2), nn.LayerNorm(2),
    ))  # fmt: skip
    done = ng.strip_biases(model, example=torch.randn(5, 3, 8, 8))
    stripped = [name for name, module in done.model.named_modules() if getattr(module, "bias", 0) is None]
    assert {"0", "2", "6"} <= set(stripped) and {name for name, _ in done.refused} == {"4", "9"}
    assert done.proof <= 1e-10 and {row["mode"] for row in done.proofs} == {"train", "eval"}


def test_a_bias_that_is_read_elsewhere_lives():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.linear(x)
            return self.norm(y) + y

    done = ng.strip_biases(shaken(Skip()), example=torch.randn(5, 3))
    assert "elsewhere" in done.refused[0][1] and done.model.linear.bias is not None
    one = ng.strip_biases(chain(), example=torch.randn(1, 3))  # no train mode for one sample
    assert one.proof <= 1e-10 and {row["mode"] for row in one.proofs} == {"eval"}


# -- old hooks --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_old_weight_norms_become_parametrizations_and_old_checkpoints_load():
    model = nn.Sequential(
        nn.utils.weight_norm(nn.Conv1d(2, 3, 3)), nn.Flatten(), nn.utils.weight_norm(nn.Linear(18, 4), dim=1)
    )
    model = shaken(model)
    done = ng.migrate_weight_norm(model, example=torch.randn(2, 2, 8))
    assert done.proof <= 1e-10 and {row["mode"] for row in done.proofs} == {"train", "eval"}
    assert torch.equal(done.model[0].parametrizations.weight.original0, model[0].weight_g)
    assert torch.equal(done.model[2].parametrizations.weight.original1, model[2].weight_v)
    done.model.load_state_dict(model.state_dict())
    copy.deepcopy(done.model)(torch.randn(2, 2, 8)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.migrate_weight_norm(done.model, example=torch.randn(2, 2, 8))


@pytest.mark.filterwarnings("ignore")
def test_old_spectral_norms_keep_their_vectors():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 4)))
    for _ in range(3):
        model(torch.randn(2, 5))
    done = ng.migrate_weight_norm(model, example=torch.randn(2, 5))
    assert done.proof <= 1e-10 and torch.equal(done.model[0].parametrizations.weight[0]._u, model[0].weight_u)
    assert not model[0]._state_dict_hooks or not done.model[0]._state_dict_hooks
