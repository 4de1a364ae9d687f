"""`Result`: what every instrument gives; and its cost, counted while it is measured."""

from __future__ import annotations

import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from html import escape
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from normgauge.charts import inline_svg
from normgauge.errors import InputError, MissingExtraError, offer_partial, require
from normgauge.records import (
    Chart,
    Reading,
    Status,
    dash_holes,
    format_number,
    format_table,
    is_numeric,
    without_empty_columns,
)

if TYPE_CHECKING:
    import pandas

MOST_ROWS = 60  # of a table in a notebook; all of them are in `.frame()`
P = ParamSpec("P")
R = TypeVar("R", bound="Result")

#: What a call costs, in gradients: a forward is a third of a forward with its backward; a product with a curvature
#: matrix on a kept graph took 2.1 to 2.2 gradients on a ResNet and 1.5 on an MLP (`benchmarks/results/curvature.json`).
FORWARD, PRODUCT = 1 / 3, 2.2


@dataclass(frozen=True, slots=True)
class Cost:
    """Counted calls, each a pass over the data of whoever made it; part of the data is part of a call.

    Examples:
        >>> print(Cost(9, 3, 3))
        cost 12.6 gradients' worth (9 forwards, 3 gradients, 3 products)
    """

    forwards: float = 0.0  # forward passes without a backward one
    gradients: float = 0.0  # forward passes with their backward one
    products: float = 0.0  # products with a curvature matrix or a Jacobian

    @property
    def gradients_worth(self) -> float:
        """The whole in gradients."""
        return FORWARD * self.forwards + self.gradients + PRODUCT * self.products

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(Cost)))

    def __str__(self) -> str:
        counts = {item.name: getattr(self, item.name) for item in fields(self)}
        parts = [f"{n:.3g} {name.removesuffix('s') if n == 1 else name}" for name, n in counts.items() if n]
        return f"cost {self.gradients_worth:.3g} gradients' worth ({', '.join(parts)})" if parts else "cost none"


Tally = dict[tuple[str, Callable[[], float]], float]
_OPEN: ContextVar[tuple[Tally, ...]] = ContextVar("tallies", default=())


def spend(calls: str, amount: float = 1.0, whole: Callable[[], float] = float) -> None:
    """Add calls ("forwards", "gradients" or "products") to every cost that is being counted; parts of a `whole`."""
    for tally in _OPEN.get():
        tally[calls, whole] += amount


@contextmanager
def counting() -> Iterator[Callable[[], Cost]]:
    """Give a function that returns what was counted since; counts may be nested, the outer one holds the inner.

    Examples:
        >>> with counting() as cost:
        ...     spend("gradients", 3)
        >>> cost().gradients
        3.0
    """
    tally: Tally = defaultdict(float)
    token = _OPEN.set((*_OPEN.get(), tally))

    def cost() -> Cost:
        sums = dict.fromkeys((item.name for item in fields(Cost)), 0.0)
        for (calls, whole), amount in tally.items():
            sums[calls] += amount / (whole() or 1.0)
        return Cost(**{name: round(value, 6) for name, value in sums.items()})  # thirds of a pass add up to one

    try:
        yield cost
    finally:
        _OPEN.reset(token)


#: Every instrument by its name, in the order of import.
INSTRUMENTS: dict[str, Callable[..., Result]] = {}


def instrument(measure: Callable[P, R]) -> Callable[P, R]:
    """Make a function an instrument: registered by its name, its result told `cost`, `mode` and `seed`.

    The mode is that of the argument `objective`, the seed that of the argument `seed`; what has neither says so
    itself. A result that was put together from others without a call of its own keeps the cost it came with. One
    thread at a time measures, and global random states are those from before afterwards.

    Ctrl-C arrives as KeyboardInterrupt. An instrument with an argument `partial` offers what it has by then
    (`errors.offer_partial`): the interrupt carries it as `partial`, and `partial=True` returns it instead.
    """
    signature = inspect.signature(measure)
    partial_offered = "partial" in signature.parameters

    @functools.wraps(measure)
    def run_measure(*args: P.args, **kwargs: P.kwargs) -> R:
        import torch  # tables and pages do without

        from normgauge.rng import preserved_rng

        try:
            bound = signature.bind(*args, **kwargs)
            _check_arguments(measure.__name__, bound.arguments)
        except TypeError as error:
            raise TypeError(f"{measure.__name__}(): {error}") from None
        bound.apply_defaults()
        objective = bound.arguments.get("objective")

        def complete(result: R) -> R:
            spent = cost()
            differentiated = spent.gradients or spent.products
            told = result.sentence or (objective.remark if objective is not None and differentiated else "")
            mode = result.mode if objective is None else objective.mode
            seed, counted = bound.arguments.get("seed", result.seed), spent if spent.gradients_worth else result.cost
            return replace(result, sentence=told, mode=mode, seed=seed, cost=counted)

        with preserved_rng(), torch.inference_mode(False), torch.enable_grad(), counting() as cost:
            try:
                with offer_partial(lambda inner: complete(inner) if partial_offered and inner is not None else None):
                    return complete(measure(*args, **kwargs))
            except KeyboardInterrupt as interrupt:
                partial: R | None = interrupt.partial  # type: ignore[attr-defined]
                if partial is None or not kwargs.get("partial"):
                    raise
                return partial

    INSTRUMENTS[measure.__name__] = run_measure
    return run_measure


def _check_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise for a model in the place of an objective, the other way round, and numbers that are none."""
    import torch

    for argument, value in arguments.items():
        is_model, is_objective = isinstance(value, torch.nn.Module), hasattr(value, "loss_of")
        if argument == "objective" and not is_objective:
            step = f"Make one: ng.{name}(ng.Objective(model, loss, data, mode='train'))"
            raise InputError(name, "the first argument is an ng.Objective", type(value).__name__, step)
        if argument in ("model", "layer") and not is_model:
            step = "Pass objective.model" if is_objective else "Pass the model itself"
            raise InputError(name, f"{argument} is a torch.nn.Module", type(value).__name__, step)
        if isinstance(value, float) and math.isnan(value):
            raise InputError(name, f"{argument} must be a number", "nan", "Leave it out for its default")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What every instrument gives: numbers that say what kind they are, what they mean and what they cost.

    * `print(r)`: the table, `meaning()`, and one line with kind, mode, seed, cost and status.
    * `r.readings()`: the headline numbers first, each a `Reading` with kind, uncertainty and status.
    * `r.meaning()`: what the numbers say of this network and what to do, with the threshold that decided; a status
      other than ok is said first.
    * `r.frame()`, `r.chart()`: pandas and Altair (the `lab` extra); in a notebook `r` shows all of it at once.

    A subclass is a frozen dataclass with fields of its own. It gives `_title()`, `_rows()` (flat mappings),
    `readings()`, `_meaning()` and, where there is more to know, `_notes()`; it overrides `chart()`. What makes it is
    decorated with `instrument`, which fills in `mode`, `seed` and `cost`. `normgauge.testing.check_result` holds a
    result to all this.

    Attributes:
        mode: "train" or "eval"; empty where no mode matters.
        seed: of what was drawn at random; `None` where nothing was.
        status: of the whole; single readings have their own.
        sentence: why, where the status is not ok.
        cost: counted calls.
    """

    mode: str = ""
    seed: int | None = None
    status: Status = "ok"
    sentence: str = ""
    cost: Cost = field(default=Cost(), compare=False)

    def __init_subclass__(cls) -> None:
        """Keep the short `repr`: a dataclass would list every float it holds."""
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def readings(self) -> tuple[Reading, ...]:
        """Return the numbers, the headline first."""
        return ()

    def meaning(self) -> str:
        """Return one or two sentences: what the numbers say of this network, by which threshold, and what to do."""
        said = dash_holes(self._meaning())
        if self.status == "ok":
            return said
        why = f": {self.sentence.rstrip('.')}" if self.sentence else ""
        return f"{self.status.capitalize()}{why}. {said}".strip()

    def frame(self) -> pandas.DataFrame:
        """Return the rows as a pandas DataFrame (needs the `lab` extra)."""
        pandas = require("pandas", "lab", f"{type(self).__name__}.frame")
        return pandas.DataFrame(self._rows())

    def chart(self) -> Chart:
        """Return an Altair chart of the result (needs the `lab` extra)."""
        raise NotImplementedError(f"{type(self).__name__} has no chart")

    def _title(self) -> str:
        return type(self).__name__

    def _rows(self) -> list[dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} must say what its rows are")

    def _shown_rows(self) -> list[dict[str, Any]]:
        """Return the rows a person reads, where they are not all."""
        return self._rows()

    def _printed_rows(self) -> list[dict[str, Any]]:
        """Return the shown rows without empty columns; none where nothing was measured, which the meaning says."""
        return [] if self.status == "skipped" else without_empty_columns(self._shown_rows())

    def _meaning(self) -> str:
        return ""

    def _notes(self) -> str:
        """Return what else a person needs before publishing the numbers: what they assume, what eps does."""
        return ""

    def _footer(self) -> str:
        kinds = ", ".join(dict.fromkeys(reading.kind for reading in self.readings()))
        parts = [
            f"kind {kinds}" if kinds else "",
            f"mode {self.mode or 'none'}",
            "no seed" if self.seed is None else f"seed {self.seed}",
            str(self.cost),
            f"status {self.status}" + (f" ({self.sentence})" if self.sentence and self.status == "ok" else ""),
            dash_holes(self._notes()),
        ]
        return "; ".join(part for part in parts if part)

    def __str__(self) -> str:
        """Return the table, what it means, and the line a person needs before publishing the numbers."""
        footer = f"{self.meaning()}\n{self._footer()}".strip()
        return format_table(self._printed_rows(), title=dash_holes(self._title()), footer=footer)

    def __repr__(self) -> str:
        """Return the class, the headline number and the status in one line."""
        headline = f"{next(iter(self.readings()), '')}"[:140]
        return f"{type(self).__name__}({headline}; {self.status})" if headline else f"{type(self).__name__}()"

    def _repr_html_(self) -> str:
        """Return the result for a notebook: self-contained, in the colours of the page around it."""
        title, *rest = dash_holes(self._title()).splitlines()
        paragraphs = "".join(f"<p>{escape(text)}</p>" for text in (*rest, self.meaning()) if text)
        table, picture, footer = _html_table(self._printed_rows()), self._picture(), escape(self._footer())
        return (
            f'<div style="max-width:60em"><p><strong>{escape(title)}</strong></p>{paragraphs}{picture}{table}'
            f'<p style="opacity:0.7;font-size:smaller">{footer}</p></div>'
        )

    def _picture(self) -> str:
        """Return the chart as SVG text; nothing where the extra is missing or there is nothing to draw."""
        try:
            return inline_svg(self.chart(), label=self._title().splitlines()[0])
        except (MissingExtraError, NotImplementedError, InputError):
            return ""


def _html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    sides = {name: "right" if is_numeric(rows, name) else "left" for name in columns}

    def cells(tag: str, texts: Mapping[str, str]) -> str:
        return "".join(f'<{tag} style="text-align:{sides[n]}">{escape(texts[n])}</{tag}>' for n in columns)

    head = cells("th", {name: name.replace("_", " ") for name in columns})
    body = [cells("td", {name: format_number(row.get(name)) for name in columns}) for row in rows[:MOST_ROWS]]
    more = f"<p>{len(rows) - MOST_ROWS} more rows in .frame()</p>" if len(rows) > MOST_ROWS else ""
    lines = "".join(f"<tr>{line}</tr>" for line in (head, *body))
    return f'<div style="overflow-x:auto"><table>{lines}</table></div>{more}'
