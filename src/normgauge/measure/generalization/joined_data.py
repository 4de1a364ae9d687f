"""The data of all batches as one tensor of inputs and one of targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import DataError
from normgauge.objective import pairs, to_device


def join_batches(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
    """Return all inputs and all targets, on the model's device.

    Raises:
        DataError: when inputs are not one real tensor or targets not one tensor.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batches = [to_device(batch, device) for _, batch in pairs(data)]
    for inputs, targets in batches:
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or not isinstance(targets, Tensor):
            kind = f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
            raise DataError(
                "generalization",
                "inputs must be one real tensor, samples first, and targets one tensor",
                kind,
                "Measure from the embeddings on, where inputs are words",
            )
    return torch.cat([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])
