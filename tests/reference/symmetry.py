"""Dense twins: the Jacobian written out, its nullity over enough inputs, generator vectors one by one."""

import copy
from functools import partial

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


def fibre_walk(twins, batches, held_out, families, point, *, unobserved, steps=(0.01, 0.002, 0.0004)):
    """The directions that all twins (model, mode) map to zero, off the families' span, and a walk along them.

    Returns their number and how far a twin's held-out outputs move, relative to the largest. The number is None where
    the point cannot tell: rounding leaves no gap between singular values, or entries are silent that others are not.
    The movement is infinite where least squares, with the Jacobian written out anew at every step, do not converge.
    """
    twins = [(copy.deepcopy(model).train(mode == "train"), mode) for model, mode in twins]
    names = [n for n, p in twins[0][0].named_parameters() if p.requires_grad]
    parameters = [[p for p in model.parameters() if p.requires_grad] for model, _ in twins]
    count = sum(p.numel() for p in parameters[0])
    source = torch.Generator().manual_seed(3)
    each = int(max(2.0 / len(twins), 1.2) * count) // len(batches) + 1
    mixes = [[torch.randn(each, model(x).numel(), generator=source) for x in batches] for model, _ in twins]

    def put(flat):
        for some in parameters:
            torch.nn.utils.vector_to_parameters(flat, some)

    def values():
        with torch.no_grad():
            pairs = [
                (m @ model(x).reshape(-1))
                for (model, _), own in zip(twins, mixes, strict=True)
                for m, x in zip(own, batches, strict=True)
            ]
            return torch.cat(pairs)

    def slopes():
        rows = []
        for (model, mode), own in zip(twins, mixes, strict=True):
            mixed = partial(_mixed, mixes=iter(own))
            rows.append(jacobian(model, batches, mode=mode, forward=mixed))
        return torch.cat(rows)

    def judged():
        with torch.no_grad():
            return [model(held_out) for model, _ in twins]

    start = torch.cat([point[n].reshape(-1) for n in names]).detach().clone()
    put(start)
    before, first, rows = values(), judged(), slopes()
    known = _span(_written_out(families, point, names), count)
    silent = (rows.abs().amax(0) == 0) & ((torch.eye(count) - known.T @ known).norm(dim=1) > 1e-6)
    seen = torch.split(silent, [point[n].numel() for n in names])
    if any(int(part.sum()) > unobserved.get(name, 0) for name, part in zip(names, seen, strict=True)):
        return None, float("inf")
    known = _span(torch.cat([known, torch.eye(count)[silent]]), count)
    lengths = rows.norm(dim=1)
    lengths = lengths.clamp_min(1e-12 * float(lengths.max()))
    sigma, right = torch.linalg.svd(rows / lengths[:, None], full_matrices=False)[1:]
    if not clear_gap(sigma):
        return None, float("inf")
    null = right[int((sigma > 1e-10 * sigma[0]).sum()) :]
    left, cosines, _ = torch.linalg.svd(null - null @ known.T @ known, full_matrices=False)
    free = left[:, cosines > 1e-6].T @ null
    if not len(free):
        return 0, float("inf")
    along = torch.randn(len(free), generator=source) @ free
    along, size = along / along.norm(), float(start.norm())
    for step in steps:
        flat = start + step * size * along
        for _ in range(8):
            put(flat)
            gaps = (values() - before) / lengths
            rest = float(gaps.abs().max()) / float((before / lengths).abs().max())
            if rest < 1e-13:
                break
            flat = (
                flat
                - torch.linalg.lstsq(slopes() / lengths[:, None], gaps[:, None], rcond=1e-10, driver="gelsd").solution[
                    :, 0
                ]
            )
        if rest < 1e-11 and float((flat - start) @ along) > step * size / 2:
            pairs = zip(judged(), first, strict=True)
            return len(free), max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return len(free), float("inf")


def _mixed(model, inputs, mixes):
    return next(mixes) @ model(inputs).reshape(-1)


def clear_gap(sigma):
    """Whether no singular value is where rounding and a small slope look alike."""
    return not bool(((sigma > 1e-12 * sigma[0]) & (sigma < 1e-9 * sigma[0])).any())


def _written_out(families, point, names):
    rows = [torch.zeros(0, sum(point[n].numel() for n in names))]
    for family in families:
        units = torch.eye(len(family)) if family.kind != "matrix" else ()
        vectors = family.tangents(point) if family.kind == "matrix" else (family.field(point, u) for u in units)
        for vector in vectors:
            flat = torch.cat([vector.get(n, torch.zeros_like(point[n])).reshape(-1) for n in names])
            rows.append(flat[None] / flat.norm().clamp_min(1e-300))
    return torch.cat(rows)


def _span(rows, count):
    """An orthonormal basis of the rows."""
    if not len(rows):
        return torch.zeros(0, count)
    _, sigma, right = torch.linalg.svd(rows, full_matrices=False)
    return right[: int((sigma > 1e-9 * sigma[0]).sum())]
