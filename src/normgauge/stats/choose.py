"""`choose`: the one chooser of a tuned setting, such as an arm's learning rate."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from normgauge.records import Row, format_number


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting chosen for an arm, and how sure the choice is."""

    arm: Mapping[str, Any]  # the knobs that name the arm
    setting: Mapping[str, Any]  # the tuned knobs at their chosen values
    score: float  # mean over the seeds that finished, of the reading it was chosen by
    finished: int  # how many of its tried seeds finished
    tried: int  # how many were tried
    ties: tuple[Mapping[str, Any], ...] = ()  # other settings with as many finished seeds and the same score
    # tuned knobs whose chosen value is the smallest or the largest tried: beyond it nobody looked
    edges: tuple[str, ...] = ()

    def remarks(self) -> list[str]:
        """Return what a reader should know about the choice: failed seeds, ties, the edge of the grid."""
        where, what = _words(self.arm), _words(self.setting)
        lines = []
        if self.finished < self.tried:
            lines.append(f"{where}: only {self.finished} of {self.tried} tuning runs finished at the chosen {what}.")
        if self.ties:
            lines.append(f"{where}: {what} ties with {'; '.join(map(_words, self.ties))}; the first is taken.")
        if self.edges:
            lines.append(f"{where}: the chosen {what} is at the edge of the grid ({', '.join(self.edges)}).")
        return lines


def choose(
    runs: Iterable[Row], *, by: str, over: Sequence[str], within: Sequence[str] = (), higher: bool = True
) -> list[Choice]:
    """Choose the best setting of every arm: the only chooser there is.

    A run that diverged, died, failed or lacks the reading is no measurement. Settings with more finished seeds come
    first, then the better mean of `by` over those; of equals the first in sorted order, whatever run finished first.

    Args:
        runs: flat rows: knobs, `seed`, `status` (ok if absent), readings; only the seeds that tune.
        by: the reading chosen by; of validation data, so that the test stays a test.
        over: the knobs that are tuned.
        within: the knobs whose combinations are the arms.
        higher: whether larger is better.

    Returns:
        One choice per arm of which at least one run finished, in the order of first appearance.

    Examples:
        >>> rows = [{"norm": "batch", "lr": lr, "seed": s, "fit": lr} for lr in (0.1, 1.0, 10.0) for s in (0, 1)]
        >>> rows[-1]["status"] = rows[3]["status"] = "diverged"
        >>> [(choice.setting, choice.finished, choice.edges) for choice in choose(rows, by="fit", over=["lr"])]
        [({'lr': 0.1}, 2, ('lr',))]
    """
    arms: dict[tuple[Any, ...], dict[tuple[Any, ...], list[float | None]]] = {}
    for row in runs:
        settings = arms.setdefault(tuple(_hashable(row.get(knob)) for knob in within), {})
        settings.setdefault(tuple(_hashable(row.get(knob)) for knob in over), []).append(_measured_value(row, by))
    choices = []
    for arm, settings in arms.items():
        ranks = {setting: _rank(scores, higher) for setting, scores in settings.items()}
        best = max(ranks.values())
        first, *ties = sorted((setting for setting, rank in ranks.items() if rank == best), key=_order)
        if best[0] == 0:
            continue
        named, score = dict(zip(within, arm, strict=True)), best[1] if higher else -best[1]
        chosen, *others = (dict(zip(over, setting, strict=True)) for setting in (first, *ties))
        edges = tuple(knob for place, knob in enumerate(over) if _at_edge(first[place], place, settings))
        tried = len(settings[first])
        choices.append(Choice(named, chosen, score, best[0], tried=tried, ties=tuple(others), edges=edges))
    return choices


def _measured_value(row: Row, by: str) -> float | None:
    value = row.get(by)
    if row.get("status", "ok") != "ok" or value is None or not math.isfinite(value):
        return None
    return float(value)


def _rank(scores: Sequence[float | None], higher: bool) -> tuple[int, float]:
    finished = [score for score in scores if score is not None]
    return len(finished), (fmean(finished) if higher else -fmean(finished)) if finished else -math.inf


def _order(setting: tuple[Any, ...]) -> list[tuple[bool, float, str]]:
    """Sort numbers by size, words after them."""
    return [(not _is_number(v), float(v) if _is_number(v) else 0.0, str(v)) for v in setting]


def _at_edge(value: Any, place: int, settings: Iterable[tuple[Any, ...]]) -> bool:
    tried = {setting[place] for setting in settings}
    return len(tried) > 1 and all(map(_is_number, tried)) and value in (min(tried), max(tried))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _words(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{knob} {format_number(value)}" for knob, value in knobs.items()) or "the runs"
