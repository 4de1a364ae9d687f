"""The SVG of a page: what is visible stays where it was, the rest goes, and dark readers get dark colours."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from normgauge import charts
from normgauge.charts._slim import _move_path, adapt, slim

FIGURES = sorted((Path(__file__).parents[2] / "docs" / "_generated" / "studies" / "figures").glob("*.svg"))
HEAD = '<svg xmlns="http://www.w3.org/2000/svg" class="marks" width="9" height="9" viewBox="0 0 9 9">'


def drawn(inside: str, offset: str = "0,0") -> str:
    ground = '<rect width="9" height="9" fill="#ffffff"/>'
    return slim(f'{HEAD}{ground}<g fill="none" transform="translate({offset})">{inside}</g></svg>')


@pytest.mark.parametrize(
    ("path", "moved"),
    [
        ("M0,0L1.234,2.345L3,2.345", "M10 20l1.23 2.34h1.77"),
        ("M0,0h4v3h-4Z", "M10 20h4v3h-4z"),
        ("m1,1l1,1H0V0", "M11 21l1 1h-2v-2"),
        ("M0,0C1,0,2,1,2,2", "M10 20c1 0 2 1 2 2"),
        ("M2.345,0A2.345,2.345,0,1,1,-2.345,0", "M12.35 20a2.35 2.35 0 1 1-4.7 0"),
        ("M0,0L1e-7,0L5,0", "M10 20h0 5"),
    ],
)
def test_a_path_is_moved_and_said_in_steps(path, moved):
    assert _move_path(path, 10, 20) == moved


def test_rounding_does_not_add_up():
    path = "M0,0" + "".join(f"L{k * 0.014},{k % 2}" for k in range(1, 1001))
    steps = re.findall(r"-?[\d.]+", _move_path(path, 0, 0).replace("-", " -"))[2:]
    assert sum(float(step) for step in steps[::2]) == pytest.approx(14.0, abs=0.006)


def test_what_nobody_sees_goes():
    hidden = '<path d="M0,0h9" stroke="#888888" opacity="0"/><path d="M0,0h9v9h-9Z"/><text fill="#1c2330"/>'
    shown = '<g class="mark" aria-label="x"><line transform="translate(1,2)" x2="3" y2="0" stroke="#c9cfd9"/></g>'
    root = ElementTree.fromstring(drawn(hidden + shown, "5,6"))
    (mark,) = root[0]
    assert mark.attrib == {"d": "M6 8h3", "stroke": "#c9cfd9"}


def test_neighbours_are_joined_only_where_that_looks_the_same():
    line = '<line transform="translate({0},0)" x2="3" y2="1" stroke="#c9cfd9" {1}/>'
    assert drawn(line.format(1, "") + line.format(2, "")).count("<path") == 1
    assert drawn(line.format(1, 'stroke-opacity="0.5"') + line.format(2, 'stroke-opacity="0.5"')).count("<path") == 2
    triangle = '<path d="M0,-1L-1,1L1,1Z" fill="#2453c6"/>'
    square = '<path d="M-1,-1h2v2h-2Z" fill="#2453c6"/>'
    assert drawn(triangle + triangle).count("<path") == 1
    assert drawn(triangle + square).count("<path") == 2, "one runs against the other: a joined path would have a hole"


def test_clips_turned_text_and_lines_keep_their_place():
    clip = '<g clip-path="url(#clip7)" transform="translate(1,1)"><path d="M0,0h3" stroke="#2453c6"/></g>'
    turned = '<text transform="translate(2,3) rotate(-90) translate(0,-4)" fill="#1c2330">up</text>'
    lines = '<text transform="translate(2,3)" fill="#1c2330"><tspan>one</tspan><tspan x="0" dy="9">two</tspan></text>'
    text = drawn(clip + turned + lines, "5,5")
    assert 'transform="translate(6,6)"><path d="M0 0h3"' in text
    assert 'transform="translate(7,8)rotate(-90) translate(0,-4)"' in text
    assert 'transform="translate(7,8)"><tspan>one</tspan>' in text


def test_colours_turn_where_the_page_is_dark():
    text = adapt(drawn('<path d="M0,0h3" stroke="#2453c6"/>'))
    assert f'prefers-color-scheme:dark){{[stroke="#2453c6"]{{stroke:{charts.PALETTES["dark"][0]}}}}}' in text
    assert ElementTree.fromstring(text) is not None


def test_a_chart_for_a_page_has_title_and_no_background():
    chart = charts.bars([{"x": "a", "y": 1.0}, {"x": "b", "y": 2.0}], x="x", y="y")
    text = charts.svg(chart, "heights & <widths>")
    assert "<title>heights &amp; &lt;widths&gt;</title>" in text and 'role="img"' in text
    assert 'fill="#ffffff"' not in text and "<style>" in text
    inline = charts.inline_svg(chart, "heights")
    assert "currentColor" in inline and "<style>" not in inline and 'role="img"' in inline


def test_committed_figures_are_small_named_and_adapt():
    assert sum(path.stat().st_size for path in FIGURES) < 2_500_000
    for path in FIGURES:
        text = path.read_text(encoding="utf-8")
        assert "<title>" in text and "prefers-color-scheme" in text and 'fill="#ffffff"' not in text, path.name
