"""A model's structure the slow way: finite differences from every tensor to every other, and formulas written out."""

import torch
from torch import nn


def outputs_of_calls(model, inputs, forward):
    """Return the outputs of all calls of modules without children, (name, time) -> tensor, by hooks of its own."""
    made, times, handles = {}, {}, []
    for name, module in model.named_modules():
        if not list(module.children()):

            def hook(module, given, output, name=name):
                times[name] = times.get(name, 0) + 1
                made[name, times[name]] = output if isinstance(output, torch.Tensor) else output[0]

            handles.append(module.register_forward_hook(hook))
    with torch.no_grad():
        result = forward(model, inputs)
    for handle in handles:
        handle.remove()
    return made, result


def readers(model, inputs, forward, layer):
    """Return the names of the leaf modules whose output moves when that of `layer` does."""
    source = torch.Generator().manual_seed(0)
    before, _ = outputs_of_calls(model, inputs, forward)
    module = dict(model.named_modules())[layer]
    noise = torch.randn(before[layer, 1].shape, generator=source).to(before[layer, 1])
    handle = module.register_forward_hook(lambda m, given, output: output + noise)
    after, _ = outputs_of_calls(model, inputs, forward)
    handle.remove()
    return {name for (name, time), value in before.items() if not torch.equal(value, after[name, time])}


def folded(layer, norm):
    """Return weight and bias of Linear and BatchNorm as one map, from what they do to unit vectors."""
    both = nn.Sequential(layer, norm).double().eval()
    with torch.no_grad():
        bias = both(torch.zeros(1, layer.in_features, dtype=torch.float64))[0]
        weight = (both(torch.eye(layer.in_features, dtype=torch.float64)) - bias).T
    return weight, bias
