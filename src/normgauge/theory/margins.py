"""How a classification margin enters a generalization bound, for linear classes."""

from torch import Tensor


def margin_term(margin: float | Tensor, norm: float | Tensor, X: Tensor) -> Tensor:
    """Return `2 norm sqrt(sum |x_i|^2) / (margin N)`, the capacity term of a margin bound for linear classifiers.

    It bounds `2 / margin` times the empirical Rademacher complexity of `{x -> <w, x>: |w| <= norm}` on the samples X,
    `[N, n]`; `margin` is the smallest `y <w, x>`. Only `margin / norm` enters: doubling both, as doubling the logits
    does, changes nothing.

    Examples:
        >>> import torch
        >>> margin_term(1.0, 1.0, torch.eye(4)).item(), margin_term(2.0, 2.0, torch.eye(4)).item()
        (1.0, 1.0)

    References: akbar2025
    """
    return 2 * norm * X.square().sum().sqrt() / (margin * X.shape[0])
