"""Thresholds of optimizers on a quadratic by running torch's own optimizers; one step at a time along a line."""

import torch


def grows(make, curvature, rate, steps=1000):
    """Tell whether torch's optimizer, at this rate on curvature * x^2 / 2, ends larger than it was half way."""
    x = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = make([x], rate)
    sizes = []
    for _ in range(steps):
        x.grad = curvature * x.detach()
        optimizer.step()
        sizes.append(abs(float(x.detach())))
        if sizes[-1] > 1e4:
            return True
    return max(sizes[-20:]) > 1.0


def edge_by_running(make, curvature):
    """Return the rate at which it begins to grow, by bisection."""
    low, high = 1e-6 / curvature, 1e3 / curvature
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if grows(make, curvature, middle) else (middle, high)
    return (low * high) ** 0.5


def first_rise(objective, step, factors):
    """Return the first of many factors at which the loss along a step exceeds where it began."""
    start = float(objective.loss())
    here = objective.parameters
    for factor in factors:
        if float(objective.at({name: here[name] + factor * step[name] for name in here}).loss()) > start:
            return factor
    return float("inf")
