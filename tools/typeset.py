"""Write the papers' typeset.json: the claims' LaTeX formulas as MathML, so that no page needs LaTeX.

latex2mathml knows the symbols; what browsers then space or shape wrongly is mended here.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from xml.etree import ElementTree

from latex2mathml.converter import convert

from normgauge.papers.court.typeset import sources
from normgauge.papers.shelf import PAPERS

ROOT = Path(__file__).parents[1] / "src" / "normgauge" / "papers"
RELATIONS = "±⟂⪰\u223c"  # come as identifiers, which have no space around them
LETTERLIKE = "∞\u22a4*"  # come as operators, which have
WORDS = re.compile(r"(<mrow>)?<(mo|mi)>([A-Za-z]{2,})</\2>(?=(<mo stretchy=\"false\">[(\[])?)")
LETTERS = re.compile(r'(?:<mi mathvariant="normal">[A-Za-z]</mi>){2,}')
FUNCTIONS = ("ln", "log", "exp", "cos", "sin", "tanh", "dim", "ker")
ALONE = re.compile(r"<mrow>(<(m[ino])[^>]*>[^<]*</\2>)</mrow>")


def render(text: str) -> str:
    """Return a sentence with `$formulas$` as HTML: words escaped, formulas as MathML."""
    pieces = text.split("$")
    return "".join(formula(piece) if k % 2 else html.escape(piece, quote=False) for k, piece in enumerate(pieces))


def formula(latex: str) -> str:
    """Return one formula as MathML, smaller than latex2mathml's and with the spacing of printed mathematics."""
    fenced = re.sub(r"(?<!\\left)(\\l(?:vert|Vert|angle))", r"\\left\1", latex)
    fenced = re.sub(r"(?<!\\right)(\\r(?:vert|Vert|angle))", r"\\right\1", fenced)
    markup = convert(fenced)
    markup = re.sub(r"&#x0*([0-9A-Fa-f]+);", _character, markup)
    markup = re.sub(r"<math [^>]*>", "<math>", markup)
    markup = markup.replace("<mi>~</mi>", "<mi>\u223c</mi>").replace("<mo>/</mo>", '<mo lspace="0" rspace="0">/</mo>')
    markup = re.sub(
        r"(<mo[^>]*>[^<)\]]*</mo>)<mo>\u2212</mo>", '\\1<mo form="prefix">\u2212</mo>', markup
    )  # a sign, no difference
    markup = re.sub(r"<mi>(\.\d+)</mi>", r"<mn>\1</mn>", markup)
    for sign in RELATIONS:
        markup = markup.replace(f"<mi>{sign}</mi>", f"<mo>{sign}</mo>")
    for sign in LETTERLIKE:
        markup = markup.replace(f"<mo>{sign}</mo>", f"<mi>{sign}</mi>")
    markup = re.sub(r"<mover>(<mi>.</mi><mo)", r'<mover accent="true">\1', markup)
    markup = LETTERS.sub(lambda match: f"<mi>{re.sub('<[^>]*>', '', match[0])}</mi>", markup)
    markup = WORDS.sub(_word, markup)
    markup = re.sub(r'<mn mathvariant="bold">', '<mn style="font-weight: bold">', markup)
    markup = _with_plain_primes(markup)
    while (smaller := ALONE.sub(r"\1", markup)) != markup:
        markup = smaller
    return markup


def _with_plain_primes(markup: str) -> str:
    """Put primes beside their letter: raised once more, as latex2mathml does, f' and f'' are hard to tell apart."""
    tree = ElementTree.fromstring(markup)
    for parent in list(tree.iter()):
        for place, node in list(enumerate(parent))[::-1]:
            if node.tag not in ("msup", "msubsup"):
                continue
            raised = node[-1]
            inner = list(raised) if raised.tag == "mrow" else [raised]
            if inner[0].text not in ("\u2032", "\u2033"):
                continue
            prime = ElementTree.Element("mo", lspace="0", rspace="0")
            prime.text = inner[0].text
            node.remove(raised)
            letter = node[0] if node.tag == "msup" else node
            letter.tag = letter.tag.replace("msubsup", "msub")
            if len(inner) > 1:  # something else is raised too, as in W'^T
                group = ElementTree.Element("mrow")
                group.extend([letter, prime])
                node[:] = [group, *inner[1:]]
            else:
                parent[place : place + 1] = [letter, prime]
    return ElementTree.tostring(tree, encoding="unicode")


def _character(match: re.Match[str]) -> str:
    return html.escape(chr(int(match[1], 16)), quote=False)


def _word(match: re.Match[str]) -> str:
    """Space a named function like TeX does: thin before and after, none at an edge or before its argument."""
    if match[2] == "mi" and match[3] not in FUNCTIONS:
        return match[0]  # a name such as BN or Lip
    left = "0" if match[1] else "0.17em"
    right = "0" if match[4] else "0.17em"
    return f'{match[1] or ""}<mo lspace="{left}" rspace="{right}">{match[3]}</mo>'


def rendered() -> dict[str, dict[str, str]]:
    """Return id -> part -> sentence with MathML, for every sentence that has a LaTeX form."""
    return {id: {part: render(text) for part, text in parts.items()} for id, parts in sources().items()}


if __name__ == "__main__":
    forms = rendered()
    for paper in PAPERS.values():
        own = {id: parts for id, parts in forms.items() if id.startswith(f"{paper.id}-")}
        body = json.dumps(own, ensure_ascii=False, indent=0, sort_keys=True) + "\n"
        (ROOT / paper.key / "typeset.json").write_text(body, encoding="utf-8")
