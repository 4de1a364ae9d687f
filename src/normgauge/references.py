"""The papers normgauge speaks of: one bibliography, looked up by key."""

import re
from functools import cache
from importlib.resources import files

from normgauge.errors import unknown_name


@cache
def bibliography() -> dict[str, str]:
    """Return every BibTeX entry of normgauge by its key.

    Examples:
        >>> "santurkar2018" in bibliography()
        True
    """
    text = (files("normgauge") / "references.bib").read_text(encoding="utf-8")
    entries = re.findall(r"@\w+\{([^,\s]+),.*?\n\}", text, flags=re.DOTALL)
    bodies = re.findall(r"@\w+\{[^,\s]+,.*?\n\}", text, flags=re.DOTALL)
    return dict(zip(entries, bodies, strict=True))


def cite(*keys: str) -> str:
    """Return the BibTeX of the given keys, in their order, ready to paste.

    Raises:
        UnknownNameError: if a key is not in the bibliography.
    """
    entries = bibliography()
    for key in keys:
        if key not in entries:
            raise unknown_name("reference", key, entries)
    return "\n\n".join(entries[key] for key in keys)


def title(key: str) -> str:
    """Return the title of a paper in plain words.

    Raises:
        UnknownNameError: if the key is not in the bibliography.

    Examples:
        >>> title("santurkar2018")
        'How Does Batch Normalization Help Optimization?'
    """
    match = re.search(r"\btitle\s*=\s*\{(.*?)\},?\s*\n", cite(key), flags=re.DOTALL)
    return " ".join(match[1].replace("{", "").replace("}", "").split()) if match else key
