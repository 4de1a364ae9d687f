"""Weight normalization `w = g v / |v|`: its gradients in closed form."""

import torch  # noqa: F401 (the doctests)
from torch import Tensor


def normalized_weight(v: Tensor, g: float | Tensor) -> Tensor:
    """Return `w = g v / |v|`: unchanged by `v -> alpha v` (alpha > 0) and by `(v, g) -> (-v, -g)`, by nothing else.

    Examples:
        >>> normalized_weight(torch.tensor([3.0, 4.0]), 10.0).tolist()
        [6.0, 8.0]

    References: salimans2016
    """
    return g * v / v.norm()


def direction_gradient(v: Tensor, g: float | Tensor, slope: Tensor) -> Tensor:
    """Return `grad_v = (g / |v|) (slope - v <v, slope> / |v|^2)` for `slope = grad_w`: orthogonal to `v`.

    Examples:
        >>> direction_gradient(torch.tensor([2.0, 0.0]), 4.0, torch.tensor([1.0, 3.0])).tolist()
        [0.0, 6.0]

    References: salimans2016
    """
    return g / v.norm() * (slope - v * (v @ slope) / (v @ v))


def length_gradient(v: Tensor, slope: Tensor) -> Tensor:
    """Return `dL/dg = <slope, v> / |v|` for `slope = grad_w`.

    Examples:
        >>> length_gradient(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0])).item()
        1.0

    References: salimans2016
    """
    return slope @ v / v.norm()
