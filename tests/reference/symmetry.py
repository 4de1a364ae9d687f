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


def fibre_walk(model, batches, held_out, families, point, *, mode, steps=(0.01, 0.002, 0.0004)):
    """The null directions off all families' vectors, and how far held-out outputs move over a walk along them.

    Every step is a least-squares solution with the Jacobian written out anew; where they do not converge, the walk is
    shorter.
    """
    model = copy.deepcopy(model).train(mode == "train")
    parameters = [p for p in model.parameters() if p.requires_grad]
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    fixed = [torch.zeros(0, sum(p.numel() for p in parameters))]
    for family in families:
        units = torch.eye(len(family)) if family.kind != "matrix" else ()
        vectors = family.tangents(point) if family.kind == "matrix" else (family.field(point, u) for u in units)
        for vector in vectors:
            flat = torch.cat([vector.get(n, torch.zeros_like(point[n])).reshape(-1) for n in names])
            fixed.append(flat[None] / flat.norm().clamp_min(1e-300))
    fixed = torch.cat(fixed)
    source = torch.Generator().manual_seed(3)
    count = sum(p.numel() for p in parameters)
    mixes = [torch.randn(2 * count // len(batches) + 1, model(x).numel(), generator=source) for x in batches]
    number = iter(range(10**9))
    forward = lambda twin, x: mixes[next(number) % len(mixes)] @ twin(x).reshape(-1)  # noqa: E731

    def values():
        with torch.no_grad():
            return torch.cat([mix @ model(x).reshape(-1) for mix, x in zip(mixes, batches, strict=True)])

    def put(flat):
        torch.nn.utils.vector_to_parameters(flat, parameters)

    start, before = torch.nn.utils.parameters_to_vector(parameters).detach().clone(), values()
    with torch.no_grad():
        first = model(held_out)
    rows = jacobian(model, batches, mode=mode, forward=forward)
    touched = rows.abs().amax(0) > 0
    fixed = torch.cat([fixed, torch.eye(count)[~touched]])
    lengths = rows.norm(dim=1)
    _, sigma, right = torch.linalg.svd(torch.cat([rows / lengths[:, None], fixed]), full_matrices=False)
    null = right[int((sigma > 1e-10 * sigma[0]).sum()) :]
    if not len(null):
        return 0, float("inf")
    along = torch.randn(len(null), generator=source) @ null
    for step in steps:
        flat = start + step * start.norm() * along / along.norm()
        for _ in range(8):
            put(flat)
            gaps = torch.cat([(values() - before) / lengths, fixed @ (flat - start)])
            left = float(gaps.abs().max()) / float((before / lengths).abs().max())
            if left < 1e-13:
                break
            matrix = torch.cat([jacobian(model, batches, mode=mode, forward=forward) / lengths[:, None], fixed])
            flat = flat - torch.linalg.lstsq(matrix, gaps[:, None], rcond=1e-10, driver="gelsd").solution[:, 0]
        if left < 1e-11 and float((flat - start) @ along / along.norm()) > step * float(start.norm()) / 2:
            with torch.no_grad():
                return len(null), float((model(held_out) - first).abs().max() / first.abs().max())
    return len(null), float("inf")
