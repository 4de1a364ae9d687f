"""Charts: rows reach the picture unchanged, holes stay holes, names are only text, files need no network."""

import itertools
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from browser import ask, needs_browser
from normgauge import charts
from normgauge.charts._rows import scale_type
from normgauge.charts._theme import BACKGROUNDS
from normgauge.charts.spectrum import rates as rates_tried
from normgauge.errors import InputError, UnknownNameError
from reference import colors

NASTY = "</script><script>window.hacked = 1</script>"


def losses(arms=("none", "batch"), steps=5):
    return [
        {"step": s, "value": 2.0 * math.exp(-s * (k + 1)), "low": 0.1, "high": 3.0, "series": arm, "n": 3}
        for k, arm in enumerate(arms)
        for s in range(steps)
    ]


def rates():
    return [
        {"lr": 0.01, "value": 0.9, "series": "a", "failed": 0, "runs": 3},
        {"lr": 0.1, "value": 0.8, "series": "a", "failed": 1, "runs": 3},
        {"lr": 0.01, "value": 0.9, "series": "b", "failed": 0, "runs": 3},
        {"lr": 0.1, "value": float("nan"), "series": "c", "failed": 3, "runs": 3},
    ]


def every_chart():
    grid = [{"a": x, "b": y, "value": x * x + y * y} for x in range(4) for y in range(3)]
    dots = [
        {"series": "a", "value": 1.0, "low": 0.5, "high": 2.0},
        {"series": "b", "value": None, "low": None, "high": None},
    ]
    return {
        "curves": charts.curves(losses(), low="low", high="high", detail=["n"], title="loss"),
        "intervals": charts.intervals(dots),
        "against": charts.against(rates(), x="lr", failed="failed", total="runs"),
        "bars": charts.bars(losses(), x="step", series="series"),
        "histogram": charts.histogram(losses(), series="series", bins=7),
        "heatmap": charts.heatmap(grid, x="a", y="b", levels=3),
        "surface": charts.surface(grid, x="a", y="b", levels=3, paths=[{"a": 0, "b": 1, "path": 0, "step": 0}]),
    }


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_palette_is_seen_by_all_eyes(mode):
    palette = charts.PALETTES[mode]
    assert min(colors.contrast(color, BACKGROUNDS[mode]) for color in palette) >= 3.0
    for eye in colors.EYES:
        worst = min(colors.distance(a, b, eye) for a, b in itertools.combinations(palette, 2))
        assert worst >= 7.5, f"two colours look alike to {eye} eyes"


@pytest.mark.parametrize("name", ["curves", "intervals", "against", "bars", "histogram", "heatmap", "surface"])
def test_every_chart_is_valid_themed_and_renders(name, tmp_path):
    chart = every_chart()[name]
    spec = chart.to_dict()  # validates against the schema
    assert spec["config"]["range"] == charts.config("light")["range"]
    svg = charts.save(chart, tmp_path / f"{name}.svg").read_text()
    assert "NaN" not in svg and "undefined" not in svg


def test_marks_without_a_series_and_paths_have_colours_of_the_palette():
    drawn = charts.svg(charts.panels(losses(("a",)), x="step", ys={"value": "loss"}))
    assert charts.PALETTES["light"][0] in drawn and "#4c78a8" not in drawn, "Vega's own blue"
    path = charts.svg(every_chart()["surface"])
    assert charts.PALETTES["light"][1] in path and 'stroke="#ffffff"' in path, "seen on light and on dark ground"


def test_bars_stand_over_their_names_and_counts_have_whole_ticks():
    findings = [{"x": "NG1", "value": 1, "series": "error"}, {"x": "NG2", "value": 2, "series": "info"}]
    encoding = charts.bars(findings, x="x", series="series").to_dict()["encoding"]
    assert "xOffset" not in encoding and encoding["y"]["axis"]["values"] == [0, 1, 2]
    shared = [*findings, {"x": "NG1", "value": 0.5, "series": "info"}]
    encoding = charts.bars(shared, x="x", series="series").to_dict()["encoding"]
    assert "xOffset" in encoding and "values" not in encoding["y"]["axis"]


def test_every_bar_and_every_swept_value_is_named():
    names = [f"orthogonal x {k}" for k in range(11)]
    drawn = charts.svg(charts.bars([{"x": name, "value": 1.0} for name in names], x="x"))
    assert all(f">{name}<" in drawn for name in names), "a name left out for want of room is turned instead"
    swept = [0.0, 0.0001, 0.001, 0.01]
    told = charts.against([{"decay": x, "value": 1.0, "series": "a"} for x in swept], x="decay")
    assert all(f">{x:g}<" in charts.svg(told) for x in swept), "zero stands beside the decades"


def test_measured_places_are_not_joined():
    rows = [{"x": x, "value": x, "series": "a"} for x in (1.0, 2.0)]
    marks = [
        [layer["mark"]["type"] for layer in charts.against(rows, x="x", joined=j).to_dict()["layer"]] for j in (0, 1)
    ]
    assert "line" not in marks[0] and "line" in marks[1]


def test_rules_of_the_stable_rate_are_seen_on_dark_ground():
    tried = [{"rate": rate, "loss": 1.0, "stable": True} for rate in (0.1, 1.0)]
    drawn = charts.svg(rates_tried(tried, {"use": 0.3}, ""))
    ink = re.search(r'stroke="([^"]+)"', re.search(r"<[a-z]+ [^>]*stroke-dasharray[^>]*>", drawn)[0])[1]
    assert f'[stroke="{ink}"]{{stroke:' in drawn, "turns with the scheme"


def test_places_are_called_by_their_names(tmp_path):
    names = ["stem", "block.0", 'a"b', "head", "out"]
    for chart in (
        charts.curves(losses(), places=names),
        charts.panels(losses(), x="step", ys={"value": ""}, places=names),
    ):
        drawn = charts.svg(chart)
        assert ">block.0<" in drawn and '>a"b<' in drawn.replace("&quot;", '"') and ">0.5<" not in drawn


def test_missing_values_are_holes():
    rows = losses()
    rows[2]["value"], rows[3]["value"] = float("nan"), float("inf")
    data = charts.curves(rows, y_scale="linear").to_dict()["datasets"]["rows"]
    assert [row["y"] for row in data[:5]] == [rows[0]["value"], rows[1]["value"], None, None, rows[4]["value"]]


def test_frames_and_rows_draw_the_same():
    pandas = pytest.importorskip("pandas")
    drawn = [json.dumps(charts.curves(rows).to_dict()) for rows in (pandas.DataFrame(losses()), losses())]
    first, second = (re.sub(r"view_\d+", "view", text) for text in drawn)  # older altair counts views of the process
    assert first == second


def test_names_of_columns_never_become_fields():
    rows = [{"a.b": k, "c[0]": k + 1, NASTY: "x"} for k in range(3)]
    spec = charts.curves(rows, x="a.b", y="c[0]", series=NASTY, detail=["a.b"]).to_dict()
    fields = set(re.findall(r'"field": "([^"]*)"', json.dumps(spec)))
    assert fields <= {"x", "y", "series"}


def test_wrong_columns_and_no_rows_are_explained():
    with pytest.raises(UnknownNameError, match=r"Did you mean 'value'\?"):
        charts.curves(losses(), y="valeu")
    with pytest.raises(InputError, match="at least one row"):
        charts.intervals([])
    with pytest.raises(InputError, match="log axis needs positive values"):
        charts.against([{"x": 1, "value": -1.0, "series": "a"}], x="x", y_scale="log")
    with pytest.raises(UnknownNameError, match="unknown theme"):
        charts.config("sepia")


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), st.floats(1e-3, 1e3))
def test_automatic_log_axis_depends_on_the_spread_only(values, unit):
    spread = max(values) / min(values)
    assume(not math.isclose(spread, 100.0, rel_tol=1e-9))
    expected = "log" if spread > 100 else "linear"
    assert scale_type(values, "auto") == scale_type([unit * v for v in values], "auto") == expected
    assert scale_type([*values, 0.0], "auto") == "linear"


def test_failures_stand_in_lanes_above_the_axes():
    spec = charts.against(rates(), x="lr", failed="failed", total="runs", height=300).to_dict()
    rows = spec["datasets"]["rows"]
    top = spec["layer"][0]["encoding"]["y"]["scale"]["range"][1]
    crosses = {(row["series"], row["x"]): row for row in rows if row["lane"] is not None}
    assert set(crosses) == {("a", 0.1), ("c", 0.1)}
    assert len({row["lane"] for row in crosses.values()}) == 2 and all(row["lane"] < top for row in crosses.values())
    assert crosses["c", 0.1]["share"] == 1.0 and crosses["a", 0.1]["share"] == pytest.approx(1 / 3)
    calm = charts.against(rates()[:1], x="lr", failed="failed").to_dict()
    assert calm["layer"][0]["encoding"]["y"]["scale"]["range"][1] == 0


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.integers(1, 40))
def test_histogram_counts_every_value_once(values, bins):
    rows = [{"value": v} for v in [*values, float("nan"), None]]
    counted = charts.histogram(rows, bins=bins).to_dict()["datasets"]["rows"]
    assert sum(row["count"] for row in counted) == len(values)


@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(-1, 1), st.floats(-3, 3))
def test_contours_of_a_plane_lie_on_its_level_line(slope_x, slope_y, start, level):
    xs, ys = np.array([0.0, 0.3, 1.0, 1.7]), np.array([-1.0, 0.0, 0.4])
    grid = start + slope_x * xs[None, :] + slope_y * ys[:, None]
    for s in charts.contour_segments(list(xs), list(ys), grid, level):
        for x, y in ((s["x0"], s["y0"]), (s["x1"], s["y1"])):
            assert abs(start + slope_x * x + slope_y * y - level) < 1e-9


def test_contour_of_a_bowl_is_a_closed_circle():
    axis = list(np.linspace(-1.5, 1.5, 61))
    grid = np.add.outer(np.square(axis), np.square(axis))
    segments = charts.contour_segments(axis, axis, grid, 1.0)
    ends = [(s[f"x{k}"], s[f"y{k}"]) for s in segments for k in (0, 1)]
    assert max(abs(math.hypot(*end) - 1) for end in ends) < 1e-3
    rounded = [(round(x, 9), round(y, 9)) for x, y in ends]
    assert all(rounded.count(end) % 2 == 0 for end in rounded), "every end meets another"
    length = sum(math.hypot(s["x1"] - s["x0"], s["y1"] - s["y0"]) for s in segments)
    assert length == pytest.approx(2 * math.pi, rel=1e-3)


def test_saddle_is_cut_by_its_centre_and_holes_stay_open():
    saddle = np.array([[1.0, 0.0], [0.0, 1.0]])
    for level, corner_cut in ((0.4, (1.0, 0.0)), (0.6, (0.0, 0.0))):
        segments = charts.contour_segments([0, 1], [0, 1], saddle, level)
        middles = [((s["x0"] + s["x1"]) / 2, (s["y0"] + s["y1"]) / 2) for s in segments]
        assert len(segments) == 2
        assert min(math.dist(middle, corner_cut) for middle in middles) < 0.5
    assert charts.contour_segments([0, 1], [0, 1], np.array([[1.0, np.nan], [0.0, 1.0]]), 0.5) == []


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<svg")])
def test_save_writes_the_format_of_the_ending(ending, start, tmp_path):
    path = charts.save(charts.bars(losses(), x="step"), tmp_path / "new" / f"chart.{ending}")
    assert path.read_bytes().startswith(start)


def test_saved_page_cannot_be_ended_by_a_name(tmp_path):
    html = charts.save(charts.bars(losses((NASTY,)), x="step", series="series"), tmp_path / "c.html").read_text()
    assert NASTY not in html and html.count("</script>") == 3
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", html)


def test_save_refuses_other_endings(tmp_path):
    with pytest.raises(InputError, match=r"Got chart\.gif"):
        charts.save(charts.bars(losses(), x="step"), tmp_path / "chart.gif")


@needs_browser
def test_saved_page_hides_a_series_by_its_legend_and_tells_values_on_hover(tmp_path):
    page = charts.save(charts.curves(losses(("none", NASTY)), low="low", high="high"), tmp_path / "curves.html")
    found = ask(
        page,
        """
        const drawn = (path) => path.getAttribute("fill") !== "transparent";
        const points = () => all("g.mark-symbol.role-mark path").filter(drawn);
        const labels = () => all(".role-legend-label text");
        await until(() => labels().length === 2);
        found.before = points().length;
        hover(points()[2]);
        found.tooltip = (await until(() => document.querySelector("#vg-tooltip-element.visible")))?.textContent;
        labels()[1].dispatchEvent(new MouseEvent("click", { bubbles: true }));
        await pause(300);
        found.hidden = points().length;
        labels()[1].dispatchEvent(new MouseEvent("click", { bubbles: true }));
        await pause(300);
        found.again = points().length;
        found.requests = performance.getEntriesByType("resource").length;
        found.hacked = "hacked" in window;
        """,
    )
    assert found["before"] == found["again"] == 2 * found["hidden"] > 0
    assert found["tooltip"].startswith("seriesnonestep2value")
    assert found["requests"] == 0 and not found["hacked"]


def test_rooms_import_neither_torch_nor_pandas_nor_altair():
    heavy = ("torch", "pandas", "altair")
    code = f"import sys, normgauge.charts, normgauge.report; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_long_labels_are_told_to_their_end_and_wide_legends_take_rows():
    names = [
        f"study: log10 of iterations: method gd over method gdnp (data exponential, condition {n})" for n in (3, 10)
    ]
    rows = [{"series": name, "value": 1.0, "low": 0.0, "high": 2.0, "step": 0} for name in names]
    text = json.dumps(charts.intervals(rows).to_dict())
    assert "condition 3)" in text and "labelExpr" in text
    legend = charts.curves(rows).to_dict()["layer"][0]["encoding"]["color"]["legend"]
    assert legend["columns"] == 1
