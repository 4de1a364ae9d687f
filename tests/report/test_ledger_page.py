"""The ledger as a page: every claim in full without script or network, found and filtered by a real browser."""

import json
import re
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from browser import ask, needs_browser
from normgauge.cli._claims import claims as command
from normgauge.papers.court import Claim, Evidence, Ledger, Verdict, ledger, typeset
from normgauge.report import ledger_page

IDS = ["S0-ginv", "S0-P4.3", "S0-sgd", "S1-FC.2", "S1-T4.1", "S1-T4.1id", "S1-noise", "S1-l1", "S4-L1c"]
NASTY = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\"'&"
# What a probe needs: the claims shown, and a moment for the page to follow its address.
SHOWN = "const shown = () => all('.claim').filter((card) => !card.hidden).map((card) => card.id);"
GO = SHOWN + "const go = async (to) => { location.hash = to; await pause(80); return shown(); };"


@pytest.fixture(scope="module")
def book():
    with pytest.MonkeyPatch.context() as patch:  # some claims of the page must wait for their study
        patch.setattr("normgauge.papers.court.sources.shipped", dict)
        judged = ledger(ids=IDS).judge()
    verdict = Verdict("empirical", "reproduced", "judged", (Evidence("gain", "margin", 0.3, 0.1, 5),), "all above 0")
    return Ledger(tuple(replace(claim, given=verdict) if claim.id == "S1-l1" else claim for claim in judged))


@pytest.fixture(scope="module")
def page(book, tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger") / "ledger.html"
    path.write_text(ledger_page(book), encoding="utf-8")
    return path


def article(page, id):
    return re.search(
        rf'<article [^>]*id="{re.escape(id)}".*?</article>', page.read_text(encoding="utf-8"), re.S
    ).group()


def test_every_claim_is_shown_in_full_without_script(page, book):
    for claim in book:
        shown = article(page, claim.id)
        wanted = [typeset(claim, part) for part in ("printed", "corrected")]
        wanted += [f"<code>{claim.command}</code>", claim.place, f'data-status="{claim.status}"', "<details open>"]
        for part in wanted:
            assert part in shown, claim.id
        assert len(re.findall('<tr><th scope="row"', shown)) == len(claim.evidence)
        assert " hidden" not in shown.partition(">")[0]
    assert "<math>" in article(page, "S1-T4.1") and "passes" in article(page, "S1-T4.1")
    assert "&plusmn; 0.1" in article(page, "S1-l1")


def test_the_counts_are_those_of_the_ledger_and_link_to_their_claims(page, book):
    table = re.search(r'<table class="counts">.*?</table>', page.read_text(encoding="utf-8"), re.S).group()
    for paper, words in book.counts().items():
        for word, number in words.items():
            status = "&amp;status=judged" if word == "empirical" else ""
            asks = "verdict=empirical&amp;status=not_run" if word == "not_run" else f"verdict={word}{status}"
            assert f'<a href="#paper={paper}&amp;{asks}">{number}</a>' in table
    assert f'<a href="#all">{len(book)}</a>' in table


def test_the_page_is_complete_and_asks_nobody(page):
    html = page.read_text(encoding="utf-8")
    assert "default-src 'none'" in html
    assert not re.search(r"https?:|src=|@import|url\(", html)
    assert "<noscript>" in html and "$" not in html.partition("<script>")[0]


def test_a_claim_that_another_names_is_a_link_where_it_is_on_the_page():
    assert '(<a href="#S0-polar">S0-polar</a>)' in ledger_page(ledger(ids=["S0-H1", "S0-polar"]))
    alone = ledger_page(ledger(ids=["S0-H1"]))
    assert "(S0-polar)" in alone and 'href="#S0-polar"' not in alone


def nasty():
    claim = Claim("S9-x", NASTY, NASTY, "theorem", corrected=NASTY, hypotheses=NASTY, note=NASTY, quotes=(NASTY,))
    verdict = Verdict(None, None, "error", (Evidence(NASTY, "printed", float("nan")),), NASTY)
    return replace(claim, given=verdict)


def test_text_is_never_markup():
    html = ledger_page([nasty()])
    assert "<img" not in html and html.count("<script>") == 1
    assert "judge failed" in html and 'class="is-fails"' in html


def test_no_field_of_stored_evidence_is_markup():
    """What a table in a user's folder says of role, instances and outcome is text too."""
    evidence = Evidence(NASTY, NASTY, 1.0, 2.0, NASTY)
    verdict = Verdict("empirical", "reproduced", "judged", (evidence,), NASTY, NASTY)
    object.__setattr__(verdict, "outcome", NASTY)  # its words are checked when it is made; the page must not rely on it
    object.__setattr__(verdict, "verdict", NASTY)
    claim = replace(nasty(), given=verdict, place=NASTY, cite=(NASTY,))
    html = ledger_page([claim])
    assert "<img" not in html and html.count("<script>") == 1 and "onerror=&#39;" in html


@needs_browser
def test_the_address_holds_the_view_and_the_search_finds(page, book):
    probe = (
        GO
        + """
      found.start = shown();
      found.text = document.getElementById("found").textContent;
      found.open = all(".claim > details[open]").length;
      const q = document.querySelector("[name=q]");
      const type = (value) => { q.value = value; q.dispatchEvent(new Event("input", { bubbles: true })); };
      type("GRADIENT  same weights"); found.words = shown(); found.address = location.hash;
      type("<g,yh>"); found.formula = shown();
      type("s1-t4.1"); found.asked = shown();
      type("nothing of the kind"); found.none = shown(); found.said = !document.getElementById("nothing").hidden;
      document.querySelector("[type=reset]").click(); await pause(80); found.cleared = shown().length;
      found.bare = location.hash;
      found.paper = await go("paper=S0");
      found.sections = all("#claims > section").filter((part) => !part.hidden).map((part) => part.id);
      found.verdict = await go("verdict=holds&paper=S1");
      found.status = await go("status=not_run");
      found.outcome = await go("outcome=reproduced");
      found.fault = await go("flaw=missing hypothesis");
      found.unknown = (await go("verdict=nonsense")).length;
      found.link = (await go("S1-T4.1")).length;
      const card = document.getElementById("S1-T4.1");
      found.wide = card.querySelector("details").open;
      found.near = Math.abs(card.getBoundingClientRect().top) < innerHeight;
      document.activeElement.blur();
      document.dispatchEvent(new KeyboardEvent("keydown", { key: "/", bubbles: true, cancelable: true }));
      found.focus = document.activeElement.name;
      document.getElementById("fold").click(); found.unfolded = all(".claim > details[open]").length;
      document.querySelector(".counts td a").click(); await pause(80); found.clicked = shown();
      found.requests = performance.getEntriesByType("resource").length;
    """
    )
    found = ask(page, probe, fragment="q=batchnorm&paper=S1")
    assert found["start"] == ["S1-noise", "S1-l1"] and found["text"] == f"2 of {len(IDS)} claims"
    assert found["open"] == 0
    assert found["words"] == ["S1-T4.1id"] and "same" in found["address"]
    assert found["formula"] == ["S1-T4.1"]
    assert found["asked"][0] == "S1-T4.1", "not a claim of another paper that names it"
    assert found["none"] == [] and found["said"]
    assert found["cleared"] == len(IDS) and found["bare"] == ""
    assert found["paper"] == ["S0-ginv", "S0-P4.3", "S0-sgd"] and found["sections"] == ["S0"]
    assert found["verdict"] == ["S1-FC.2"]
    assert found["status"] == ["S0-sgd", "S1-noise"]
    assert found["outcome"] == ["S1-l1"]
    assert found["fault"] == [claim.id for claim in book if claim.flaw == "missing hypothesis"]
    assert found["unknown"] == len(IDS)
    assert found["link"] == len(IDS) and found["wide"] and found["near"]
    assert found["focus"] == "q" and found["unfolded"] == len(IDS)
    assert found["clicked"] == ["S0-ginv"]
    assert found["requests"] == 0


@needs_browser
@pytest.mark.parametrize("width", [390, 1300])
def test_the_page_fits_its_window_and_both_themes(page, width):
    found = ask(
        page,
        """
      found.overflow = document.scrollingElement.scrollWidth - innerWidth;
      found.formula = document.querySelector("math").getBoundingClientRect().height;
      const paint = () => getComputedStyle(document.body).backgroundColor;
      found.paint = [paint()]; document.getElementById("theme").click(); found.paint.push(paint());
      found.controls = all("#find input, #find select, #find button").filter((node) => node.tabIndex >= 0).length;
      found.labels = all("#find input, #find select").every((node) => node.labels.length === 1);
    """,
        width=width,
    )
    assert found["overflow"] <= 0 and found["formula"] > 8
    assert found["paint"][0] != found["paint"][1]
    assert found["controls"] == 8 and found["labels"]


@needs_browser
def test_no_text_becomes_a_program(tmp_path):
    path = tmp_path / "nasty.html"
    path.write_text(ledger_page([nasty()]), encoding="utf-8")
    found = ask(path, "found.hacked = window.hacked ?? 0; found.ready = document.documentElement.dataset.ready;")
    assert found == {"hacked": 0, "ready": "yes"}


def run(*arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_writes_the_page(tmp_path):
    target = tmp_path / "new" / "ledger.html"
    done = run("--id", "S1-FC.2", "--html", str(target))
    assert done.exit_code == 0 and done.stdout.strip() == str(target)
    assert 'id="S1-FC.2"' in target.read_text(encoding="utf-8")
    done = run("--id", "S1-FC.2", "--html", str(target), "--json")
    assert [record["id"] for record in json.loads(done.stdout)] == ["S1-FC.2"]
