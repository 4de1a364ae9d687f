"""Typeset formulas as MathML while the pages are built, so that they show offline and without scripts."""

import html
import re

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', flags=re.DOTALL)


def on_page_content(content, **_):
    """Replace every formula of a page (mkdocs calls this with the page's HTML)."""
    return _FORMULA.sub(_typeset, content)


def _typeset(match):
    return convert(html.unescape(match[3]), display="inline" if match[2] == "(" else "block")
