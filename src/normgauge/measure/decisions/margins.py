"""`ng.margins`: how far each sample is on the right side, raw and in units that rescaling cannot change."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.charts import histogram
from normgauge.linalg.norms import norm
from normgauge.measure.decisions.classes import NotClasses, batch_decisions, inputs_of, raw_margins
from normgauge.network import ModuleCall, replaced, role_of, watched
from normgauge.objective import Objective, tensors
from normgauge.records import Chart, Reading, Status, format_number
from normgauge.results import Result, instrument

LOW = 0.05  # quantile that stands for the smallest margins: a few mislabelled samples do not decide it
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
BY = ("raw", "last_layer", "norm_product", "input_gradient")


@dataclass(frozen=True)
class Margins(Result):
    """Margins of a classifier, one per decision, in four units.

    Attributes:
        values: unit -> margins in float64: "raw" (logits), "last_layer" (divided by the Frobenius norm of the last
            affine layer), "norm_product" (by the product of these norms over all affine layers) and
            "input_gradient" (by the norm of the margin's gradient with respect to the input: the distance to the
            boundary to first order).
        log10_divisors: unit -> logarithm of the divisor, where it is one number.
        statuses: unit -> ok or skipped.
        sentences: unit -> why, where skipped.
    """

    values: dict[str, Tensor]
    log10_divisors: dict[str, float]
    statuses: dict[str, Status]
    sentences: dict[str, str]

    @property
    def raw(self) -> Tensor:
        """The margins in logits."""
        return self.values["raw"]

    @property
    def accuracy(self) -> float:
        """Share of positive margins; a tie counts as wrong."""
        return float((self.raw > 0).double().mean()) if self.raw.numel() else math.nan

    def quantile(self, level: float, by: str = "raw") -> float:
        """Return the quantile of the margins in unit `by`; nan where there are none."""
        values = self.values[by]
        way = "linear" if bool(values.isfinite().all()) else "lower"  # between infinite ones nothing lies
        return float(torch.quantile(values, level, interpolation=way)) if values.numel() else math.nan

    def _title(self) -> str:
        return f"Margins of {self.raw.numel()} decisions, accuracy {format_number(self.accuracy)}"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "by": by,
                "log10_divisor": self.log10_divisors.get(by),
                **{f"q{round(100 * level):02d}": self.quantile(level, by) for level in LEVELS},
                "mean": float(self.values[by].mean()) if self.values[by].numel() else math.nan,
                "status": self.statuses[by],
                "sentence": self.sentences[by],
            }
            for by in BY
        ]

    def readings(self) -> tuple[Reading, ...]:
        """Return the median margin in every unit, the distance to the boundary first, and the accuracy."""
        medians = [
            Reading.measured(f"median margin, {by.replace('_', ' ')}", self.quantile(0.5, by), why=self.sentences[by])
            for by in reversed(BY)
        ]
        return *medians, Reading.measured("accuracy", self.accuracy, why=self.sentences["raw"])

    def _meaning(self) -> str:
        count = self.raw.numel()
        if not count:
            return f"There are {count} decisions, so that nothing has a margin."
        by = "input_gradient" if self.values["input_gradient"].numel() else "raw"
        middle, low, wrong = self.quantile(0.5, by), self.quantile(LOW, by), 1 - self.accuracy
        said = f"The median of {count} margins is {middle:.3g} in logits, a unit that scaling changes"
        if by == "input_gradient":
            side = "on the right side" if middle > 0 else "on the wrong side"
            said = f"The median of {count} samples lies {abs(middle):.3g} from the boundary, to first order, {side}"
        if low > 0:
            said += f", and all but {LOW:.0%} at least {low:.3g}"
            if by == "raw":
                return f"{said}: they are right; how far inputs may move it does not say."
            return f"{said}: inputs may move by less than that without an error."
        return f"{said}; {wrong:.1%} are on the wrong side, so that the lowest {LOW:.0%} have no margin: train on."

    def _notes(self) -> str:
        return "raw margins change when the last layer is scaled, which changes no decision: compare by the other rows"

    def chart(self) -> Chart:
        """Return the histogram of the margins by input gradient, or of the raw ones where there are none."""
        by = "input_gradient" if self.values["input_gradient"].numel() else "raw"
        rows = [{"margin": value} for value in self.values[by].tolist()]
        return histogram(rows, value="margin", title=f"margins ({by.replace('_', ' ')})")


@instrument
def margins(objective: Objective) -> Margins:
    """Measure margins m_i = f_y(x_i) - max_{j != y} f_j(x_i), raw and divided by what scales them.

    `last_layer` = m / |W_last|, `norm_product` = m / prod_l |W_l| over the affine layers that ran (Frobenius norms, an
    upper bound of the spectral ones for matrices), `input_gradient` = m_i / |d m_i / d x_i|.

    Kind: exact. Cost: one forward pass and one backward pass to the inputs.

    Args:
        objective: a classifier; labels are whole numbers (-100 does not count). Those of sequences are compared at the
            position at which the objective's loss compares them: see `classes.aligned_decisions`.

    Returns:
        Four rows; what cannot be had (targets that are no classes, inputs that are whole numbers, samples that share
        batch statistics) has a status and a sentence.

    Deviations: Bartlett et al. divide by spectral norms and correction terms; the Frobenius product is cheaper and
        larger. It means nothing for normalized layers, whose scale does not count: use the input gradient there.

    Examples:
        The linear classifier f(x) = W x has m / |dm/dx| = the distance to the boundary:

        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0], [-3.0, 0.0]]))
        >>> data = (torch.tensor([[2.0, 5.0]]), torch.tensor([0]))
        >>> found = margins(Objective(model, nn.functional.cross_entropy, data, mode="eval"))
        >>> float(found.raw), float(found.values["input_gradient"])
        (12.0, 2.0)

    References: bartlett2017, elsayed2018, than2025.
    """
    coupled = objective.mode == "train" and any(_couples(module) for module in objective.model.modules())
    try:
        looks = list(objective.each_batch(partial(_one_batch, objective, coupled)))
    except NotClasses as error:
        nothing = dict.fromkeys(BY, torch.empty(0, dtype=torch.float64)), dict[str, float]()
        skipped: dict[str, Status] = dict.fromkeys(BY, "skipped")
        sentences = dict.fromkeys(BY, str(error))
        return Margins(*nothing, skipped, sentences, status="skipped", sentence=str(error))
    _, norms, why = looks[-1]
    return _assemble([pair for pair, _, _ in looks], norms, why)


def _one_batch(
    objective: Objective, coupled: bool, model: nn.Module, number: int, batch: Any
) -> tuple[tuple[Tensor, Tensor | None], dict[str, float], str]:
    """Return margins and gradient norms of one batch, the norms of the affine layers, and why there is no gradient."""
    norms: dict[str, float] = {}

    def note_norm(call: ModuleCall) -> None:
        weight = getattr(call.module, "weight", None)
        if role_of(call.module) == "affine" and isinstance(weight, Tensor):
            norms.pop(call.name, None)  # the last to be called is the last in the dict
            norms[call.name] = norm(weight)

    free = [tensor for tensor in tensors(inputs_of(batch)) if tensor.is_floating_point()]
    grown = {id(t): t.detach().clone().requires_grad_() for t in free} if free and not coupled else {}
    with torch.enable_grad(), watched(model, note_norm):
        given = replaced(batch, Tensor, lambda t: grown.get(id(t), t))
        logits, labels = batch_decisions(objective, model, number, given)
    if not bool(logits.isfinite().all()):
        raise NotClasses(
            "outputs", "a classifier gives finite logits", "others", "See ng.signal_propagation where it starts"
        )
    raw = raw_margins(logits, labels)
    samples, why, squares = free[0].shape[0] if free and free[0].ndim else 0, "", list[Tensor]()
    if coupled:
        why = "samples share batch statistics in train mode; use mode='eval'"
    elif not grown:
        why = "the inputs are whole numbers, which have no gradient"
    elif raw.shape[0] != samples:
        why = "there is not one decision per sample"
    elif raw.requires_grad:
        slopes = torch.autograd.grad(raw.sum(), list(grown.values()), allow_unused=True)
        objective.count_backward(batch)
        squares = [s.double().reshape(samples, -1).square().sum(1) for s in slopes if s is not None]
    if not why and not squares:
        why = "the outputs do not depend on the inputs differentiably"
    return (raw.detach().double(), None if why else torch.stack(squares).sum(0).sqrt()), norms, why


def _assemble(parts: list[tuple[Tensor, Tensor | None]], norms: Mapping[str, float], why: str) -> Margins:
    raw = torch.cat([margin for margin, _ in parts])
    missing = "an affine layer has zero weights" if norms else "no affine layer was called"
    sentences = {"raw": "", "last_layer": missing, "norm_product": missing, "input_gradient": why}
    values, logs = dict.fromkeys(BY, torch.empty(0, dtype=torch.float64)) | {"raw": raw}, {"raw": 0.0}
    if norms and min(norms.values()) > 0:
        logs["last_layer"] = math.log10(list(norms.values())[-1])
        logs["norm_product"] = sum(math.log10(norm) for norm in norms.values())
        for by in ("last_layer", "norm_product"):
            sentences[by] = "" if abs(logs[by]) < 300 else f"the divisor is 10^{logs[by]:.0f}, beyond float64"
            if not sentences[by]:
                values[by] = raw * 10.0 ** -logs[by]
    if not why:
        slopes = torch.cat([slope for _, slope in parts if slope is not None])
        if slopes.any():  # beyond the reach of a zero slope, or at the boundary itself
            values["input_gradient"] = torch.where(raw == 0, 0.0, raw / slopes)
        else:
            sentences["input_gradient"] = "the margins do not change with the inputs: their gradients are zero"
    statuses: dict[str, Status] = {by: "skipped" if sentences[by] else "ok" for by in BY}
    return Margins(values, logs, statuses, sentences)


def _couples(module: nn.Module) -> bool:
    """Tell whether a module in train mode mixes samples: batch statistics of any kind."""
    kind = type(module).__name__.lower()
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or (role_of(module) == "normalizer" and "batch" in kind)
