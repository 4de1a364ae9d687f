"""Dense twins: the Jacobian written out, its nullity over enough inputs, generator vectors one by one."""

import copy

import torch


def jacobian(model, inputs, *, mode, forward=None):
    """The Jacobian of all outputs by all parameters, batches stacked."""
    model = copy.deepcopy(model).double()
    model.train(mode == "train")
    parameters = [p for p in model.parameters() if p.requires_grad]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    rows = []
    for batch in inputs:
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(buffers[name])
        out = (forward or (lambda m, x: m(x)))(model, batch).reshape(-1)
        rows.append(_rows(out, parameters))
    return torch.cat(rows)


def _rows(out, parameters):
    """One backward pass per entry; all at once where torch can batch them (same numbers, less waiting)."""
    options = {"retain_graph": True, "materialize_grads": True}
    try:
        slopes = torch.autograd.grad(out, parameters, torch.eye(len(out)), is_grads_batched=True, **options)
        return torch.cat([s.reshape(len(out), -1) for s in slopes], 1)
    except RuntimeError:
        return torch.stack(
            [torch.cat([s.reshape(-1) for s in torch.autograd.grad(o, parameters, **options)]) for o in out]
        )


def nullity(model, inputs, *, mode, forward=None, threshold=1e-9):
    """The number of parameter directions that move no output to first order."""
    matrix = jacobian(model, inputs, mode=mode, forward=forward)
    matrix = matrix / matrix.norm(dim=1, keepdim=True).clamp_min(1e-300)
    sigma = torch.linalg.svdvals(matrix)
    return matrix.shape[1] - int((sigma > threshold * sigma[0]).sum()), sigma


def unmoved(model, inputs, change, *, mode):
    """The largest movement of the outputs when `change` is applied to a copy of the parameters."""
    before = copy.deepcopy(model).double().train(mode == "train")
    after = copy.deepcopy(before)
    with torch.no_grad():
        change(dict(after.named_parameters()))
        return max(float((before(x) - after(x)).abs().max()) for x in inputs)


def generator_rank(found):
    """The rank of all generator vectors (matrix ones excluded), written out one by one at the given parameters."""
    point = {name: value + 0.1 * torch.randn_like(value) for name, value in found.parameters.items()}
    rows = []
    for family in found.families:
        if family.kind == "matrix" or not family.counted:
            continue
        for position in range(len(family)):
            unit = torch.zeros(len(family))
            unit[position] = 1.0
            field = family.field(point, unit)
            rows.append(torch.cat([field.get(name, torch.zeros_like(point[name])).reshape(-1) for name in point]))
    return int(torch.linalg.matrix_rank(torch.stack(rows), rtol=1e-9))
