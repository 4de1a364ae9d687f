"""A loss surface by hand: one deep copy of the model per grid point."""

import copy

import torch


def surface_by_copies(model, loss, batch, first, second, grid, *, training):
    """Return losses[j][i] at a = grid[i] along `first`, b = grid[j] along `second`."""
    rows = []
    for b in grid:
        row = []
        for a in grid:
            net = copy.deepcopy(model).train(training)
            with torch.no_grad():
                for name, p in net.named_parameters():
                    p += a * first[name] + b * second[name]
                row.append(float(loss(net(batch[0]), batch[1])))
        rows.append(row)
    return rows
