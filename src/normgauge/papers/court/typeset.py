"""A claim's sentences with their formulas typeset: LaTeX in a paper's `typeset.toml`, MathML rendered once."""

import json
import tomllib
from functools import cache
from html import escape
from typing import Literal, get_args

from normgauge.papers.court.claim import Claim
from normgauge.papers.shelf import PAPERS

Part = Literal["printed", "corrected", "hypotheses", "note"]

#: The sentences of a claim that may have a typeset form; the printed and the corrected one of the papers' claims do.
PARTS: tuple[str, ...] = get_args(Part)


def typeset(claim: Claim, part: Part) -> str:
    """Return a sentence of a claim as HTML whose formulas are MathML: nothing is rendered at run time.

    A claim of somebody else's has no typeset form; its plain text is returned, escaped.

    Examples:
        >>> from normgauge.papers.court.registry import find
        >>> typeset(find("S0-ginv"), "printed").startswith("the gradient is inversely proportional")
        True
        >>> "<math>" in typeset(find("S0-ginv"), "printed")
        True
    """
    return rendered_forms().get(claim.id, {}).get(part) or escape(getattr(claim, part), quote=False)


def latex(claim: Claim, part: Part) -> str | None:
    """Return the same sentence with its formulas as `$LaTeX$`, or nothing where there is no typeset form."""
    return sources().get(claim.id, {}).get(part)


@cache
def sources() -> dict[str, dict[str, str]]:
    """Return the LaTeX forms: id -> part -> text with `$formulas$`."""
    return {id: parts for text in _texts("typeset.toml") for id, parts in tomllib.loads(text).items()}


@cache
def rendered_forms() -> dict[str, dict[str, str]]:
    """Return the forms rendered from the sources by `tools/typeset.py`: id -> part -> HTML with MathML."""
    return {id: parts for text in _texts("typeset.json") for id, parts in json.loads(text).items()}


def _texts(name: str) -> list[str]:
    return [(paper.folder / name).read_text(encoding="utf-8") for paper in PAPERS.values()]
