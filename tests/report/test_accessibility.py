"""Pages judged by axe-core in Chromium, light and dark: names, roles, keyboard, contrast; and a silent console."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from report_cases import realistic

from browser import ask, needs_browser
from normgauge.papers.court import ledger
from normgauge.report import ledger_page, page

EXPLORE = Path(__file__).parents[2] / "docs" / "explore"
LISTEN = """<script>window.said = []; onerror = (message) => { said.push(message); };
for (const kind of ["log", "info", "warn", "error"])
  console[kind] = (...words) => said.push(kind + " " + words.join(" "));
addEventListener("securitypolicyviolation", (event) => said.push(event.violatedDirective));</script>"""


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    """Return axe-core's text: from NORMGAUGE_AXE, else packed by npm."""
    if os.environ.get("NORMGAUGE_AXE"):
        return Path(os.environ["NORMGAUGE_AXE"]).read_text(encoding="utf-8")
    if not shutil.which("npm"):
        pytest.skip("no npm on PATH, and NORMGAUGE_AXE does not name axe.min.js")
    folder = tmp_path_factory.mktemp("axe")
    done = subprocess.run(["npm", "pack", "axe-core@4"], cwd=folder, capture_output=True, timeout=120, check=False)
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        pytest.skip("npm could not fetch axe-core")
    with tarfile.open(archives[0]) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    content = realistic()
    page(content.runs, content.document, folder / "report.html")
    (folder / "ledger.html").write_text(ledger_page(ledger(paper="S1").judge()), encoding="utf-8")
    text = (EXPLORE / "index.html").read_text(encoding="utf-8")
    for name in ("formulas.js", "data.js", "explore.js"):
        script = (EXPLORE / name).read_text(encoding="utf-8")
        text = text.replace(f'<script src="{name}"></script>', f"<script>{script}</script>")
    style = (EXPLORE / "explore.css").read_text(encoding="utf-8")
    text = text.replace('<link rel="stylesheet" href="explore.css">', f"<style>{style}</style>")
    (folder / "explore.html").write_text(text, encoding="utf-8")
    return folder


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["report", "ledger", "explore"])
def test_axe_finds_nothing_and_the_console_is_silent(pages, axe, name, theme, tmp_path):
    text = (pages / f"{name}.html").read_text(encoding="utf-8")
    listened = text.replace("<head>", f"<head>{LISTEN}", 1).replace("<html", f'<html data-theme="{theme}"', 1)
    copy = tmp_path / f"{name}.html"
    head, end, tail = listened.rpartition("</body>")
    copy.write_text(f"{head}<script>{axe}</script>{end}{tail}", encoding="utf-8")
    found = ask(
        copy,
        f"""await until(() => document.documentElement.dataset.ready || "{name}" !== "report");
        found.said = said;
        const result = await axe.run(document, {{ runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] }});
        const where = (node) => node.target + ": " + node.any.map((x) => x.message);
        found.faults = result.violations.map((v) => v.id + " at " + v.nodes.slice(0, 3).map(where).join(" | "));""",
    )
    assert found["faults"] == []
    assert found["said"] == []


def test_the_report_is_light_enough(pages):
    assert (pages / "report.html").stat().st_size < 1_500_000


@needs_browser
def test_six_columns_are_shown_and_all_can_be(pages):
    found = ask(
        pages / "report.html",
        """const shown = () => all('#comparison-table thead th').filter((th) => th.offsetParent !== null).length;
        found.first = shown();
        found.all = all('#comparison-table thead th').length;
        for (const box of all('#columns input')) if (!box.checked) box.click();
        found.then = shown();
        found.names = all('#columns label').map((label) => label.textContent);""",
    )
    assert found["first"] == 6 < found["all"] == found["then"]
    assert len(found["names"]) == found["all"] - 1 and all(found["names"])
