"""`ng.checkup`: find it, prove it, explain it, fix it."""

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from normgauge.doctor.checks import all_checks
from normgauge.doctor.finding import Check, Exactness, Finding, Repair
from normgauge.doctor.probes.divergence import Divergence, first_divergence
from normgauge.doctor.probes.exam import Exam, Patient, patient_of
from normgauge.errors import InputError, ModelError
from normgauge.network import copy_model, first_tensor
from normgauge.objective import Objective, tensors, untouched
from normgauge.records import Chart, Reading, plain
from normgauge.results import Result, counting
from normgauge.rng import preserved_rng
from normgauge.surgery import Surgery

FOLD = 3  # findings above the fold
WIDTH = 80
_RANK = {"error": 0, "warning": 1, "info": 2}
_SAFE: tuple[Exactness, ...] = ("exact", "state_only")
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


@dataclass(frozen=True)
class Checkup(Result):
    """Findings about a network, errors first and each kind by measured effect.

    Iterating gives `Finding`s; `len` counts them. `print` shows at most three in full and folds the rest.

    Attributes:
        findings: all that were not suppressed.
        divergence: from the model given as `against`; `None` without one, and where the two agree.
        compared: whether there was another model.
        norms: how many normalizers were seen at work.
        checks: ids of the checks that were made.
        left_out: check -> why it was not made.
        suppressed: how many findings were asked to be left out.
    """

    findings: tuple[Finding, ...] = ()
    divergence: Divergence | None = None
    compared: bool = False
    norms: int = 0
    checks: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    suppressed: int = 0
    patient: Patient | None = field(default=None, repr=False, compare=False)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __bool__(self) -> bool:
        return True  # a checkup without findings is still one

    @property
    def healthy(self) -> bool:
        """Whether it ran, and there is no error, no warning and no divergence."""
        harmless = all(finding.severity == "info" for finding in self.findings)
        return self.status == "ok" and self.divergence is None and harmless

    def _counts(self) -> dict[str, int]:
        counted = Counter(finding.severity for finding in self.findings)
        return {"errors": counted["error"], "warnings": counted["warning"], "notes": counted["info"]}

    def _counted(self) -> str:
        return ", ".join(f"{count} {name[: len(name) - (count == 1)]}" for name, count in self._counts().items())

    def readings(self) -> tuple[Reading, ...]:
        """Return how many findings there are of each severity."""
        own = [Reading(name, count) for name, count in self._counts().items()]
        return (*own, *([Reading("divergence", self.divergence.size)] if self.divergence else []))

    def _title(self) -> str:
        return f"Checkup of {self.norms} normalizers by {len(self.checks)} checks"

    def _rows(self) -> list[dict[str, Any]]:
        names = ("id", "severity", "where", "title", "evidence", "remedy", "exactness", "effect")
        return [{name: getattr(finding, name) for name in names} for finding in self.findings]

    def _shown_rows(self) -> list[dict[str, Any]]:
        return [{"id": f.id, "severity": f.severity, "where": f.where, "evidence": f.evidence} for f in self.findings]

    def _meaning(self) -> str:
        said = self._counted()
        if self.status != "ok":
            return f"{said}; the model did not run, so that most of {len(self.checks)} checks saw nothing."
        if self.divergence is not None:
            d = self.divergence
            return f"The two models part at {d.where!r} by {d.size:.2g}: {d.cause}."
        agree = "The two models agree; " if self.compared else ""
        if not self.findings or self.healthy:
            return f"{agree}{said}: nothing here needs to be done."
        first = self.findings[0]
        remedy = first.remedy.splitlines()[0][:150].rstrip(".:")
        return f"{agree}{said}. First: {first.title} at {first.where!r} ({first.id}). {remedy}."

    def groups(self) -> list[list[Finding]]:
        """Return the findings of one check and severity together, in their order."""
        table: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            table.setdefault((finding.id, finding.severity), []).append(finding)
        return list(table.values())

    def text(self, *, everything: bool = False, width: int = WIDTH) -> str:
        """Return the checkup for a terminal: three findings in full, the rest one line each."""
        groups = self.groups()
        lines = [self._title(), ""]
        if self.divergence is not None:
            lines += [f"DIVERGENCE at {self.divergence.where}", *_wrap(self.divergence.sentence, width), ""]
        elif self.compared:
            lines += ["The two models agree.", ""]
        shown = [group for group in groups if group[0].severity != "info" or everything]
        for group in shown if everything else shown[:FOLD]:
            lines += [*_told(group, width), ""]
        rest = [] if everything else [group for group in groups if group not in shown[:FOLD]]
        if rest:
            lines += [f"Folded ({len(rest)} more; --all shows them):"]
            lines += [_line(group, width) for group in rest] + [""]
        safe = sum(f.repair is not None and f.exactness in _SAFE for f in self.findings)
        hint = f" {safe} can be fixed safely: checkup.fix(), or --fix DIR." if safe else ""
        counted = self._counted()
        ran = groups and self.status == "ok"
        lines += _wrap(f"{counted}; {self.cost}.{hint}" if ran else self.meaning(), width, "")
        if self.sentence and self.status == "ok":
            lines += _wrap(f"Note: {self.sentence}.", width, "")
        for why in dict.fromkeys(self.left_out.values()):
            ids = [name for name, reason in self.left_out.items() if reason == why]
            lines += _wrap(f"Not looked at: {', '.join(ids)} ({why}).", width, "")
        return "\n".join(lines)

    def __str__(self) -> str:
        """Return the text for a terminal, with the line a person needs before publishing."""
        return f"{self.text()}\n{self.meaning()}\n{self._footer()}"

    def chart(self) -> Chart:
        """Return bars of the findings per check (needs the `lab` extra)."""
        from normgauge.charts import bars

        rows = [{"check": group[0].id, "severity": group[0].severity, "places": len(group)} for group in self.groups()]
        return bars(rows or [{"check": "-", "severity": "info", "places": 0}], x="check", y="places", series="severity")

    def document(self) -> dict[str, Any]:
        """Return everything as data that JSON can write."""
        findings = [
            {k: v for k, v in vars(finding).items() if k != "repair"} | {"fixable": finding.repair is not None}
            for finding in self.findings
        ]
        return plain({
            "format": "normgauge.checkup", "version": 1, "healthy": self.healthy, "norms": self.norms,
            "findings": findings, "divergence": self.divergence, "checks": self.checks, "left_out": self.left_out,
            "suppressed": self.suppressed, "cost": self.cost.gradients_worth,
        })  # fmt: skip

    def sarif(self, uri: str = "model") -> dict[str, Any]:
        """Return a SARIF 2.1.0 log, as code scanning reads it; places are logical, `uri` names the file they are in."""
        artifact = {"artifactLocation": {"uri": uri}, "region": {"startLine": 1}}

        def result(f: Finding) -> dict[str, Any]:
            place = [{"fullyQualifiedName": f.where, "kind": "module"}]
            said = {"text": f"{f.title} at {f.where}: {f.evidence}. {f.remedy}"}
            where = {"physicalLocation": artifact, "logicalLocations": place}
            return {"ruleId": f.id, "level": _LEVELS[f.severity], "message": said, "locations": [where]}

        rules = [
            {"id": f.id, "shortDescription": {"text": f.title}, "fullDescription": {"text": f.meaning}}
            for f in {f.id: f for f in self.findings}.values()
        ]
        home = "https://github.com/normgauge/normgauge"
        tool = {"driver": {"name": "normgauge doctor", "informationUri": home, "rules": rules}}
        schema = "https://json.schemastore.org/sarif-2.1.0.json"
        results = [result(finding) for finding in self.findings]
        return {"$schema": schema, "version": "2.1.0", "runs": [{"tool": tool, "results": results}]}

    def to_json(self) -> str:
        """Return `document()` as text."""
        return json.dumps(self.document(), indent=2)

    def fix(self, safe_only: bool = True) -> Surgery:
        """Return a repaired copy with proof; the model itself is not touched, `undo()` gives a copy of it.

        Every repair is measured: an exact one that moves an output in either mode beyond rounding, and a state-only
        one that moves an output in train mode, is taken back and said so. Those that change the function are left
        alone unless `safe_only` is false.
        """
        if self.patient is None:
            raise InputError("Checkup.fix", "the model is at hand", "a checkup read from a file", "Check anew")
        model, rows, worst = copy_model(self.patient.model), [], 0.0
        for finding in self.findings:
            trial, moved = copy_model(model), math.nan
            if finding.repair is None:
                state = "left: a person has to decide"
            elif safe_only and finding.exactness not in _SAFE:
                state = "left: changes the function"
            else:
                state, moved = self._apply(finding.repair, finding.exactness, model, trial)
            if state == "done":
                model, worst = trial, max(worst, moved)
            row = {"normalizer": finding.where, "id": finding.id, "what": state, "moved": moved}
            rows.append(row | {"exactness": finding.exactness})
        change = _difference(self.patient, self.patient.model, model, "eval")
        done = sum(row["what"] == "done" for row in rows)
        note = f"{done} of {len(rows)} findings repaired; eval outputs changed by {change:.3g} of their size"
        left = [(row["normalizer"], row["what"]) for row in rows if row["what"] != "done"]
        told: dict[str, Any] = {"operation": "checkup.fix", "refused": left, "exact": False, "mode": "train"}
        return Surgery(model, tuple(rows), worst, change, self.patient.model, note, **told)

    def _apply(self, repair: Repair, exactness: Exactness, model: nn.Module, trial: nn.Module) -> tuple[str, float]:
        """Repair a copy; return what became of it, and how far it moved the outputs where it must not."""
        assert self.patient is not None  # by the caller
        try:
            repair(trial)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            return f"refused: {error}".partition("\n")[0], math.nan
        modes = {"exact": ("train", "eval"), "state_only": ("train",)}.get(exactness, ())
        moved = max((_difference(self.patient, model, trial, mode) for mode in modes), default=0.0)
        return ("taken back: it moved the outputs" if moved > 1e-4 else "done"), moved


def _difference(patient: Patient, before: nn.Module, after: nn.Module, mode: str) -> float:
    """Return the largest relative difference of the outputs; 0 where the model refuses the mode before and after."""
    outs = []
    for model in (before, after):
        twin = copy_model(model)
        try:
            with torch.no_grad(), untouched(twin, mode, 0):  # type: ignore[arg-type]
                outs.append(first_tensor(patient.outputs_and_loss(twin, patient.batch)[0]))
        except (RuntimeError, ValueError):
            outs.append(None)
    if outs[0] is None or outs[1] is None:
        return 0.0 if outs[0] is outs[1] or outs[0] is None else math.inf
    gap, size = float((outs[0] - outs[1]).abs().max()), float(outs[0].abs().max())
    return gap / (size or 1.0) if math.isfinite(gap) else (0.0 if not math.isfinite(size) else math.inf)


def _wrap(text: str, width: int, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False) or [""]


def _places(group: list[Finding]) -> str:
    first, *others = dict.fromkeys(finding.where for finding in group)
    return f"{first} and {len(others)} more" if others else first


def _told(group: list[Finding], width: int) -> list[str]:
    first = group[0]
    head = f"{first.severity.upper()} {first.id} {first.title}"
    lines = [*_wrap(head, width, ""), *_wrap(f"at {_places(group)}: {first.evidence}", width)]
    lines += _wrap(first.meaning, width)
    code = first.remedy.splitlines()
    lines += _wrap(f"Fix ({first.exactness.replace('_', ' ')}): {code[0]}", width)
    return [*lines, *(f"      {line}" for line in code[1:])]


def _line(group: list[Finding], width: int) -> str:
    first = group[0]
    text = f"  {first.id} {first.severity:<7} {first.title} ({_places(group)})"
    return text if len(text) <= width else f"{text[: width - 3]}..."


def checkup(
    objective: Objective | nn.Module,
    batch: Any = None,
    *,
    optimizer: Optimizer | None = None,
    loader: Any = None,
    against: nn.Module | None = None,
    quick: bool = False,
    ignore: Iterable[str] = (),
    real: bool = True,
) -> Checkup:
    """Examine a network's normalization in both modes and return findings with evidence and remedy.

    Nothing is left on the model. Wrappers (DDP, DataParallel, torch.compile) are looked through. A batch is inputs, or
    `(inputs, targets)`; a pair is read as both if the model accepts its first half alone.

    Kind: every finding says what was measured. Cost: at most 60 gradients' worth, `quick` at most 6.

    Args:
        objective: an `Objective`, or a model with `batch`.
        batch: for a model: inputs as `Objective` takes them, or a pair of inputs and targets.
        optimizer: that trains the model; for checks of decay groups and steps.
        loader: of training data; for checks of batches.
        against: another implementation: the first place where the two part, and the cause.
        quick: only what a few gradients show.
        ignore: findings to leave out: "NG14", or "NG14:layer1.*" for modules that match.
        real: false for random inputs: checks that need data are left out, and it is said.

    Examples:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.99), nn.ReLU(), nn.Linear(8, 2))
        >>> [finding.id for finding in checkup(net, torch.randn(64, 4)) if finding.severity != "info"]
        ['NG07']
    """
    if not isinstance(objective, (nn.Module, Objective)):
        step = "Write ng.checkup(model, batch) or ng.checkup(ng.Objective(...))"
        raise InputError("checkup", "it examines a model or an Objective", type(objective).__name__, step)
    model = objective.model if isinstance(objective, Objective) else objective
    without = [n for n, p in (*model.named_parameters(), *model.named_buffers()) if is_lazy(p) or p.is_meta]
    if without:
        step = "Run a lazy model once; give one on the meta device its weights"
        raise ModelError("checkup", "parameters and buffers have values", f"{without[0]!r} without", step)
    if isinstance(objective, nn.Module) and next(tensors(batch), None) is None:
        step = "Write ng.checkup(model, batch), or pass an Objective"
        raise InputError("checkup", "a model is looked at on a batch", repr(batch)[:80], step)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        step = "Pass the optimizer that holds the model's parameters"
        raise InputError("checkup", "optimizer is a torch optimizer", type(optimizer).__name__, step)
    findings = []
    with preserved_rng(), torch.inference_mode(False), torch.enable_grad(), counting() as cost:
        exam = Exam(patient_of(objective, batch, real=real), optimizer, loader, quick)
        left = {name: why for name, item in all_checks().items() if (why := _why_not(item, exam))}
        made = {name: item for name, item in all_checks().items() if name not in left}
        for item in made.values():
            findings += item(exam)
        divergence = None if against is None else first_divergence(exam.patient, against)
    kept = [finding for finding in findings if not _is_ignored(finding, ignore)]
    kept.sort(key=lambda finding: (_RANK[finding.severity], -finding.effect, finding.id))
    return Checkup(
        findings=tuple(kept), divergence=divergence, compared=against is not None, checks=tuple(made), left_out=left,
        norms=len({call.where for call in exam.norms}), suppressed=len(findings) - len(kept), patient=exam.patient,
        sentence="; ".join(dict.fromkeys(exam.notes)), cost=cost(),
        status="ok" if exam.train or exam.eval else "skipped",
    )  # fmt: skip


def _why_not(item: Check, exam: Exam) -> str:
    if item.needs == "optimizer" and exam.optimizer is None:
        return "no optimizer was given"
    if item.needs == "loader" and exam.loader is None:
        return "no loader was given"
    if item.needs == "data" and not exam.patient.real:
        return "random inputs, no data"
    return "quick" if item.slow and exam.quick else ""


def _is_ignored(finding: Finding, ignore: Iterable[str]) -> bool:
    rules = (rule.partition(":") for rule in ignore)
    return any(name == finding.id and fnmatch(finding.where, place or "*") for name, _, place in rules)
