"""Length, direction and mean of a vector: the decomposition behind every standardizing normalizer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normgauge.errors import InputError


class Decomposition(NamedTuple):
    """The three parts of `v = gamma * direction + beta`."""

    gamma: Tensor
    direction: Tensor
    beta: Tensor


def decompose(v: Tensor, dim: int = -1) -> Decomposition:
    r"""Split vectors into standard deviation, standardized direction and mean: `v = gamma * direction + beta`.

    With n entries along `dim`: `beta = sum(v) / n`, `gamma = ||v - beta|| / sqrt(n)`, `direction = (v - beta) / gamma`.
    The parts are orthogonal and `||direction|| = sqrt(n)`, `sum(direction) = 0`, so `||v||^2 = n (gamma^2 + beta^2)`:
    the direction lies on an (n - 2)-sphere. A constant vector has no direction: `gamma = 0`, `direction = 0`.

    Returns:
        `(gamma, direction, beta)`; `gamma` and `beta` keep `dim` with size 1, so that they broadcast.

    Raises:
        InputError: for an axis without entries.

    Deviations:
        sun2020 Lemma 1 (4) prints `N(alpha v + t e) = N(v)` for all real alpha; a negative alpha flips the direction
        (the error of the print is `||2 N(v)|| / ||N(v)|| = 2`), and alpha = 0 leaves none. Its proof of (3) prints
        `||P v|| / n` for gamma, too small by the factor `sqrt(n)`, and drops the square of the variance's summands,
        which makes that sum zero.

    Examples:
        >>> gamma, direction, beta = decompose(torch.tensor([1.0, 5.0]))
        >>> gamma.item(), direction.tolist(), beta.item()
        (2.0, [-1.0, 1.0], 3.0)
        >>> decompose(torch.tensor([-1.0, -5.0])).direction.tolist()  # a negative factor flips the direction
        [1.0, -1.0]

    References: sun2020.
    """
    if v.dim() == 0 or v.shape[dim] == 0:
        raise InputError(
            "decompose", "v needs at least one entry along dim", f"shape {tuple(v.shape)}", "Give vectors with entries"
        )
    beta = v.mean(dim, keepdim=True)
    centred = v - beta
    squared = centred.square().mean(dim, keepdim=True)
    flat = squared == 0
    # sqrt has no derivative at 0: a constant vector takes gamma = 0 from the branch without a root.
    gamma = torch.where(flat, torch.zeros_like(squared), torch.where(flat, torch.ones_like(squared), squared).sqrt())
    direction = centred / torch.where(flat, torch.ones_like(gamma), gamma)
    return Decomposition(gamma, direction, beta)
