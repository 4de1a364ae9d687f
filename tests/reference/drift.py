"""Recalibration in the open: a deep copy whose BatchNorm layers average the batches' statistics."""

import copy

import torch
from torch import nn


def recalibrated_by_inputs(model, batches):
    """Return a copy whose normalizers store the pooled moments of their inputs, each batch normalized by itself."""
    net = copy.deepcopy(model).eval()
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    inputs = {norm: [] for norm in norms}
    handles = [norm.register_forward_hook(lambda m, i, o: inputs[m].append(i[0].detach())) for norm in norms]
    for norm in norms:
        norm.train()
    with torch.no_grad():
        for x in batches:
            net(x)
    for handle in handles:
        handle.remove()
    for norm in norms:
        values = torch.cat([x.movedim(1, -1).reshape(-1, x.shape[1]) for x in inputs[norm]])
        norm.running_mean.copy_(values.mean(0))
        norm.running_var.copy_(values.var(0))
    return net.eval()
