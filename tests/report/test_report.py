"""The report: one page from stored runs, complete, honest about holes, safe with any text, alive in a browser."""

import dataclasses
import json
import math
import re

import pytest
from report_cases import NORMS, RATES, realistic, replaced, small

from browser import ask, needs_browser
from normgauge import charts
from normgauge.documents import Arm, Metric, from_plain
from normgauge.errors import StoreError
from normgauge.records import Provenance, Reading, Run, plain
from normgauge.report import page, page_of_store
from normgauge.report._content import PageContent, curve_rows, final_rows
from normgauge.stats import Interval
from normgauge.store import Store, spec_id
from reference import report as twin

NASTY = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\"'&"


@pytest.fixture(scope="module")
def content():
    return realistic()


def drawn(content, path):
    return page(content.runs, content.document, path)


@pytest.fixture(scope="module")
def html(content, tmp_path_factory):
    return drawn(content, tmp_path_factory.mktemp("report") / "new" / "report.html")


def body_of(path):
    """What a reader sees without script: the page up to its data."""
    return path.read_text(encoding="utf-8").partition('<script type="application/json"')[0]


def data_of(path):
    return json.loads(re.search(r'id="report-data">(.*?)</script>', path.read_text(encoding="utf-8")).group(1))


def test_page_says_what_was_found_how_and_with_what(html, content):
    seen = body_of(html)
    document = content.document
    for words in (
        document.question.title,
        document.question.question,
        document.answer,
        document.command,
        document.finished,
        document.provenance.versions["torch"],
        "How Does Batch Normalization Help Optimization?",
        "momentum",
        "norm none: never reached loss 0.5.",
        *(metric.title for metric in document.metrics),
    ):
        assert words in seen
    assert seen.count("<tr data-ok=") == len(content.runs)
    for run in content.runs:
        assert run.sentence in seen and spec_id(run.spec) in seen


def test_page_needs_no_network(html):
    text = html.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", text)
    assert "@import" not in text and "default-src 'none'" in text
    assert text.count("</script>") == 3


@pytest.mark.parametrize("metric", ["train_loss", "weight_norm"])
def test_curve_rows_agree_with_loops(content, metric):
    rows = curve_rows(content, metric)
    expected = twin.curve(content.runs, metric)
    assert len(rows) == len(expected)
    for row in rows:
        mean, low, high, n = expected[row["arm"], row["setting"], row["step"]]
        assert (row["low"], row["high"], row["n"]) == pytest.approx((low, high, n))
        assert row["mean"] == pytest.approx(mean)


def test_final_rows_agree_with_loops_and_leave_failed_runs_out_of_the_mean(content):
    rows = {(row["arm"], row["lr"]): row for row in final_rows(content, "train_loss", "lr")}
    expected = twin.final(content.runs, "train_loss")
    assert set(rows) == set(expected)
    for key, (mean, failed, runs) in expected.items():
        assert (rows[key]["failed"], rows[key]["runs"]) == (failed, runs)
        assert rows[key]["mean"] == (None if mean is None else pytest.approx(mean))
    assert any(row["mean"] is None for row in rows.values()), "the case has settings where all runs diverged"


def test_shares_are_stored_as_fractions_and_shown_in_percent(content, html):
    for arm in content.document.arms:
        value = arm.values["test_accuracy"]
        words = f"<b>{100 * value.mean:.1f}</b>"
        assert words in body_of(html) and f"{100 * value.low:.1f} &ndash; {100 * value.high:.1f}" in body_of(html)
    fractions = twin.curve(content.runs, "test_accuracy")
    for row in curve_rows(content, "test_accuracy"):
        assert row["mean"] == pytest.approx(100 * fractions[row["arm"], row["setting"], row["step"]][0])


def test_the_largest_stable_rate_of_every_arm_is_shown(html, content):
    seen = body_of(html)
    assert ">stable up to<" in seen and seen.count("&gt;= ") == 2 * len(content.document.arms)


def test_best_is_marked_only_where_the_data_decide(html, tmp_path):
    assert 'class="best"' in body_of(html)
    open_question = drawn(small(decided=False), tmp_path / "open.html")
    assert 'class="best"' not in body_of(open_question)
    assert "The data cannot tell" in body_of(open_question)


def test_best_follows_the_direction_of_the_metric(tmp_path):
    arms = tuple(
        Arm({"norm": norm}, {"lr": 0.1}, 3, {"m": Interval(value, math.nan, math.nan, 3)})
        for norm, value in (("batch", 2.0), ("layer", 1.0))
    )
    for better, value in (("higher", "2"), ("lower", "1"), (None, None)):
        case = replaced(small(), arms=arms, metrics=(Metric("m", "M", better=better),))
        seen = body_of(drawn(case, tmp_path / "page.html"))
        assert re.findall(r'<b>([^<]*)</b> <span class="best"', seen) == ([] if value is None else [value])


def test_missing_numbers_are_dashes_and_never_nan(tmp_path):
    content = small()
    first, second, *others = content.document.arms
    values = dict(second.values)
    del values["test_accuracy"], values["train_loss"]
    values["top_eigenvalue"] = dataclasses.replace(values["top_eigenvalue"], low=-math.inf)
    case = replaced(content, arms=(first, dataclasses.replace(second, values=values), *others))
    path = drawn(case, tmp_path / "page.html")
    assert body_of(path).count('class="num missing"') == 1 + 2
    assert data_of(path)["charts"]["intervals"]["spec"]["datasets"]["rows"][1]["x"] is None


def test_a_store_without_a_document_gets_a_page_of_its_runs(content, tmp_path):
    with Store(tmp_path / "runs.sqlite") as store:
        for run in content.runs:
            store.put(run)
    path = page_of_store(tmp_path / "runs.sqlite", tmp_path / "page.html")
    kinds = [entry["kind"] for entry in data_of(path)["charts"].values()]
    assert "curve" in kinds and "final" in kinds and body_of(path).count("<tr data-ok=") == len(content.runs)
    assert "No answer is stored yet: run the same command again" in body_of(path)


def test_the_page_of_a_shard_says_how_to_get_an_answer(content, tmp_path):
    seen = body_of(drawn(replaced(content, arms=(), answer="", runs=()), tmp_path / "page.html"))
    assert "No answer is stored yet: join the shards by normgauge merge, then run the same command" in seen
    assert content.document.question.title in seen and 'id="comparison-table"' not in seen


def test_page_of_nothing_and_of_failures_only(content, tmp_path):
    empty = page([], None, tmp_path / "empty.html")
    assert "No answer is stored yet" in body_of(empty) and data_of(empty)["charts"] == {}
    broken = [Run(run.spec, "error", "no disk") for run in content.runs]
    path = page(broken, None, tmp_path / "broken.html")
    assert body_of(path).count("no disk") == len(broken)
    assert body_of(path).count('<tr data-ok="yes">') == 0


def test_without_a_document_the_knobs_are_taken_from_the_runs(content):
    bare = PageContent(content.runs)
    assert (bare.scientific, bare.nuisance, bare.arms) == (("norm",), ("lr",), NORMS)
    assert bare.settings == [f"lr {rate:g}" for rate in RATES] and bare.chosen_settings == {}


def test_several_scientific_knobs_make_one_arm_each(content):
    runs = [
        Run({"norm": a, "act": b, "lr": lr, "wd": 0.1, "seed": 0})
        for a in ("none", "batch")
        for b in ("relu", "tanh")
        for lr in (0.1, 1.0)
    ]
    scientific = {"norm": ("batch", "none"), "act": ("relu", "tanh")}
    question = dataclasses.replace(content.document.question, scientific=scientific)
    arms = (Arm({"norm": "none", "act": "tanh"}, {"lr": 1.0}, 1, {}),)
    case = PageContent(runs, dataclasses.replace(content.document, question=question, arms=arms))
    assert case.arms == ["batch / relu", "batch / tanh", "none / relu", "none / tanh"]
    assert case.chosen_settings == {"none / tanh": {"lr": 1.0}}


def test_unknown_citations_are_named_not_dropped(tmp_path):
    content = small()
    question = dataclasses.replace(content.document.question, cite=("santurkar2018", "nobody1900"))
    seen = body_of(drawn(replaced(content, question=question), tmp_path / "page.html"))
    assert "@inproceedings{santurkar2018" in seen and "Not in the bibliography: nobody1900" in seen


def hostile():
    """The same runs and document, with markup wherever a string can stand."""
    content = small(steps=12)
    runs = [
        Run(
            {**run.spec, "norm": NASTY if run.spec["norm"] == "batch" else run.spec["norm"]},
            run.status,
            NASTY,
            [
                Reading(NASTY if r.name == "test_accuracy" else r.name, r.value, r.kind, status=r.status, step=r.step)
                for r in run.readings
            ],
        )
        for run in content.runs
    ]
    runs[0].status = NASTY
    text = json.dumps(plain(content.document)).replace('"batch"', json.dumps(NASTY))
    document = from_plain(type(content.document), json.loads(text))
    named = {"title": NASTY, "question": NASTY, "cite": (NASTY,), "fixed": {NASTY: NASTY}}
    arm = dataclasses.replace(document.arms[0], remarks=(NASTY,), stable_up_to=NASTY)
    metric = dataclasses.replace(document.metrics[0], title=NASTY, unit=NASTY, help=NASTY)
    changed = dataclasses.replace(
        document,
        question=dataclasses.replace(document.question, **named),
        metrics=(metric, *document.metrics[1:]),
        arms=(arm, *document.arms[1:]),
        answer=NASTY,
        provenance=Provenance(NASTY, {NASTY: NASTY}, {NASTY: NASTY}, NASTY),
        command=NASTY,
        finished=NASTY,
    )
    return PageContent(runs, changed)


def test_no_text_becomes_markup(tmp_path):
    text = drawn(hostile(), tmp_path / "page.html").read_text(encoding="utf-8").replace(charts.javascript(), "")
    assert "<img" not in text and "window.hacked = 1</script>" not in text
    assert text.count("</script>") == 3
    assert "&lt;/script&gt;&lt;script&gt;" in text, "the text itself is still there"


@pytest.mark.parametrize("name", ["a\u2028b", "a\u2029", "two\nlines", "nul\0", "quote'\"", "back\\slash", "\r", " "])
def test_names_that_cannot_be_seen_do_not_kill_the_charts(tmp_path, name):
    content = small()
    runs = [
        Run(
            {**run.spec, "norm": name if run.spec["norm"] == "batch" else run.spec["norm"]},
            run.status,
            "",
            run.readings,
        )
        for run in content.runs
    ]
    encoded = json.dumps(plain(content.document)).replace('"batch"', json.dumps(name))
    case = PageContent(runs, from_plain(type(content.document), json.loads(encoded)))
    data = data_of(drawn(case, tmp_path / "page.html"))
    converter = pytest.importorskip("vl_convert")
    for entry in data["charts"].values():
        assert "<path" in converter.vegalite_to_svg(entry["spec"])
    shown = {row["series"] for row in data["charts"]["intervals"]["spec"]["datasets"]["rows"]}
    assert shown == set(data["chosen"]) and all(arm.isprintable() for arm in shown)


def test_the_page_makes_no_code_of_strings_and_vega_has_nothing_to_warn_of(html):
    page = html.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "unsafe-eval" not in policy and "ast: true" in page
    assert "expressionInterpreter" in charts.javascript(), "the interpreter is part of what Vega-Embed brings"

    def scales(part):
        if isinstance(part, dict):
            yield from [part["scale"]] if isinstance(part.get("scale"), dict) else []
            part = list(part.values())
        for item in part if isinstance(part, list) else ():
            yield from scales(item)

    drawn_scales = list(scales(data_of(html)["charts"]))
    assert any(scale.get("type") == "log" for scale in drawn_scales)
    assert not any(scale.get("type") == "log" and "zero" in scale for scale in drawn_scales)


def test_page_of_a_store_is_the_page_of_its_runs(content, html, tmp_path):
    other = Run({"norm": "batch", "lr": 7.0, "seed": 0})
    with Store(tmp_path / "runs.sqlite") as store:
        for run in [other, *content.runs]:
            store.put(run)
        store.put_document(content.document)
    stored = page_of_store(tmp_path / "runs.sqlite", tmp_path / "page.html")
    first, second = (re.sub(r"view_\d+", "view", page.read_text()) for page in (stored, html))  # as altair numbers them
    assert first == second, "runs of other settings are left out"


def test_a_store_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(StoreError, match="the store must exist"):
        page_of_store(tmp_path / "typo.sqlite", tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


READY = "await until(() => document.documentElement.dataset.ready);"


@needs_browser
def test_the_page_lives_in_a_browser_without_network(html, content):
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
    metrics = set(content.values)
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
    bad = sum(not run.ok for run in content.runs)
    assert found["runs"] == [len(content.runs), bad, len(content.runs)]
    assert found["light"][0] != found["dark"][0] and found["light"][1] != found["dark"][1]


@needs_browser
@pytest.mark.parametrize("width", [500, 1400])
def test_the_page_never_scrolls_sideways(html, width):
    found = ask(html, READY + "found.size = [document.documentElement.scrollWidth, innerWidth];", width=width)
    assert found["size"][0] <= found["size"][1]


@needs_browser
def test_hostile_text_stays_text_in_a_browser(tmp_path):
    found = ask(
        drawn(hostile(), tmp_path / "page.html"),
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


def test_a_study_is_escaped_and_answers_first():
    from normgauge.papers.court import shipped
    from normgauge.papers.studies import find
    from normgauge.report._study import study_html

    document = shipped()["smoothness"].document
    hostile = dataclasses.replace(document, study=NASTY, remarks=(NASTY,))
    text = study_html(find("smoothness").about("small"), hostile, [])
    assert NASTY not in text and "&lt;/script&gt;" in text and "<script" not in text
    assert text.index('class="badge badge-reproduced"') < text.index("What the paper found") < text.index("Protocol")


def test_every_accuracy_is_in_per_cent():
    readings = [Reading("validation_accuracy", share, step=step) for step, share in enumerate((0.5, 0.75))]
    content = PageContent([Run({"norm": "batch", "seed": 0}, readings=readings)])
    assert content.metrics["validation_accuracy"].unit == "%"
    assert [row["mean"] for row in curve_rows(content, "validation_accuracy")] == [50, 75]
