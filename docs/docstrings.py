"""Take docstrings as they are meant: formulas are no Markdown, and a sentence over two lines is one sentence."""

import re

import griffe

_CODE = re.compile(r"(``?[^`]*``?)")
_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# `Kind: ...` with an indented second line would become a box with half a sentence as its title.
_SENTENCE = re.compile(r"^(\w+: \S.*(?:\n[ ]{4}\S.*)+)", flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj, **_):
        """Rewrite one (griffe calls this with every object)."""
        if obj.docstring:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text):
    """Return a docstring whose prose is safe from Markdown; code, doctests and sections stay.

    Examples:
        >>> print(plain("G'_i = grad L(V_{i-1}), <G_i, G'_i>, `a_`"))
        G'\\_i = grad L(V\\_{i-1}), &lt;G_i, G'\\_i>, `a_`
    """
    text = _SENTENCE.sub(lambda found: re.sub(r"\n[ ]+", "\n", found[0]), text)
    return "\n\n".join(_escape(block) for block in text.split("\n\n"))


def _escape(block):
    prose, prompt, doctest = block.partition(">>>")
    if "\n```" in f"\n{prose}" or block.startswith("    "):  # code is shown as it is
        return block
    pieces = _CODE.split(prose)
    pieces[::2] = [_UNDERSCORE.sub(r"\\_", re.sub(r"<(?!https?:)", "&lt;", piece)) for piece in pieces[::2]]
    return "".join(pieces) + prompt + doctest
