"""Outputs and targets as classes: logits per decision, the label, margin and accuracy; or why they are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import DataError, explain
from normgauge.network import first_tensor

IGNORED = -100  # torch's and Hugging Face's label for "does not count"


class NotClasses(DataError):
    """Outputs and targets are not those of a classifier; the message says what they are."""


def targets_of(batch: Any) -> Any:
    """Return the targets of `(inputs, targets)`, or the labels a mapping carries.

    Raises:
        NotClasses: where the batch does not say what its targets are.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[1]
    if isinstance(batch, Mapping):
        for name in ("labels", "label", "targets", "target"):
            if name in batch:
                return batch[name]
    raise NotClasses(
        explain("targets", "a batch must be (inputs, targets) or hold labels", type(batch).__name__, "Use such batches")
    )


def decisions(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Return logits `[n, classes]` and labels `[n]` of every decision that counts.

    Understood: logits `[n, classes, ...]` with labels `[n, ...]` (torch), `[n, ..., classes]` with labels `[n, ...]`
    (Hugging Face), one logit per decision with labels 0 and 1. Labels of -100 do not count.

    Raises:
        NotClasses: for anything else.
    """
    logits = getattr(output, "logits", None)
    logits = logits if isinstance(logits, Tensor) else first_tensor(output)
    label = target if isinstance(target, Tensor) else first_tensor(target)
    if logits is None or label is None or not logits.is_floating_point():
        raise NotClasses(
            explain("outputs", "a classifier gives real logits", type(output).__name__, "Pass forward=lambda m, x: ...")
        )
    if label.is_floating_point() or label.is_complex():
        raise NotClasses(
            explain(
                "targets",
                "a class is a whole number",
                f"targets of {label.dtype}",
                "Measure margins of classifiers only",
            )
        )
    label = label.long()
    if logits.shape == label.shape or (logits.ndim == label.ndim + 1 and logits.shape[-1] == 1):
        single = logits.reshape(-1)
        flat, wanted = torch.stack([torch.zeros_like(single), single], dim=1), label.reshape(-1)
    elif logits.ndim == label.ndim + 1 and logits.shape[:1] + logits.shape[2:] == label.shape:
        flat, wanted = logits.movedim(1, -1).reshape(-1, logits.shape[1]), label.reshape(-1)
    elif logits.ndim == label.ndim + 1 and logits.shape[:-1] == label.shape:
        flat, wanted = logits.reshape(-1, logits.shape[-1]), label.reshape(-1)
    else:
        raise NotClasses(
            explain(
                "outputs",
                "logits have one axis more than the labels",
                f"logits {tuple(logits.shape)}, labels {tuple(label.shape)}",
                "Pass forward=lambda m, x: ... that gives the logits",
            )
        )
    counts = wanted != IGNORED
    flat, wanted = (flat, wanted) if bool(counts.all()) else (flat[counts], wanted[counts])
    if wanted.numel() and (int(wanted.min()) < 0 or int(wanted.max()) >= flat.shape[1]):
        raise NotClasses(
            explain(
                "targets",
                f"labels of {flat.shape[1]} classes lie between 0 and {flat.shape[1] - 1}",
                f"labels from {int(wanted.min())} to {int(wanted.max())}",
                "Check the targets",
            )
        )
    return flat, wanted


def raw_margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return logit of the label minus the largest other logit, per decision.

    Examples:
        >>> raw_margins(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([1])).tolist()
        [1.0]
    """
    own = logits.gather(1, labels[:, None]).squeeze(1)
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return own - others.max(dim=1).values
