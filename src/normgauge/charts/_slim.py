"""Vega's SVG as a page wants it: small, without background, with a title, and with colours for light and dark."""

import hashlib
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import groupby
from xml.etree.ElementTree import Element

from normgauge.charts._theme import FONT, INK, MEASURED_FONT, PALETTES

_NAMESPACE = "http://www.w3.org/2000/svg"
# Without a script nothing points, hovers or reads single marks aloud; the title says what the picture shows.
_IDLE = ("class", "role", "aria-label", "aria-roledescription", "aria-hidden", "pointer-events", "version")
_DEFAULTS = {
    "fill": "none",  # said by the group around everything
    "stroke": "none",
    "stroke-width": "1",
    "opacity": "1",
    "font-weight": "normal",
    "text-anchor": "start",
}
# A group says the rest for its members; its own opacity is not that of each of them.
_OWN = ("d", "x", "y", "transform", "shape", "opacity", "clip-path")
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?")
_SEGMENT = re.compile(r"([A-DF-Za-df-z])([^A-DF-Za-df-z]*)")
_TRANSLATION = re.compile(r"\s*translate\(([^,)]+),([^)]+)\)\s*")
_CELL = re.compile(r"M[\d.]+,[\d.]+h[^A-Za-z]+v[^A-Za-z]+h[^A-Za-z]+Z")
_RGB = re.compile(r"rgb\((\d+), (\d+), (\d+)\)")
_NUMBERS_OF = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7}


def slim(text: str, title: str = "") -> str:
    """Return an SVG that looks the same in a fraction of the bytes: nothing invisible, no background, two decimals."""
    source = ElementTree.fromstring(text)
    for node in source.iter():
        node.tag = node.tag.removeprefix(f"{{{_NAMESPACE}}}")
        node.attrib = {name: _shorten_value(value) for name, value in node.attrib.items() if name not in _IDLE}
    root = Element("svg", {"xmlns": _NAMESPACE, **source.attrib, "role": "img"})
    if title:
        ElementTree.SubElement(root, "title").text = title
    for child in source:
        if child.tag == "g":
            shared = [name for name in ("fill", "stroke-miterlimit") if name in child.attrib]
            common: dict[str, str] = {name: child.attrib.pop(name) for name in shared}
            fonts = {text.get("font-family", "") for text in child.iter("text")}
            if len(fonts) == 1:
                common["font-family"] = MEASURED_FONT if fonts == {FONT} else fonts.pop()
                for written in child.iter("text"):
                    written.attrib.pop("font-family", None)
            ElementTree.SubElement(root, "g", common).extend(_gather_marks(list(_visible_marks(child, 0.0, 0.0))))
        elif child.tag != "rect":  # clips and gradients; the rectangle is the background
            for clip in child.iter("path"):
                clip.set("d", _move_path(clip.attrib["d"], 0.0, 0.0))
            root.append(child)
    return _name_by_content(ElementTree.tostring(root, encoding="unicode").replace(" />", "/>"))


def adapt(text: str) -> str:
    """Return a slim SVG that turns its ink and its series to the dark variant where the reader's page is dark."""
    pairs = [(INK["light"][name], INK["dark"][name]) for name in INK["light"]]
    pairs += zip(PALETTES["light"], PALETTES["dark"], strict=True)
    rules = "".join(
        f'[{paint}="{light}"]{{{paint}:{dark}}}'
        for paint in ("fill", "stroke")
        for light, dark in pairs
        if f'{paint}="{light}"' in text
    )
    # An <img> sees neither the page's classes nor its text colour, but the scheme it asks for. The first rule is for
    # the file opened by itself: without it a browser paints light ink on white.
    style = f"<style>svg{{color-scheme:light dark}}@media (prefers-color-scheme:dark){{{rules}}}</style>"
    return re.sub(r"<svg[^>]*>(<title>[^<]*</title>)?", lambda head: head[0] + style, text, count=1)


def _visible_marks(node: Element, x: float, y: float) -> Iterator[Element]:
    """Yield what is visible at and below a node, moved by x and y, in the order it is painted."""
    own = {name: value for name, value in node.attrib.items() if _DEFAULTS.get(name) != value}
    if own.get("opacity") == "0" or own.get("display") == "none":
        return
    turn = own.pop("transform", "")
    translation = _TRANSLATION.match(turn)
    if translation:
        x, y, turn = x + float(translation[1]), y + float(translation[2]), turn[translation.end() :]
    # Clips lie in the coordinates of their group, and what is turned is turned about its origin.
    if turn or "clip-path" in own:
        rest = _NUMBER.sub(lambda number: _numeral(float(number[0])), turn)
        own["transform"], x, y = f"translate({_numeral(x)},{_numeral(y)}){rest}", 0.0, 0.0
    if node.tag == "g":
        marks = [mark for child in node for mark in _visible_marks(child, x, y)]
        if len(marks) > 1 and all(_CELL.fullmatch(mark.get("shape", "")) for mark in marks):
            own["shape-rendering"] = "crispEdges"  # else the page shines through where cells meet
        if marks and own:
            group = Element("g", own)
            group.extend(_gather_marks(marks))
            marks = [group]
        yield from marks
    elif node.tag in ("path", "line"):
        shape = own.pop("d", "") if node.tag == "path" else f"M0,0L{own.pop('x2', '0')},{own.pop('y2', '0')}"
        if "stroke" not in own:
            own.pop("stroke-width", None)
        if shape and ("fill" in own or "stroke" in own):
            yield Element("path", {"d": _move_path(shape, x, y), **own, "shape": shape})
    elif node.tag == "text" and (node.text or len(node)):
        if len(node):  # lines, each placed by steps from (0, 0)
            own["transform"] = f"translate({_numeral(x)},{_numeral(y)}){own.pop('transform', '')}"
        elif x or y:
            own |= {"x": _numeral(x), "y": _numeral(y)}
        node.attrib = own
        yield node
    elif node.tag != "text":  # pictures
        node.attrib = own | {"transform": f"translate({_numeral(x)},{_numeral(y)}){own.pop('transform', '')}"}
        yield node


def _gather_marks(marks: list[Element]) -> list[Element]:
    """Return the marks with what neighbours share said once: by one path where that looks the same, else by a group."""
    gathered = []
    for (tag, shared), members in groupby(marks, key=_shared_attributes):
        run = list(members)
        if tag == "path" and _looks_the_same_joined(run):
            run[0].set("d", "".join(mark.attrib["d"] for mark in run))
            run = run[:1]
        for mark in run:
            mark.attrib.pop("shape", None)
        if len(run) > 1 and shared:
            for mark in run:
                mark.attrib = {name: value for name, value in mark.attrib.items() if name in _OWN}
            group = Element("g", dict(shared))
            group.extend(run)
            run = [group]
        gathered += run
    return gathered


def _shared_attributes(mark: Element) -> tuple[str, tuple[tuple[str, str], ...]]:
    if mark.tag not in ("path", "text"):
        return str(id(mark)), ()
    return mark.tag, tuple((name, value) for name, value in mark.attrib.items() if name not in _OWN)


def _looks_the_same_joined(run: list[Element]) -> bool:
    """Say whether overlaps look the same in one path: opaque, and lines only or one shape in one paint."""
    opacities = ("opacity", "fill-opacity", "stroke-opacity")
    if any(name in mark.attrib for mark in run for name in (*opacities, "clip-path", "transform")):
        return False
    if "fill" not in run[0].attrib:
        return True
    return "stroke" not in run[0].attrib and len({mark.attrib["shape"] for mark in run}) == 1


def _move_path(path: str, x: float, y: float) -> str:
    """Return path data moved by x and y, in steps; corners are rounded to hundredths, so that no error adds up."""
    pieces: list[str] = []
    at, start = (0.0, 0.0), (0.0, 0.0)
    said = ""
    for letter, body in _SEGMENT.findall(path):
        kind = letter.upper()
        if kind == "Z":
            at, said = start, "z"
            pieces.append("z")
            continue
        numbers = [float(number) for number in _NUMBER.findall(body)]
        for k in range(0, len(numbers), _NUMBERS_OF[kind]):
            part = numbers[k : k + _NUMBERS_OF[kind]]
            lead = [part.pop(0) for _ in range(5)] if kind == "A" else []
            base = at if letter.islower() else (0.0, 0.0)
            if kind == "H":
                part = [part[0], at[1] - base[1]]
            elif kind == "V":
                part = [at[0] - base[0], part[0]]
            corners = [(a + base[0], b + base[1]) for a, b in zip(part[::2], part[1::2], strict=True)]
            pen, at = at, corners[-1]
            if kind == "M" and k == 0:
                start, said = at, "M"
                pieces.append("M" + _join_numerals([at[0] + x, at[1] + y]))
                continue
            steps = [_step(a, b, move) for corner in corners for a, b, move in zip(pen, corner, (x, y), strict=True)]
            word = kind.lower() if kind in "CSQTA" else "l" if all(steps) else "v" if steps[1] else "h"
            if word == "h" and not steps[0] and said in ("l", "h", "v"):
                continue  # a corner on top of the one before
            if kind == "A" and math.isclose(2 * lead[0], math.hypot(*steps), abs_tol=0.03):
                # Half a circle: radii that do not reach are stretched until they do, longer ones would move its centre.
                lead[:2] = [math.floor(50 * math.hypot(*steps)) / 100] * 2
            numerals = _join_numerals([*lead, *{"h": steps[:1], "v": steps[1:]}.get(word, steps)])
            between = word if said != word else "" if numerals[0] == "-" else " "
            pieces.append(between + numerals)
            said = word
    return "".join(pieces)


def _step(a: float, b: float, move: float) -> float:
    return round(round(b + move, 2) - round(a + move, 2), 2)


def _join_numerals(values: list[float]) -> str:
    """Return numerals with no more between them than path data needs.

    Examples:
        >>> _join_numerals([0.5, -1.0, 2.004])
        '.5-1 2'
    """
    first, *rest = map(_numeral, values)
    return first + "".join(one if one[0] == "-" else f" {one}" for one in rest)


def _numeral(value: float) -> str:
    numeral = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if numeral == "-0" else re.sub(r"^(-?)0\.", r"\1.", numeral)


def _shorten_value(value: str) -> str:
    """Return an attribute's value in its short form: two decimals, #rrggbb, no unit."""
    if _NUMBER.fullmatch(value.removesuffix("px")):
        return _numeral(float(value.removesuffix("px")))
    colour = _RGB.fullmatch(value)
    if colour:
        return "#" + "".join(f"{int(part):02x}" for part in colour.groups())
    return "none" if value == "transparent" else value


def _name_by_content(text: str) -> str:
    """Name clips and gradients by what they stand in: two pictures on one page must not share names."""
    references = re.compile(r'(?<= id=")[^"]+|(?<=url\(#)[^)]+')
    mark = hashlib.sha256(references.sub("", text).encode()).hexdigest()[:6]
    names = {name: f"n{mark}-{k}" for k, name in enumerate(dict.fromkeys(references.findall(text)))}
    return references.sub(lambda name: names[name[0]], text)
