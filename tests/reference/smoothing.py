"""Gradient and curvature through one normalizer of a chain, dense, and of the chain whose backward path skips it."""

import torch


def split_losses(model, position, loss, batch):
    """Return y, z, and the loss as a function of y through layer `position` and as a function of its output z."""
    inputs, targets = batch
    y = model[:position](inputs).detach()

    def after(z):
        return loss(model[position + 1 :](z), targets)

    def through(flat):
        return after(model[position](flat.view(y.shape)))

    z = model[position](y).detach()
    return y, z, through, lambda flat: after(flat.view(z.shape))


def dense_smoothing(model, position, loss, batch):
    """Return |v|^2, |g|^2, v^T Hhat v and g^T H g: v, Hhat by y through the layer, g, H by z (the twin's by y)."""
    y, z, through, plain = split_losses(model, position, loss, batch)
    v = torch.autograd.functional.jacobian(through, y.reshape(-1))
    g = torch.autograd.functional.jacobian(plain, z.reshape(-1))
    bent = torch.autograd.functional.hessian(through, y.reshape(-1))
    flat = torch.autograd.functional.hessian(plain, z.reshape(-1))
    return {
        "size": v @ v,
        "twin": g @ g,
        "curvature": v @ bent @ v,
        "twin_curvature": g @ flat @ g,
        "g": g.view(z.shape),
    }


def twin_gradient(model, position, loss, batch):
    """Return the gradient by the layer's input of the network that computes the same, its layer skipped backwards."""
    inputs, targets = batch
    y = model[:position](inputs).detach().requires_grad_()
    z = model[position](y.detach()) + y - y.detach()
    return torch.autograd.grad(loss(model[position + 1 :](z), targets), y)[0]
