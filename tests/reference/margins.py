"""Margins sample by sample: one forward and one gradient each."""

import torch


def margins_one_by_one(model, inputs, labels):
    """Return raw margins and the norms of their gradients with respect to the sample's own input, in eval mode."""
    model.eval()
    raw, slopes = [], []
    for x, y in zip(inputs, labels, strict=True):
        x = x.clone()[None].requires_grad_()
        scores = model(x)[0]
        best = max(scores[j] for j in range(len(scores)) if j != int(y))
        margin = scores[int(y)] - best
        (slope,) = torch.autograd.grad(margin, x)
        raw.append(float(margin.detach()))
        slopes.append(float(slope.norm()))
    return torch.tensor(raw), torch.tensor(slopes)
