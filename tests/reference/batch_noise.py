"""Mini-batch gradients by enumeration of every mini-batch of a tiny data set."""

from itertools import combinations

import torch


def gradient(model, loss, inputs, targets, rows=None):
    """Return the flat gradient; with `rows` that of these samples' losses within the batch of all."""
    model.zero_grad()
    out = model(inputs)
    (loss(out, targets) if rows is None else loss(out[rows], targets[rows])).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone(), out.detach().argmax(-1)


def all_batches(model, loss, batch, size):
    """Return bias, the parts of the variance, tr(H C) numerator vectors and jitter over all batches of a size."""
    inputs, targets = batch
    whole, decided = gradient(model, loss, inputs, targets)
    noises, extras, jitter = [], [], []
    for chosen in combinations(range(len(targets)), size):
        rows = list(chosen)
        own, labels = gradient(model, loss, inputs[rows], targets[rows])
        sampled, _ = gradient(model, loss, inputs, targets, rows)
        noises.append(sampled - whole)
        extras.append(own - sampled)
        jitter.append((labels != decided[rows]).double().mean())
    noises, extras = torch.stack(noises), torch.stack(extras)
    bias = extras.mean(0)
    parts = {
        "sampling": noises.square().sum(1).mean(),
        "statistics": (extras - bias).square().sum(1).mean(),
        "cross": 2 * (noises * (extras - bias)).sum(1).mean(),
        "total": (noises + extras - bias).square().sum(1).mean(),
    }
    return {"bias": bias.norm(), **parts, "jitter": torch.stack(jitter).mean(), "noise": noises + extras}
