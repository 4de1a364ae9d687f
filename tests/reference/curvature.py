"""Dense, slow curvature: norms written by hand, Hessians by a loop of double backward passes.

`torch.func.hessian` is not used on purpose: it is silently wrong through fused BatchNorm and LayerNorm.
"""

import torch
from torch import nn
from torch.func import functional_call


class HandBatchNorm(nn.Module):
    """BatchNorm written with means and differences; takes over the parameters of a torch one."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.mean, self.variance = layer.running_mean, layer.running_var

    def forward(self, x):
        axes = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        if self.training:
            mean = x.mean(axes, keepdim=True)
            variance = ((x - mean) ** 2).mean(axes, keepdim=True)
        else:
            mean, variance = self.mean.view(shape), self.variance.view(shape)
        out = (x - mean) / (variance + self.eps) ** 0.5
        return out if self.weight is None else out * self.weight.view(shape) + self.bias.view(shape)


class HandGroupNorm(nn.Module):
    """GroupNorm (InstanceNorm with as many groups as channels)."""

    def __init__(self, layer, groups):
        super().__init__()
        self.weight, self.bias, self.eps, self.groups = layer.weight, layer.bias, layer.eps, groups

    def forward(self, x):
        grouped = x.reshape(x.shape[0], self.groups, -1)
        centered = grouped - grouped.mean(-1, keepdim=True)
        out = (centered / ((centered**2).mean(-1, keepdim=True) + self.eps) ** 0.5).reshape(x.shape)
        shape = [1, -1] + [1] * (x.ndim - 2)
        return out if self.weight is None else out * self.weight.view(shape) + self.bias.view(shape)


class HandLayerNorm(nn.Module):
    """LayerNorm over the last axis, or RMSNorm when `center` is false."""

    def __init__(self, layer, center=True):
        super().__init__()
        self.weight, self.bias = layer.weight, getattr(layer, "bias", None)
        self.eps = torch.finfo(torch.float64).eps if layer.eps is None else layer.eps
        self.center = center

    def forward(self, x):
        centered = x - x.mean(-1, keepdim=True) if self.center else x
        out = centered / ((centered**2).mean(-1, keepdim=True) + self.eps) ** 0.5
        out = out if self.weight is None else out * self.weight
        return out if self.bias is None else out + self.bias


class HandWeightNorm(nn.Module):
    """g v / |v| per row."""

    def forward(self, g, v):
        return v * g / (v**2).sum(tuple(range(1, v.ndim)), keepdim=True) ** 0.5


def hand_written(model):
    """Swap every fused norm of `model` (in place) for the same norm written by hand, sharing the parameters."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d)):
                setattr(module, name, HandBatchNorm(child))
            elif isinstance(child, nn.GroupNorm):
                setattr(module, name, HandGroupNorm(child, child.num_groups))
            elif isinstance(child, nn.InstanceNorm2d):
                setattr(module, name, HandGroupNorm(child, child.num_features))
            elif isinstance(child, nn.LayerNorm):
                setattr(module, name, HandLayerNorm(child))
            elif type(child).__name__ == "_WeightNorm":
                module[int(name)] = HandWeightNorm()
            elif isinstance(child, nn.RMSNorm):
                setattr(module, name, HandLayerNorm(child, center=False))
    return model


def flat_loss(model, loss, batches, mode):
    """Return (function of the flat parameters, flat parameters): the weighted mean loss over the batches."""
    model.train(mode == "train")
    parameters = dict(model.named_parameters())
    flat = torch.cat([value.detach().reshape(-1) for value in parameters.values()])
    weights = [len(target) for _, target in batches]

    def value(theta):
        pieces, start = {}, 0
        for name, parameter in parameters.items():
            pieces[name] = theta[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        state = {**pieces, **{name: buffer.clone() for name, buffer in model.named_buffers()}}
        losses = [loss(functional_call(model, state, (x,)), y) for x, y in batches]
        return sum(w * term for w, term in zip(weights, losses, strict=True)) / sum(weights)

    return value, flat


def dense_hessian(model, loss, batches, mode):
    """Return the Hessian of the mean loss, row by row, for a model with hand-written norms."""
    value, flat = flat_loss(model, loss, batches, mode)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.autograd.functional.hessian(value, flat, vectorize=False)


def _outputs_and_weights(model, batches, mode):
    value, flat = flat_loss(model, lambda out, _: out, [batches[0]], mode)
    del value
    functions = [flat_loss(model, lambda out, _: out.reshape(-1), [batch], mode)[0] for batch in batches]
    return functions, flat, [len(target) for _, target in batches]


def dense_jacobian(model, loss, batches, mode):
    """Return the Jacobian of all output entries, one backward pass per entry."""
    functions, flat, _ = _outputs_and_weights(model, batches, mode)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.cat([torch.autograd.functional.jacobian(f, flat, vectorize=False) for f in functions])


def _through_outputs(model, loss, batches, mode, middle):
    functions, flat, weights = _outputs_and_weights(model, batches, mode)
    total = torch.zeros(len(flat), len(flat))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for function, (_, target), weight in zip(functions, batches, weights, strict=True):
            jacobian = torch.autograd.functional.jacobian(function, flat, vectorize=False)
            out = function(flat).detach()
            total += weight * jacobian.T @ middle(out, target) @ jacobian
    return total / sum(weights)


def dense_gauss_newton(model, loss, batches, mode):
    """Return J^T (d^2 loss / d output^2) J with dense factors."""

    def middle(out, target):
        shape = (len(target), -1)
        return torch.autograd.functional.hessian(lambda o: loss(o.view(shape), target), out)

    return _through_outputs(model, loss, batches, mode, middle)


def dense_empirical_fisher(model, loss, batches, mode):
    """Return the mean of g_i g_i^T, sample by sample: g_i = J_i^T d loss_i / d output_i."""

    def middle(out, target):
        outputs = out.view(len(target), -1)
        width, blocks = outputs.shape[1], []
        for sample in range(len(target)):
            alone = outputs[sample : sample + 1].clone().requires_grad_()
            (slope,) = torch.autograd.grad(loss(alone, target[sample : sample + 1]), alone)
            blocks.append(slope.reshape(width, 1) @ slope.reshape(1, width) / len(target))
        return torch.block_diag(*blocks)

    return _through_outputs(model, loss, batches, mode, middle)
