"""The report: one page from stored tables, complete, honest about holes, safe with any text, alive in a browser."""

import dataclasses
import json
import re
import sys
from types import ModuleType

import pytest

from browser import ask, needs_browser
from normgauge import charts
from normgauge.errors import StoreError
from normgauge.papers.court import Evidence, Ledger, Verdict, ledger
from normgauge.report import ReportTables, page, page_of_store
from normgauge.report._pictures import curve_rows, final_rows
from reference import report as twin
from report_cases import NORMS, RATES, realistic, small

NASTY = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\"'&"


@pytest.fixture(scope="module")
def tables():
    return realistic()


@pytest.fixture(scope="module")
def html(tables, tmp_path_factory):
    return page(tables, tmp_path_factory.mktemp("report") / "new" / "report.html")


def replaced(tables, **documents):
    return dataclasses.replace(tables, documents={**tables.documents, **documents})


def body_of(path):
    """What a reader sees without script: the page up to its data."""
    return path.read_text(encoding="utf-8").partition('<script type="application/json"')[0]


def data_of(path):
    return json.loads(re.search(r'id="report-data">(.*?)</script>', path.read_text(encoding="utf-8")).group(1))


def test_page_says_what_was_found_how_and_with_what(html, tables):
    seen = body_of(html)
    documents = tables.documents
    for words in (
        documents["study"]["title"],
        documents["study"]["question"],
        documents["answer"]["sentence"],
        documents["provenance"]["command"],
        documents["provenance"]["versions"]["torch"],
        "How Does Batch Normalization Help Optimization?",
        "momentum",
        *(column["title"] for column in documents["columns"]),
    ):
        assert words in seen
    assert seen.count("<tr data-ok=") == len(tables.runs)
    for run in tables.runs:
        assert run["sentence"] in seen


def test_page_needs_no_network(html):
    text = html.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", text)
    assert "@import" not in text and "default-src 'none'" in text
    assert text.count("</script>") == 3


@pytest.mark.parametrize("metric", ["train_loss", "weight_norm"])
def test_curve_rows_agree_with_loops(tables, metric):
    rows = curve_rows(tables, metric)
    expected = twin.curve(tables, metric)
    assert len(rows) == len(expected)
    for row in rows:
        mean, low, high, n = expected[row["arm"], row["setting"], row["step"]]
        assert (row["low"], row["high"], row["n"]) == pytest.approx((low, high, n))
        assert row["mean"] == pytest.approx(mean)


def test_final_rows_agree_with_loops_and_leave_failed_runs_out_of_the_mean(tables):
    rows = {(row["arm"], row["lr"]): row for row in final_rows(tables, "train_loss", "lr")}
    expected = twin.final(tables, "train_loss")
    assert set(rows) == set(expected)
    for key, (mean, failed, runs) in expected.items():
        assert (rows[key]["failed"], rows[key]["runs"]) == (failed, runs)
        assert rows[key]["mean"] == (None if mean is None else pytest.approx(mean))
    assert any(row["mean"] is None for row in rows.values()), "the case has settings where all runs diverged"


def test_shares_are_stored_as_fractions_and_shown_in_percent(tables):
    for shown, stored in zip(tables.comparison, tables.documents["comparison"], strict=True):
        for key in ("test_accuracy", "test_accuracy_low", "test_accuracy_high"):
            assert shown[key] == pytest.approx(100 * stored[key])
        assert shown["train_loss"] == stored["train_loss"]
    fractions = twin.curve(tables, "test_accuracy")
    for row in curve_rows(tables, "test_accuracy"):
        assert row["mean"] == pytest.approx(100 * fractions[row["arm"], row["setting"], row["step"]][0])


def test_what_rows_hold_beyond_their_columns_is_shown(html, tables):
    seen = body_of(html)
    assert ">stable up to<" in seen and seen.count("&gt;= ") == 2 * len(tables.documents["comparison"])


def test_a_store_with_other_runs_shows_those_of_the_study(tables, tmp_path, monkeypatch):
    some = [run["id"] for run in tables.runs[:4]]
    stored = ReportTables(tables.runs, tables.readings[:9], {"study": {**tables.documents["study"], "runs": some}})
    module = ModuleType("normgauge.store")
    module.Store = type("Store", (FakeStore,), {"tables": stored})
    monkeypatch.setitem(sys.modules, "normgauge.store", module)
    (tmp_path / "runs.sqlite").touch()
    assert body_of(page_of_store(tmp_path / "runs.sqlite", tmp_path / "p.html")).count("<tr data-ok=") == 4


def test_best_is_marked_only_where_the_data_decide(html, tmp_path):
    assert 'class="best"' in body_of(html)
    open_question = page(small(decided=False), tmp_path / "open.html")
    assert 'class="best"' not in body_of(open_question)
    assert "The data cannot tell" in body_of(open_question)


def test_best_follows_the_direction_of_the_column(tmp_path):
    tables = ReportTables(small().runs, [], small().documents)
    rows = [{"norm": "batch", "lr": 0.1, "n": 3, "m": 2.0}, {"norm": "layer", "lr": 0.1, "n": 3, "m": 1.0}]
    for better, value in (("higher", "2"), ("lower", "1"), (None, None)):
        column = {"name": "m", "title": "M", "unit": "", "better": better, "help": ""}
        seen = body_of(page(replaced(tables, comparison=rows, columns=[column]), tmp_path / "page.html"))
        assert re.findall(r'<b>([^<]*)</b> <span class="best"', seen) == ([] if value is None else [value])


def test_missing_numbers_are_dashes_and_never_nan(tmp_path):
    tables = small()
    rows = [dict(row) for row in tables.documents["comparison"]]
    rows[1] |= {"test_accuracy": float("nan"), "train_loss": None, "top_eigenvalue_low": float("-inf")}
    path = page(replaced(tables, comparison=rows), tmp_path / "page.html")
    assert body_of(path).count('class="num missing"') == 1 + 2
    assert data_of(path)["charts"]["intervals"]["spec"]["datasets"]["rows"][1]["x"] is None


@pytest.mark.parametrize("name", ["study", "comparison", "columns", "answer", "chosen", "provenance"])
def test_page_without_one_document_shows_the_rest(name, tmp_path):
    tables = small()
    documents = {key: body for key, body in tables.documents.items() if key != name}
    path = page(dataclasses.replace(tables, documents=documents), tmp_path / "page.html")
    kinds = [entry["kind"] for entry in data_of(path)["charts"].values()]
    assert "curve" in kinds and "final" in kinds and "runs-table" in body_of(path)


def test_page_of_nothing_and_of_failures_only(tables, tmp_path):
    empty = page(ReportTables([], [], {}), tmp_path / "empty.html")
    assert "No answer is stored yet" in body_of(empty) and data_of(empty)["charts"] == {}
    broken = [{**run, "status": "error", "sentence": "no disk"} for run in tables.runs]
    path = page(ReportTables(broken, [], {}), tmp_path / "broken.html")
    assert body_of(path).count("no disk") == len(broken)
    assert body_of(path).count('<tr data-ok="yes">') == 0


def test_without_a_study_the_knobs_are_found_in_the_runs(tables):
    bare = ReportTables(tables.runs, tables.readings)
    assert (bare.scientific, bare.nuisance, bare.arms) == (("norm",), ("lr",), NORMS)
    assert bare.settings == [f"lr {rate:g}" for rate in RATES] and bare.chosen == {}


def test_several_scientific_knobs_make_one_arm_each():
    runs = [
        {
            "id": f"{a}{b}{lr}",
            "status": "ok",
            "seconds": 1.0,
            "spec": {"norm": a, "act": b, "lr": lr, "wd": 0.1, "seed": 0},
        }
        for a in ("none", "batch")
        for b in ("relu", "tanh")
        for lr in (0.1, 1.0)
    ]
    study = {"scientific": {"norm": ["batch", "none"], "act": ["relu", "tanh"]}, "nuisance": {"lr": [0.1, 1.0]}}
    rows = [{"norm": "none", "act": "tanh", "lr": 1.0, "n": 1}]
    tables = ReportTables(runs, [], {"study": study, "comparison": rows})
    assert tables.arms == ["batch / relu", "batch / tanh", "none / relu", "none / tanh"]
    assert tables.chosen == {"none / tanh": "lr 1"}


def test_unknown_citations_are_named_not_dropped(tmp_path):
    tables = small()
    study = {**tables.documents["study"], "cite": ["santurkar2018", "nobody1900"]}
    seen = body_of(page(replaced(tables, study=study), tmp_path / "page.html"))
    assert "@inproceedings{santurkar2018" in seen and "Not in the bibliography: nobody1900" in seen


def hostile():
    """The same tables, with markup wherever a string can stand."""
    tables = small(steps=12)
    rename = {"batch": NASTY}
    runs = [
        {
            **run,
            "id": NASTY + run["id"],
            "sentence": NASTY,
            "spec": {**run["spec"], "norm": rename.get(n := run["spec"]["norm"], n)},
        }
        for run in tables.runs
    ]
    runs[0]["status"] = NASTY
    readings = [
        {**row, "run": NASTY + row["run"], "name": row["name"].replace("test_accuracy", NASTY)}
        for row in tables.readings
    ]
    documents = json.loads(json.dumps(tables.documents).replace('"batch"', json.dumps(NASTY)))
    documents["study"] |= {"title": NASTY, "question": NASTY, "cite": [NASTY], "fixed": {NASTY: NASTY}}
    documents["answer"]["sentence"] = NASTY
    documents["provenance"] = {"versions": {NASTY: NASTY}, "machine": {NASTY: [NASTY]}, "command": NASTY, NASTY: NASTY}
    documents["columns"][0] |= {"title": NASTY, "unit": NASTY, "help": NASTY}
    documents["comparison"][0]["note"] = NASTY
    return ReportTables(runs, readings, documents)


def test_no_text_becomes_markup(tmp_path):
    text = page(hostile(), tmp_path / "page.html").read_text(encoding="utf-8").replace(charts.javascript(), "")
    assert "<img" not in text and "window.hacked = 1</script>" not in text
    assert text.count("</script>") == 3
    assert "&lt;/script&gt;&lt;script&gt;" in text, "the text itself is still there"


class FakeStore:
    """The founder's store, as the report sees it."""

    tables = None

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def runs(self):
        return self.tables.runs

    def readings(self):
        return self.tables.readings

    def documents(self):
        return self.tables.documents


def test_page_of_a_store_is_the_page_of_its_tables(tables, html, tmp_path, monkeypatch):
    module = ModuleType("normgauge.store")
    module.Store = type("Store", (FakeStore,), {"tables": tables})
    monkeypatch.setitem(sys.modules, "normgauge.store", module)
    stored = tmp_path / "runs.sqlite"
    stored.touch()
    assert page_of_store(stored, tmp_path / "page.html").read_text() == html.read_text()


def test_page_of_a_real_store(tables, tmp_path):
    store = pytest.importorskip("normgauge.store", reason="the store is not in this branch yet")
    with store.Store(tmp_path / "runs.sqlite") as opened:
        for run in tables.runs[:6]:
            opened.put(run, [row for row in tables.readings if row["run"] == run["id"]])
        for name, body in tables.documents.items():
            opened.put_document(name, body)
    seen = body_of(page_of_store(tmp_path / "runs.sqlite", tmp_path / "page.html"))
    assert seen.count("<tr data-ok=") == 6 and tables.documents["answer"]["sentence"] in seen


def test_a_store_that_is_not_there_is_not_made(tmp_path, monkeypatch):
    module = ModuleType("normgauge.store")
    module.Store = FakeStore
    monkeypatch.setitem(sys.modules, "normgauge.store", module)
    with pytest.raises(StoreError, match="the store must exist"):
        page_of_store(tmp_path / "typo.sqlite", tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


READY = "await until(() => document.documentElement.dataset.ready);"


@needs_browser
def test_the_page_lives_in_a_browser_without_network(html, tables):
    found = ask(
        html,
        READY
        + """
        const number = (row, k) => row.cells[k].querySelector("b")?.textContent;
        const column = (k) => all("#comparison-table tbody tr").map((row) => number(row, k));
        const head = (k) => document.querySelector("#comparison-table").tHead.rows[0].cells[k];
        const charts = () => all("[data-chart]").filter((box) => !box.closest("figure").hidden);
        const rows = (name) => Number(document.querySelector(`[data-chart="${name}"]`).dataset.rows);
        found.drawn = charts().map((box) => all("svg.marks", box).length);
        found.requests = performance.getEntriesByType("resource").length;

        head(3).querySelector("button").click();
        found.descending = column(3); found.sorted = head(3).getAttribute("aria-sort");
        head(3).querySelector("button").click();
        found.ascending = column(3);
        head(5).querySelector("button").click();
        found.others = head(3).getAttribute("aria-sort");
        found.last = document.querySelector("#comparison-table tbody tr:last-child th").textContent;

        found.rows = rows("curve-0");
        const chip = document.querySelector('[data-arm="none"]');
        chip.click(); await pause(400);
        found.without = rows("curve-0"); found.pressed = chip.getAttribute("aria-pressed");
        found.colours = all('[data-chart="curve-0"] g.mark-line path').map((path) => path.getAttribute("stroke"));
        chip.click(); await pause(400);
        found.with = rows("curve-0");

        const choice = document.getElementById("setting");
        choice.value = "lr 1"; choice.dispatchEvent(new Event("change")); await pause(400);
        found.at_one = rows("curve-0");
        choice.value = ""; choice.dispatchEvent(new Event("change")); await pause(400);

        const points = all('[data-chart="curve-1"] g.mark-symbol path');
        hover(points[14]);
        found.tooltip = (await until(() => document.querySelector("#vg-tooltip-element.visible")))?.textContent;

        const metric = document.getElementById("metric");
        found.sweep = charts().filter((box) => box.dataset.chart.startsWith("final")).map((box) => box.dataset.chart);
        metric.selectedIndex = 1; metric.dispatchEvent(new Event("change")); await pause(400);
        found.swept = charts().filter((box) => box.dataset.chart.startsWith("final"));
        found.swept = found.swept.map((box) => [box.dataset.chart, all("svg.marks", box).length]);

        const shown = () => all("#runs-table tbody tr").filter((row) => !row.hidden).length;
        found.runs = [shown()];
        document.querySelector('[data-runs="bad"]').click(); found.runs.push(shown());
        document.querySelector('[data-runs="all"]').click(); found.runs.push(shown());

        const ink = () => getComputedStyle(document.body).backgroundColor;
        const line = () => document.querySelector('[data-chart="curve-0"] g.mark-line path').getAttribute("stroke");
        found.light = [ink(), line()];
        document.getElementById("theme").click(); await pause(600);
        found.dark = [ink(), line()];
        """,
    )
    metrics = {row["name"] for row in tables.readings}
    assert found["drawn"] == [1] * (1 + len(metrics) + 1), "intervals, one curve per metric, one sweep"
    assert found["requests"] == 0
    numbers = [float(value) for value in found["descending"]]
    assert found["sorted"] == "descending" and numbers == sorted(numbers, reverse=True)
    assert [float(value) for value in found["ascending"]] == sorted(numbers) != numbers
    assert found["others"] == "none" and found["last"] == "none", "the arm without a number is last"
    assert found["with"] == found["rows"] == 6 * 12 and found["without"] == 5 * 12 and found["pressed"] == "false"
    assert len(set(found["colours"])) == 5
    assert found["at_one"] == 12 + 5 * 7, "only batch lives through learning rate 1; the others end at step 7"
    assert re.match(r"arm\w+step\d+mean[\d.]+low[\d.]+high[\d.]+settinglr [\d.]+n3$", found["tooltip"])
    assert len(found["sweep"]) == 1 and found["swept"] == [["final-lr-1", 1]]
    bad = sum(run["status"] != "ok" for run in tables.runs)
    assert found["runs"] == [len(tables.runs), bad, len(tables.runs)]
    assert found["light"][0] != found["dark"][0] and found["light"][1] != found["dark"][1]


@needs_browser
@pytest.mark.parametrize("width", [500, 1400])
def test_the_page_never_scrolls_sideways(html, width):
    found = ask(html, READY + "found.size = [document.documentElement.scrollWidth, innerWidth];", width=width)
    assert found["size"][0] <= found["size"][1]


@needs_browser
def test_hostile_text_stays_text_in_a_browser(tmp_path):
    found = ask(
        page(hostile(), tmp_path / "page.html"),
        READY
        + """
        found.drawn = all("[data-chart] svg.marks").length;
        const chip = all("[data-arm]")[1];
        found.chip = chip.textContent;
        chip.click(); await pause(300); chip.click(); await pause(300);
        hover(all('[data-chart="curve-1"] g.mark-symbol path')[14]);
        found.tooltip = (await until(() => document.querySelector("#vg-tooltip-element.visible")))?.textContent;
        found.hacked = "hacked" in window;
        found.requests = performance.getEntriesByType("resource").length;
        """,
    )
    assert found["drawn"] >= 4 and found["chip"] == NASTY and found["tooltip"]
    assert not found["hacked"] and found["requests"] == 0


def judged_claims():
    verdict = Verdict("empirical", "confirmed", "judged", (Evidence("gain", "margin", 0.3, 0.1, 5),), "all above 0")
    book = Ledger((ledger(ids=["S1-l1"])["S1-l1"].settled(verdict),))
    return [*json.loads(book.json()), {"id": "S9-later", "verdict": "holds", "status": "judged"}]


def test_the_claims_a_study_decides_are_shown_and_unknown_ones_named(tables, tmp_path):
    path = page(replaced(tables, claims=judged_claims()), tmp_path / "report.html")
    seen = body_of(path)
    assert 'id="S1-l1"' in seen and "confirmed" in seen and "<math>" in seen and "&plusmn; 0.1" in seen
    assert "Not in the ledger of this version: S9-later" in seen
    assert 'id="claims"' not in body_of(page(tables, tmp_path / "plain.html"))


@needs_browser
def test_the_page_with_claims_still_sorts(tables, tmp_path):
    path = page(replaced(tables, claims=judged_claims()), tmp_path / "report.html")
    found = ask(
        path,
        """
      await until(() => document.documentElement.dataset.ready === "yes");
      const heading = document.querySelector("#runs-table th, #runs th");
      heading.querySelector("button").click();
      found.sort = heading.getAttribute("aria-sort");
      found.overflow = document.scrollingElement.scrollWidth - innerWidth;
    """,
    )
    assert found["sort"] in ("ascending", "descending") and found["overflow"] <= 0
