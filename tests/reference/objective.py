"""Dense twins: losses, gradients and Hessians by loops on hand-written normalizations."""

import torch
from torch import nn


class HandBatchNorm(nn.Module):
    """BatchNorm in elementary operations: every derivative is ordinary automatic differentiation."""

    def __init__(self, twin):
        super().__init__()
        self.weight, self.bias = nn.Parameter(twin.weight.detach().clone()), nn.Parameter(twin.bias.detach().clone())
        self.register_buffer("running_mean", twin.running_mean.clone())
        self.register_buffer("running_var", twin.running_var.clone())
        self.eps = twin.eps

    def forward(self, x):
        shape = [1, -1] + [1] * (x.ndim - 2)
        axes = [axis for axis in range(x.ndim) if axis != 1]
        if self.training:
            mean = x.mean(axes, keepdim=True)
            var = (x - mean).square().mean(axes, keepdim=True)
        else:
            mean, var = self.running_mean.reshape(shape), self.running_var.reshape(shape)
        return (x - mean) / (var + self.eps).sqrt() * self.weight.reshape(shape) + self.bias.reshape(shape)


class HandLayerNorm(nn.Module):
    def __init__(self, twin):
        super().__init__()
        self.weight, self.bias = nn.Parameter(twin.weight.detach().clone()), nn.Parameter(twin.bias.detach().clone())
        self.eps, self.axes = twin.eps, [-1 - i for i in range(len(twin.normalized_shape))]

    def forward(self, x):
        mean = x.mean(self.axes, keepdim=True)
        var = (x - mean).square().mean(self.axes, keepdim=True)
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class HandGroupNorm(nn.Module):
    def __init__(self, twin):
        super().__init__()
        self.weight, self.bias = nn.Parameter(twin.weight.detach().clone()), nn.Parameter(twin.bias.detach().clone())
        self.eps, self.groups = twin.eps, twin.num_groups

    def forward(self, x):
        shape = [1, -1] + [1] * (x.ndim - 2)
        grouped = x.reshape(x.shape[0], self.groups, -1)
        mean = grouped.mean(-1, keepdim=True)
        var = (grouped - mean).square().mean(-1, keepdim=True)
        normal = ((grouped - mean) / (var + self.eps).sqrt()).reshape(x.shape)
        return normal * self.weight.reshape(shape) + self.bias.reshape(shape)


class HandRMSNorm(nn.Module):
    def __init__(self, twin):
        super().__init__()
        self.weight = nn.Parameter(twin.weight.detach().clone())
        self.eps = twin.eps

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


def dense_hessian(model, loss, batches, *, training):
    """Return the Hessian of the sample-weighted mean loss, row by row, in the order of named_parameters."""
    model.train(training)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = dict(model.named_parameters())
    sizes = [parameters[name].numel() for name in names]
    point = torch.cat([parameters[name].detach().reshape(-1) for name in names])

    def objective(vector):
        pieces = {
            name: piece.reshape(parameters[name].shape) for name, piece in zip(names, vector.split(sizes), strict=True)
        }
        total, count = 0.0, 0
        for inputs, targets in batches:
            buffers = {name: value.clone() for name, value in model.named_buffers()}
            output = torch.func.functional_call(model, {**pieces, **buffers}, (inputs,))
            total = total + len(targets) * loss(output, targets)
            count += len(targets)
        return total / count

    return torch.autograd.functional.hessian(objective, point, vectorize=False)


def dense_gauss_newton(model, loss, batch, *, training):
    """Return J^T H_loss J from explicit Jacobians, in the order of named_parameters."""
    model.train(training)
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    sizes = [p.numel() for p in parameters.values()]
    point = torch.cat([p.reshape(-1) for p in parameters.values()])
    inputs, targets = batch

    def outputs(vector):
        pieces = {n: v.reshape(parameters[n].shape) for n, v in zip(parameters, vector.split(sizes), strict=True)}
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        return torch.func.functional_call(model, {**pieces, **buffers}, (inputs,))

    out = outputs(point).detach()
    jacobian = torch.autograd.functional.jacobian(outputs, point, vectorize=False).reshape(out.numel(), -1)
    curvature = torch.autograd.functional.hessian(lambda o: loss(o.reshape(out.shape), targets), out.reshape(-1))
    return jacobian.T @ curvature @ jacobian
