"""Where claims register themselves: one decorator per kind, one file per paper, a duplicate id is an error."""

import importlib
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from normgauge.errors import InputError, unknown_name
from normgauge.papers.court.claim import Claim, Sort, Trial
from normgauge.papers.court.contrast import Contrast
from normgauge.papers.shelf import PAPERS, studies, study_words

_CLAIMS: dict[str, Claim] = {}


def theorem(id: str, kind: Sort = "theorem", **fields: Any) -> Callable[[Trial], Trial]:
    """Register a theorem-like claim; the decorated function yields its checks on instances it draws.

    Its sentences are those of the paper's `claims.toml`, unless `fields` of `Claim` are given.
    """

    def enter(trial: Trial) -> Trial:
        register(Claim(id=id, kind=kind, trial=trial, **(fields or _sentences()[id])))
        return trial

    return enter


def bibliographic(id: str, **fields: Any) -> Callable[[Trial], Trial]:
    """Register a claim about what a text says; the decorated function compares it with the quoted words."""
    return theorem(id, "bibliographic", **fields)


def empirical(id: str, study: str, *, contrasts: Sequence[Contrast], premise: Sequence[Contrast] = ()) -> Claim:
    """Register a statement about experiments, in the file of the study that decides it and nowhere else.

    What the paper says, where, and what controls it is in the paper's `studies.toml`; the id of a finding begins with
    the name of its study. All `contrasts` must come out, where what the sentence presupposes, `premise`, holds.
    """
    words = study_words()[study]["criteria"][id]
    own = id.startswith(study)
    kind: Sort = "finding" if own else "empirical"
    cite = () if own else tuple(words.get("cite", [PAPERS[id.partition("-")[0]].key]))
    told = {"place": "", **words, "cite": cite, "contrasts": tuple(contrasts), "premise": tuple(premise)}
    return register(Claim(id=id, kind=kind, study=study, **told))


def finding(study: str, *, contrasts: Sequence[Contrast], premise: Sequence[Contrast] = ()) -> Claim:
    """Register what a study tests beside, or without, claims of the ledger; as `empirical`, but not listed there."""
    return empirical(study, study, contrasts=contrasts, premise=premise)


def register(claim: Claim) -> Claim:
    """Enter a claim into the ledger.

    Raises:
        InputError: when its id is taken.
    """
    if claim.id in _CLAIMS:
        raise InputError(f"Claim {claim.id}", "every id is registered once", "it twice", "Choose another id")
    _CLAIMS[claim.id] = claim
    return claim


def registered_claims() -> tuple[Claim, ...]:
    """Return all claims of the ledger, by paper and, within a paper, in the order of its files."""
    _open_files()
    listed = (claim for claim in _CLAIMS.values() if claim.kind != "finding")
    order = {paper: place for place, paper in enumerate(PAPERS)}

    def place(claim: Claim) -> tuple[int, str, str]:  # a file that was imported before the others keeps its place
        module = studies().get(claim.study, str(getattr(claim.trial, "__module__", "")))
        return order.get(claim.paper, len(order)), claim.paper, module

    return tuple(sorted(listed, key=place))


def criteria(study: str) -> tuple[Claim, ...]:
    """Return what a study decides: the claims of the ledger judged from it, and its own finding if it has one.

    The file of the study must have been imported: that is where they are written.
    """
    return tuple(claim for claim in _CLAIMS.values() if claim.study == study)


def find(id: str) -> Claim:
    """Return the claim of this id.

    Raises:
        UnknownNameError: naming the nearest ids.
    """
    _open_files()
    if id not in _CLAIMS:
        raise unknown_name("claim", id, _CLAIMS, "`normgauge claims` lists them with their sentences")
    return _CLAIMS[id]


@cache
def _sentences() -> dict[str, dict[str, Any]]:
    """Return id -> the sentences of every claim that is not an experiment with a study, from the papers' files."""
    texts = [(paper.folder / "claims.toml").read_text(encoding="utf-8") for paper in PAPERS.values()]
    tables = {id: table for text in texts for id, table in tomllib.loads(text).items()}
    return {
        id: {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
        for id, table in tables.items()
    }


@cache
def _open_files() -> None:
    """Import every file of the papers that judges something, once; what has no judge waits for a study."""
    for paper in PAPERS.values():
        for module in (*paper.modules("claims"), *paper.modules("studies")):
            importlib.import_module(module)
    for id, fields in _sentences().items():
        if id not in _CLAIMS:
            register(Claim(id=id, kind="empirical", **fields))
