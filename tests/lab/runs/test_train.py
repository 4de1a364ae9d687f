"""The training loop: order of batches, divergence, clipping, steps of one's own."""

import itertools
import math

import pytest
import torch
from torch import nn

from normgauge.errors import InputError, NonFiniteError
from normgauge.lab import data, models
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import Batches, Training, augment_images, train


@pytest.fixture(autouse=True)
def single_precision(double_precision):
    torch.set_default_dtype(torch.float32)


def trained(**options):
    dataset = data.load("digits")
    network = models.build("mlp", "batch", dataset.shape, dataset.classes, 0)
    optimizer = torch.optim.SGD(network.parameters(), lr=options.pop("lr", 0.1))
    return network, dataset, train(network, dataset, optimizer, **{"batch": 64, "seed": 0, **options})


def gradient_norm(network):
    return math.sqrt(sum(float(value.grad.square().sum()) for value in network.parameters()))


def test_training_lowers_the_loss_and_repeats_itself():
    network, dataset, first = trained(steps=30)
    assert not first.diverged and first.losses[-1] < 0.5 * first.losses[0]
    assert trained(steps=30)[2].losses == first.losses
    found = evaluate(network, dataset)
    assert found.loss < 2.0 and found.accuracy > 0.6 and network.training


def test_divergence_is_a_value():
    _, _, result = trained(steps=30, schedule=lambda step: 1e9)
    assert result.diverged and result.diverged_at <= 30 and len(result.losses) == result.diverged_at
    _, _, low = trained(steps=30, ceiling=0.1)
    assert low.diverged_at == 1 and len(low.losses) == 1
    broken = trained(steps=5, ceiling=math.inf, loss=lambda outputs, targets: outputs.sum() * math.nan)[2]
    assert broken.diverged_at == 1 and math.isnan(broken.losses[0])


def test_the_whole_split_in_its_own_order():
    dataset, rows = data.load("digits"), []

    def step(chosen):
        rows.append(chosen)
        return 1.0

    train(nn.Linear(1, 1), dataset, steps=2, batch=None, seed=3, step=step)
    assert all(torch.equal(chosen, torch.arange(len(dataset.train[1]))) for chosen in rows) and len(rows) == 2


def test_a_pair_with_a_loss_equals_the_dataset():
    network, dataset, first = trained(steps=4)
    twin = models.build("mlp", "batch", dataset.shape, dataset.classes, 0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    again = train(twin, dataset.train, optimizer, steps=4, batch=64, seed=0, loss=nn.functional.cross_entropy)
    assert again.losses == first.losses
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), twin.parameters(), strict=True))


def test_gradients_are_seen_whole_and_clipped_before_the_step():
    dataset = data.load("digits")
    network = models.build("mlp", "none", dataset.shape, dataset.classes, 0)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    seen, moved = [], []

    def look(step, loss):
        seen.append((step, loss, gradient_norm(network)))
        moved.append([value.detach().clone() for value in network.parameters()])

    done = train(network, dataset, optimizer, steps=3, batch=64, seed=0, clip=1e-3, on_gradient=look)
    moved.append([value.detach() for value in network.parameters()])
    assert [step for step, _, _ in seen] == [0, 1, 2] and [loss for _, loss, _ in seen] == done.losses
    assert min(norm for _, _, norm in seen) > 0.1
    for before, after in itertools.pairwise(moved):
        change = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(before, after, strict=True)))
        assert change == pytest.approx(1e-3, rel=1e-2)


def test_training_may_end_early_and_takes_penalties_out_of_the_losses():
    asked = []

    def until(step, losses):
        asked.append((step, len(losses)))
        return step == 3

    _, _, done = trained(steps=30, until=until)
    assert len(done.losses) == 3 and not done.diverged and asked == [(1, 1), (2, 2), (3, 3)]
    _, _, weighed = trained(steps=1, penalty=lambda network: 5.0 + 0 * next(network.parameters()).sum())
    assert weighed.losses == done.losses[:1]


def test_what_a_step_needs_is_said():
    dataset = data.load("digits")
    network = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for pieces, options in (
        ((dataset,), {}),
        ((dataset.train, optimizer), {}),
        ((dataset, optimizer), {"step": lambda rows: 1.0, "clip": 1.0}),
        ((dataset,), {"step": lambda rows: 1.0, "augment": True}),
    ):
        with pytest.raises(InputError, match="an optimizer and a loss, or a step of one's own"):
            train(network, *pieces, steps=1, batch=8, seed=0, **options)


def test_batches_depend_on_the_seed_alone_and_cover_an_epoch():
    stream, again = Batches(10, 5, 3), Batches(10, 5, 3)
    epoch = torch.cat([next(stream), next(stream)])
    assert torch.equal(epoch.sort().values, torch.arange(10))
    assert torch.equal(epoch, torch.cat([next(again), next(again)]))
    assert not torch.equal(epoch, torch.cat([next(Batches(10, 5, 4)), next(Batches(10, 5, 4))]))


def test_augmentation_shifts_and_flips():
    image = torch.zeros(200, 1, 16, 16)
    image[:, 0, 8, 5] = 1
    moved = augment_images(image, torch.Generator().manual_seed(0))
    places = moved.flatten(1).argmax(1)
    rows, columns = places // 16, places % 16
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(200))
    assert set(rows.tolist()) == set(range(6, 11))
    assert set(columns.tolist()) == set(range(3, 8)) | {15 - c for c in range(3, 8)}


def test_steps_to_a_target():
    assert Training([4.0, 2.0, 0.5, 0.5]).steps_to(0.6, window=1) == 3
    assert Training([4.0]).steps_to(0.1) is None


def test_a_training_that_broke_is_no_whole():
    broken = Training([1.0, 50.0], diverged_at=2)
    with pytest.raises(NonFiniteError, match="diverged at step 2"):
        broken.whole()
    assert Training([1.0]).whole().losses == [1.0]
