"""The landscape by hand: deep copies of the model, moved and differentiated in the open."""

import copy

import torch


def landscape_by_copies(model, loss, batch, steps, *, training):
    """Return losses, gradient distances and effective betas along the gradient."""

    def look(net):
        net.train(training)
        net.zero_grad()
        value = loss(net(batch[0]), batch[1])
        value.backward()
        return float(value.detach()), torch.cat([p.grad.reshape(-1) for p in net.parameters()])

    _, gradient = look(copy.deepcopy(model))
    losses, distances, betas = [], [], []
    for step in steps:
        moved = copy.deepcopy(model)
        with torch.no_grad():
            start = 0
            for p in moved.parameters():
                p -= step * gradient[start : start + p.numel()].reshape(p.shape)
                start += p.numel()
        value, slope = look(moved)
        losses.append(value)
        distances.append(float((slope - gradient).norm()))
        betas.append(distances[-1] / (step * float(gradient.norm())))
    return losses, distances, betas
