"""Parameter noise by hand: a deep copy of the model per draw, moved in the open."""

import copy

import torch


def noisy_losses(model, loss, batch, noise, sigma, samples, seed, *, training):
    """Return the losses of `samples` copies with absolute or filter noise, drawn in the order of the parameters."""
    source = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(samples):
        net = copy.deepcopy(model).train(training)
        with torch.no_grad():
            for p in net.parameters():
                draw = torch.randn(p.shape, generator=source, dtype=torch.float64)
                if noise == "filter":
                    for i in range(p.shape[0]):
                        draw[i] *= p[i].norm() / p[i].numel() ** 0.5
                p += sigma * draw
            found.append(float(loss(net(batch[0]), batch[1])))
    return found
