"""S1 Definition 2.1 by hand: copies of the model, one layer after the other overwritten, gradients in the open."""

import copy

import torch


def shift_by_copies(model, loss, batch, layers, new, *, training):
    """Return per layer |G - G'| and the cosine; `layers` are lists of parameter names in order of execution."""

    def gradients(net):
        net.train(training)
        net.zero_grad()
        loss(net(batch[0]), batch[1]).backward()
        return {n: p.grad.clone() for n, p in net.named_parameters()}

    def flat(values, names):
        return torch.cat([values[name].reshape(-1) for name in names])

    base = gradients(copy.deepcopy(model))
    found = []
    for i, names in enumerate(layers):
        net = copy.deepcopy(model)
        with torch.no_grad():
            for earlier in layers[:i]:
                for name in earlier:
                    dict(net.named_parameters())[name].copy_(new[name])
        now = gradients(net)
        a, b = flat(base, names), flat(now, names)
        found.append((float((a - b).norm()), float(a @ b / (a.norm() * b.norm()))))
    return found


def stepped_copy(model, optimizer, loss, batch, *, training):
    """Return the parameters after one real step of a deep copy of model and optimizer together."""
    net, twin = copy.deepcopy((model, optimizer))
    net.train(training)
    net.zero_grad()
    loss(net(batch[0]), batch[1]).backward()
    twin.step()
    return {n: p.detach() for n, p in net.named_parameters()}
