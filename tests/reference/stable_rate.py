"""The stability of gradient descent by running it in the open on a copy, for many steps."""

import copy

import torch


def descends(model, loss, batch, rate, steps, *, training):
    """Return the losses of `steps` steps of torch's SGD on a copy."""
    net = copy.deepcopy(model).train(training)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(net(batch[0]), batch[1])
        value.backward()
        losses.append(float(value.detach()))
        optimizer.step()
    return losses
