"""Signal and gradient layer by layer, written out; and the mean field of batch norm by Monte Carlo."""

import torch
from torch import nn


def layer_by_layer(model, loss, batch):
    """Run an nn.Sequential by hand; return per module its output and the gradient there."""
    outputs, x = [], batch[0]
    for module in model:
        x = module(x)
        x.retain_grad()
        outputs.append(x)
    loss(x, batch[1]).backward()
    return [(out.detach(), out.grad) for out in outputs]


def monte_carlo_layer(phi, batch, samples, seed=0):
    """Return (squared growth, q, c) of one wide batch-normalized layer by sampling its units' batches.

    Units h ~ N(0, q - c times identity) up to a common shift, so the gradient is pulled back through torch's own
    autograd of standardize and phi, starting from gradients of covariance G.
    """
    source = torch.Generator().manual_seed(seed)
    h = torch.randn(samples, batch, generator=source)

    def normalize(h):
        centred = h - h.mean(1, keepdim=True)
        return centred / centred.square().mean(1, keepdim=True).sqrt()

    f = phi(normalize(h))
    q = float(f.square().mean())
    c = float(((f.sum(1) ** 2 - f.square().sum(1)) / (batch * (batch - 1))).mean())
    h = (h * (q - c) ** 0.5).requires_grad_()
    given = torch.randn(samples, batch, generator=source)
    given = given - given.mean(1, keepdim=True)
    (back,) = torch.autograd.grad((phi(normalize(h)) * given).sum(), h)
    return float(back.square().sum() / given.square().sum()), q, c


def deep_batchnorm(activation, width, depth, seed):
    source = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(depth):
        linear = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(width, width, generator=source) / width**0.5)
        layers += [linear, nn.BatchNorm1d(width, eps=1e-12), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def ablated_accuracy(model, batch, layer, units):
    """Accuracy of an nn.Sequential run by hand with some units of one layer's output held at their means."""
    x = batch[0]
    for number, module in enumerate(model):
        x = module(x)
        if number == layer:
            means = x.mean([i for i in range(x.ndim) if i != 1])
            x = x.clone()
            for unit in units:
                x[:, unit] = means[unit]
    return float((x.argmax(1) == batch[1]).double().mean())
