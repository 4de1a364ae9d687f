"""Outputs and targets as classes: logits per decision, the label, margin and accuracy; or why they are not."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import DataError
from normgauge.network import first_tensor
from normgauge.objective import Objective, tensors

TARGETS = ("labels", "label", "targets", "target")  # where a mapping carries them
IGNORED = -100  # torch's and Hugging Face's label for "does not count"


class NotClasses(DataError):
    """Outputs and targets are not those of a classifier; the message says what they are."""


def targets_of(batch: Any) -> Any:
    """Return the targets of `(inputs, targets)`, or the labels a mapping carries."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[1]
    if isinstance(batch, Mapping) and (names := [name for name in TARGETS if name in batch]):
        return batch[names[0]]
    got = type(batch).__name__
    raise NotClasses("targets", "a batch must be (inputs, targets) or hold labels", got, "Use such batches")


def inputs_of(batch: Any) -> Any:
    """Return what of a batch is not its targets."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0]
    return {name: value for name, value in batch.items() if name not in TARGETS}


def decisions(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Return logits `[n, classes]` and labels `[n]` of every decision that counts.

    Understood: logits `[n, classes, ...]` with labels `[n, ...]` (torch), `[n, ..., classes]` with labels `[n, ...]`
    (Hugging Face), one logit per decision with labels 0 and 1. Labels of -100 do not count.
    """
    logits = _logits(output)
    label = target if isinstance(target, Tensor) else first_tensor(target)
    if logits is None or label is None or not logits.is_floating_point():
        got, step = type(output).__name__, "Pass forward=lambda m, x: ..."
        raise NotClasses("outputs", "a classifier gives real logits", got, step)
    if label.is_floating_point() or label.is_complex():
        got, step = f"targets of {label.dtype}", "Measure margins of classifiers only"
        raise NotClasses("targets", "a class is a whole number", got, step)
    label = label.long()
    if logits.shape == label.shape or (logits.ndim == label.ndim + 1 and logits.shape[-1] == 1):
        single = logits.reshape(-1)
        flat, wanted = torch.stack([torch.zeros_like(single), single], dim=1), label.reshape(-1)
    elif logits.ndim == label.ndim + 1 and logits.shape[:1] + logits.shape[2:] == label.shape:
        flat, wanted = logits.movedim(1, -1).reshape(-1, logits.shape[1]), label.reshape(-1)
    elif logits.ndim == label.ndim + 1 and logits.shape[:-1] == label.shape:
        flat, wanted = logits.reshape(-1, logits.shape[-1]), label.reshape(-1)
    else:
        got = f"logits {tuple(logits.shape)}, labels {tuple(label.shape)}"
        step = "Pass forward=lambda m, x: ... that gives the logits"
        raise NotClasses("outputs", "logits have one axis more than the labels", got, step)
    counts = wanted != IGNORED
    flat, wanted = (flat, wanted) if bool(counts.all()) else (flat[counts], wanted[counts])
    if wanted.numel() and (int(wanted.min()) < 0 or int(wanted.max()) >= flat.shape[1]):
        rule = f"labels of {flat.shape[1]} classes lie between 0 and {flat.shape[1] - 1}"
        got = f"labels from {int(wanted.min())} to {int(wanted.max())}"
        raise NotClasses("targets", rule, got, "Check the targets")
    return flat, wanted


def cross_entropy(output: Any, target: Any) -> Tensor:
    """Return the mean cross-entropy of every decision that counts."""
    return nn.functional.cross_entropy(*decisions(output, target))


def batch_decisions(objective: Objective, model: nn.Module, number: int, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the decisions of one batch, labels where the objective's loss puts them; for use inside `evaluate`."""
    target = targets_of(batch)
    loss = None
    if objective.loss_function is None and _is_sequence(target):
        output, loss = objective.outputs_and_loss_of(model, number, batch)
    else:
        output = objective.outputs_of(model, batch)
        loss = None if objective.loss_function is None else objective.loss_function(output, target)
    return aligned_decisions(output, batch, loss)


def aligned_decisions(output: Any, batch: Any, loss: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the decisions of a batch whose cross-entropy, a mean or a sum, is the loss.

    A language model's loss compares the output at a position with the label at the next one. Which it is is found by
    behaviour: labels as they stand, or each at the position before its own. For sequences (labels `[n, positions]`, a
    class each) where not exactly one of them gives the loss, nobody knows what is right: refused, as are labels that
    are the inputs themselves. `loss` is `None` where there is none.
    """
    target = targets_of(batch)
    plain = decisions(output, target)
    label = target if isinstance(target, Tensor) else first_tensor(target)
    assert label is not None  # `decisions` had it
    sequence = _is_sequence(label) and plain[0].shape[0] and _logits(output).ndim == 3 and plain[0].shape[1] > 1
    if loss is not None and (sequence or (label.ndim == 1 and len(label) > 1)):
        ignored = torch.full_like(label.narrow(-1, 0, 1), IGNORED)
        shifted = decisions(output, torch.cat([label.narrow(-1, 1, label.shape[-1] - 1), ignored], dim=-1))
        fits = [_reproduces(pair, loss) for pair in (plain, shifted)]
        if fits == [False, True]:
            return shifted
        if sequence and fits != [True, False]:
            both = "both do" if all(fits) else "neither does"
            rule = "the cross-entropy with labels at their positions, or at those before, must give the loss"
            raise NotClasses("labels of sequences", rule, both, "Use the mean cross-entropy as loss")
    same = [t for t in tensors(inputs_of(batch)) if t.shape == label.shape and t.device == label.device]
    if sequence and any(not t.is_floating_point() and torch.equal(t, label) for t in same):
        rule = "labels are what is to be told, shifted by the loss or beforehand"
        raise NotClasses("labels of sequences", rule, "the inputs themselves", "Pass (ids[:, :-1], ids[:, 1:])")
    return plain


def _reproduces(pair: tuple[Tensor, Tensor], loss: Tensor) -> bool:
    """Say whether the loss is the cross-entropy of these decisions, up to the rounding of the logits."""
    logits, labels = pair
    if not labels.numel():
        return False
    mean = float(nn.functional.cross_entropy(logits.detach().double(), labels))
    tolerance = 1e-5 if torch.finfo(logits.dtype).bits >= 32 else 2e-2
    return any(math.isclose(float(loss.detach()), value, rel_tol=tolerance) for value in (mean, mean * labels.numel()))


def _is_sequence(target: Any) -> bool:
    label = target if isinstance(target, Tensor) else first_tensor(target)
    return label is not None and label.ndim == 2


def _logits(output: Any) -> Any:
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else first_tensor(output)


def raw_margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return logit of the label minus the largest other logit, per decision.

    Examples:
        >>> raw_margins(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([1])).tolist()
        [1.0]
    """
    own = logits.gather(1, labels[:, None]).squeeze(1)
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return own - others.max(dim=1).values
