"""No wrong "exact": whatever is called exact holds for other factors, other data and at other points."""

import copy

import pytest
import torch

import normgauge as ng
from random_nets import random_net


def outputs(net, point, batch, mode):
    net = copy.deepcopy(net).train(mode == "train")
    return torch.func.functional_call(net, point, (batch,))


def movement(net, family, batch, mode, seed, start=0.0):
    """How far the outputs move under changes the search did not try: odd factors, fresh data, another point.

    `start` moves the whole family first, far enough that eps no longer counts.
    """
    source = torch.Generator().manual_seed(seed)
    noise = {n: torch.randn(p.shape, generator=source) for n, p in net.named_parameters()}
    point = {
        n: p.detach() + 0.2 * (p.detach().square().mean().sqrt() + 0.1) * noise[n] for n, p in net.named_parameters()
    }
    amounts = 1.7 * torch.randn(len(family), generator=source)
    if start:
        point = family.act(point, torch.full((len(family),), start))
    matrix = family.kind == "matrix"
    after = family.act_randomly(dict(point), source) if matrix else family.act(dict(point), amounts)
    fresh = batch.std() * torch.randn(batch.shape, generator=source)
    before = outputs(net, point, fresh, mode)
    return float((outputs(net, after, fresh, mode) - before).abs().max() / before.abs().max())


def check(seed):
    net, batch = random_net(seed)
    mode = "train" if seed % 2 else "eval"
    data = (batch, torch.zeros(len(batch)))
    found = ng.symmetries(ng.Objective(net, lambda out, _: out.square().mean(), data, mode=mode))
    for family in found.families:
        if family.status == "exact" and family.counted:
            assert movement(net, family, batch, mode, seed) < 1e-8, (seed, family.describe())
        if family.status == "exact_without_eps":
            far = min(movement(net, family, batch, mode, seed, start=s) for s in (20.0, -20.0))
            assert far < 1e-8, (seed, family.describe())
        if family.status == "exact" and family.kind == "scale" and len(family.terms) == 1:
            assert not _behind_eps(family, net, batch, mode), (seed, family.describe())


def _behind_eps(family, net, batch, mode):
    """Whether shrinking the weights a thousandfold shows an eps that the certificate overlooked."""
    point = {n: p.detach() for n, p in net.named_parameters()}
    tiny = family.act(dict(point), torch.full((len(family),), -10.0))
    before = outputs(net, point, batch, mode)
    return float((outputs(net, tiny, batch, mode) - before).abs().max() / before.abs().max()) > 1e-6


@pytest.mark.parametrize("seed", range(12))
def test_exact_is_exact(seed):
    check(seed)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(12, 212))
def test_exact_is_exact_on_two_hundred_networks(seed):
    check(seed)
