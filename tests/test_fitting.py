"""The training loop of the studies: order of batches, divergence, augmentation, and the share of measurements."""

import pytest
import torch

from normgauge.errors import InputError
from normgauge.lab import data, models
from normgauge.lab.runs.train import Batches, Fit, augmented, evaluate, fit


@pytest.fixture(autouse=True)
def single_precision(double_precision):
    torch.set_default_dtype(torch.float32)


def trained(**options):
    dataset = data.load("digits")
    network = models.build("mlp", "batch", dataset.shape, dataset.classes, 0)
    optimizer = torch.optim.SGD(network.parameters(), lr=options.pop("lr", 0.1))
    return network, dataset, fit(network, dataset, optimizer, batch=64, seed=0, **options)


def test_training_lowers_the_loss_and_repeats_itself():
    network, dataset, first = trained(steps=30)
    assert not first.diverged and first.losses[-1] < 0.5 * first.losses[0]
    assert trained(steps=30)[2].losses == first.losses
    loss, accuracy = evaluate(network, dataset)
    assert loss < 2.0 and accuracy > 0.6 and network.training


def test_divergence_is_a_value():
    _, _, result = trained(steps=30, schedule=lambda step: 1e9)
    assert result.diverged and result.diverged_at <= 30 and len(result.losses) == result.diverged_at


def test_measurements_keep_to_their_share():
    seen = []
    trained(steps=8, at=range(9), watch=lambda step, network: seen.append(step))
    assert seen == list(range(9))
    seen.clear()
    trained(steps=8, at=range(9), watch=lambda step, network: seen.append(step), share=0.0)
    assert seen == [0, 8]
    with pytest.raises(InputError, match="from 0 to 1"):
        trained(steps=1, share=2.0)


def test_batches_depend_on_the_seed_alone_and_cover_an_epoch():
    stream, again = Batches(10, 5, 3), Batches(10, 5, 3)
    epoch = torch.cat([next(stream), next(stream)])
    assert torch.equal(epoch.sort().values, torch.arange(10))
    assert torch.equal(epoch, torch.cat([next(again), next(again)]))
    assert not torch.equal(epoch, torch.cat([next(Batches(10, 5, 4)), next(Batches(10, 5, 4))]))


def test_augmentation_shifts_and_flips():
    image = torch.zeros(200, 1, 16, 16)
    image[:, 0, 8, 5] = 1
    moved = augmented(image, torch.Generator().manual_seed(0))
    places = moved.flatten(1).argmax(1)
    rows, columns = places // 16, places % 16
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(200))
    assert set(rows.tolist()) == set(range(6, 11))
    assert set(columns.tolist()) == set(range(3, 8)) | {15 - c for c in range(3, 8)}


def test_steps_to_a_target():
    assert Fit([4.0, 2.0, 0.5, 0.5]).steps_to(0.6, window=1) == 3
    assert Fit([4.0]).steps_to(0.1) is None
