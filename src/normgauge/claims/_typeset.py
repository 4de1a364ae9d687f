"""A claim's sentences with their formulas typeset: LaTeX in `typeset/<paper>.toml`, MathML rendered once from it."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from html import escape
from importlib.resources import files
from typing import Literal, get_args

from normgauge.claims._claim import Claim

Part = Literal["printed", "corrected", "hypotheses", "note"]

#: The sentences of a claim that may have a typeset form; the printed and the corrected one of the papers' claims do.
PARTS: tuple[str, ...] = get_args(Part)


def typeset(claim: Claim, part: Part) -> str:
    """Return a sentence of a claim as HTML whose formulas are MathML: nothing is rendered at run time.

    A claim of somebody else's has no typeset form; its plain text is returned, escaped.

    Args:
        claim: from the ledger.
        part: `printed`, `corrected`, `hypotheses` or `note`.

    Examples:
        >>> from normgauge.claims._registry import find
        >>> typeset(find("S0-ginv"), "printed").startswith("the gradient is inversely proportional")
        True
        >>> "<math>" in typeset(find("S0-ginv"), "printed")
        True
    """
    return rendered().get(claim.id, {}).get(part) or escape(getattr(claim, part), quote=False)


def latex(claim: Claim, part: Part) -> str | None:
    """Return the same sentence with its formulas as `$LaTeX$`, or nothing where there is no typeset form."""
    return sources().get(claim.id, {}).get(part)


@cache
def sources() -> dict[str, dict[str, str]]:
    """Return the LaTeX forms: id -> part -> text with `$formulas$`."""
    folder = files("normgauge.claims") / "typeset"
    found: dict[str, dict[str, str]] = {}
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        if file.name.endswith(".toml"):
            found |= tomllib.loads(file.read_text(encoding="utf-8"))
    return found


@cache
def rendered() -> dict[str, dict[str, str]]:
    """Return the forms rendered from the sources by `docs/generate_typeset.py`: id -> part -> HTML with MathML."""
    text = (files("normgauge.claims") / "typeset" / "rendered.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
