"""One operator over many processes: every rank holds a share of the data, all see the same product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.linalg import Operator
from normgauge.objective._operators import ObjectiveOperator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ShardedOperator(Operator):
    """The mean of the ranks' operators, weighted by their samples: A v = sum_r n_r A_r v / sum_r n_r.

    Every rank makes its objective on its own share of the data, with equal parameters, and calls the same products
    in the same order; each gets the same result. Batch statistics in train mode are those of each rank's batches,
    as when the shards were batches of one process; nothing is synchronized but products.

    Args:
        local: this rank's operator.
        group: the process group; the default group of `torch.distributed` if `torch.distributed.group.WORLD`.
    """

    self_adjoint = True

    def __init__(self, local: ObjectiveOperator, group: ProcessGroup) -> None:
        self.local, self.group = local, group
        self.shape, self.dtype, self.device = local.shape, local.dtype, local.device
        self.weight = local.weight
        total = torch.tensor([self.weight], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total, group=group)
        self.total = float(total)

    def _matvec(self, vector: Tensor) -> Tensor:
        failure: BaseException | None = None
        try:
            product = self.local.matvec(vector).mul_(self.weight / self.total)
        except Exception as error:  # noqa: BLE001 (raised again below, after the others have been told)
            failure, product = error, torch.full_like(vector, float("nan"))
        torch.distributed.all_reduce(product, group=self.group)
        if failure is not None:
            raise failure
        if not bool(torch.isfinite(product.sum())) and not bool(torch.isfinite(product).all()):
            raise NonFiniteError(
                "ShardedOperator",
                "products of all ranks must be finite",
                "inf or nan from another rank",
                "Look at the error of the other ranks",
            )
        return product
