"""Loss and accuracy of an objective in one forward pass, for instruments that ask at many points."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from normgauge.errors import InputError, NonFiniteError
from normgauge.measure._classes import NotClasses, decisions, targets_of
from normgauge.objective import Objective


def loss_and_accuracy(objective: Objective) -> tuple[float, float]:
    """Return loss and share of right decisions; nan for a loss that is not finite, and where there are no classes."""
    total = right = decided = weights = 0.0
    with torch.no_grad():
        for number, batch in objective.batches():

            def body(model: nn.Module, number: int = number, batch: Any = batch) -> tuple[float, float, float]:
                try:
                    output, terms = objective._recipe.outputs_and_terms(model, batch)
                except InputError:  # a step without outputs has a loss only
                    return float(objective._total(objective._recipe.terms(model, batch), number)), 0.0, 0.0
                loss = float(objective._total(terms, number))
                try:
                    logits, labels = decisions(output, targets_of(batch))
                except NotClasses:
                    return loss, 0.0, 0.0
                return loss, float((logits.argmax(1) == labels).sum()), float(labels.numel())

            try:
                loss, good, asked = objective._evaluate({}, number, body)
            except NonFiniteError:
                return math.nan, math.nan
            weight = objective.weight(batch)
            total, weights = total + weight * loss, weights + weight
            right, decided = right + good, decided + asked
    return total / weights, right / decided if decided else math.nan
