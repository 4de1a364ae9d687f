"""Complete the reference while the pages are built: a line `<!-- every name of MODULE -->` becomes its public names.

A name that a page of its own documents is linked to there; every other one gets its entry here, so that each public
name has exactly one anchor.
"""

import html
import importlib
import re
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType

import normgauge as ng

DOCS = Path(__file__).parent
_ENTRY = re.compile(r"^::: (\S+)", flags=re.MULTILINE)
_MARK = re.compile(r"^<!-- every name of (\S+) -->$", flags=re.MULTILINE)


def on_page_markdown(markdown, **_):
    """Fill the lists of a page (mkdocs calls this with its text)."""
    return _MARK.sub(lambda match: complete(match[1]), markdown)


def public_names(module):
    """Return the public names of a module: those of `__all__`, else what is defined in it, modules left out."""
    room = resolve(module)
    names = getattr(room, "__all__", None)
    if names is None:
        names = [n for n, v in vars(room).items() if getattr(v, "__module__", None) == module and not n.startswith("_")]
    return [name for name in names if name != "__version__"]


@cache
def written_entries():
    """Return the entries on pages, by the object each documents."""
    entries = {}
    for page in sorted(DOCS.rglob("*.md")):
        for name in _ENTRY.findall(page.read_text(encoding="utf-8")):
            found = resolve(name)
            entries.setdefault(id(found), name)
            if isinstance(found, ModuleType):  # an entry of a module holds its names
                for part in public_names(name):
                    entries.setdefault(id(getattr(found, part)), f"{name}.{part}")
    return entries


def resolve(name):
    """Return the object with this dotted name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise LookupError(name)


def complete(module):
    """Return Markdown: links to the names documented elsewhere, then an entry for every other one."""
    links, entries = [], []
    for name in public_names(module):
        found = resolve(f"{module}.{name}")
        if isinstance(found, ModuleType) and module == "normgauge":
            continue  # rooms have pages of their own
        written = written_entries().get(id(found))
        if module != "normgauge" and written is None and name in ng.__all__ and getattr(ng, name) is found:
            written = f"normgauge.{name}"  # its entry is on the page of ng
        if written:
            links.append(f"[`{name}`][{written}]")
        elif not callable(found) and not isinstance(found, ModuleType):
            value = html.escape(textwrap.shorten(repr(found), 300, placeholder=" ..."))
            entries.append(
                f'<h2 id="{module}.{name}" class="doc doc-heading"><code>{name}</code></h2>\n\n<code>{value}</code>'
            )
        else:
            entries.append(f"::: {module}.{name}\n    options: {{show_if_no_docstring: true}}\n")
    return "\n\n".join([*(["On pages of their own: " + ", ".join(links) + "."] if links else []), *entries])
