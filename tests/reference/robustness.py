"""Attacks written as loops over samples and steps, on a copy of the model."""

import copy

import torch
from torch.nn import functional as F


def attacked_one_by_one(model, inputs, labels, *, ball, radius, steps, step, bounds):
    """Return the inputs after gradient ascent from the clean input, one sample at a time, in eval mode."""
    net = copy.deepcopy(model).eval()
    found = []
    for x, y in zip(inputs, labels, strict=True):
        z = x.clone()
        for _ in range(steps):
            z = z.detach().requires_grad_()
            F.cross_entropy(net(z[None]), y[None]).backward()
            g = z.grad
            z = z.detach() + step * (g.sign() if ball == "linf" else g / g.norm())
            away = z - x
            if ball == "linf":
                away = torch.maximum(torch.minimum(away, torch.tensor(radius)), torch.tensor(-radius))
            elif away.norm() > radius:
                away = away * radius / away.norm()
            z = x + away
            if bounds is not None:
                z = z.clip(*bounds)
        found.append(z)
    return torch.stack(found)
