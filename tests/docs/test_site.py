"""The documentation as it is built: strict, every link and picture there, every public name with an anchor."""

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {
        page: page.read_text(encoding="utf-8") for page in sorted(folder.rglob("*.html")) if page.name != "404.html"
    }


def anchors(text):
    return {unescape(name) for name in re.findall(r'\b(?:id|name)="([^"]+)"', text)}


def test_every_link_anchor_and_picture_is_there_offline(site):
    known = {page: anchors(text) for page, text in site.items()}
    dead, outside = [], []
    for page, text in site.items():
        for kind, address in re.findall(r'<(?:a|img|iframe|script|link)\b[^>]*?\s(href|src)="([^"]*)"', text):
            address, _, fragment = unescape(address).partition("#")
            if re.match(r"[a-z]+:|//", address):
                outside += [address] if kind == "src" or address.endswith((".css", ".js")) else []
                continue
            target = (page.parent / unquote(address)).resolve() if address else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (fragment and target in known and unquote(fragment) not in known[target]):
                if fragment.startswith("__") or target.name == "ledger.html":
                    continue  # the theme's own, and the ledger's views
                dead.append(f"{page.name}: {address}#{fragment}")
    assert not dead, dead[:20]
    assert not outside, outside[:5]


def test_every_public_name_has_an_anchor(site):
    from types import ModuleType

    from reference_hook import public_names, resolve, written_entries

    there = set().union(*(anchors(text) for text in site.values()))
    rooms = (
        "",
        ".nn",
        ".testing",
        ".claims",
        ".charts",
        ".optim",
        ".surgery",
        ".symmetry",
        ".lab",
        ".doctor",
        ".report",
    )
    missing = []
    for room in rooms:
        for name in public_names(f"normgauge{room}"):
            found = resolve(f"normgauge{room}.{name}")
            home = written_entries().get(id(found), "")
            if isinstance(found, ModuleType) or {f"normgauge{room}.{name}", f"normgauge.{name}", home} & there:
                continue
            missing.append(f"normgauge{room}.{name}")
    assert not missing, missing


def test_what_a_function_returns_is_one_entry(site):
    section = re.compile(r'doc-section-title">Returns:</span>(.*?)</table>', flags=re.DOTALL)
    split = [page.name for page, text in site.items() for body in section.findall(text) if body.count("<tr class") > 1]
    assert not split, split


def test_readers_see_no_note_of_a_generator_and_every_picture_has_words(site):
    for page, text in site.items():
        seen = re.sub(r"<!--.*?-->|<script.*?</script>", "", text, flags=re.DOTALL)
        assert "do not edit" not in seen, page.name
        assert not re.findall(r"<img(?![^>]*\balt=)[^>]*>", seen), page.name
        for drawing in re.findall(r"<svg [^>]*role=.img.[^>]*>(.{8})", seen):
            assert drawing.startswith("<title>"), page.name


def test_the_search_index_is_light(site):
    index = min(site, key=lambda page: len(page.parts)).parent / "search" / "search_index.js"
    assert index.stat().st_size < 1_000_000, "every page loads it"


def test_every_claim_has_a_page_and_every_study_is_in_the_navigation(site):
    from normgauge.papers.court import ledger

    names = {page.name for page in site if page.parent.name == "claims"}
    assert {f"{claim.id}.html" for claim in ledger()} <= names
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (DOCS / "_generated" / "studies").glob("*.md"):
        assert f"_generated/studies/{page.name}\n" in navigation, page.name


def test_the_gallery_is_short_and_its_pictures_are_of_these_examples():
    from generate_gallery import EXAMPLES, OUT, digest

    cached = json.loads((OUT / "index.json").read_text(encoding="utf-8"))
    examples = sorted(EXAMPLES.glob("*.py"))
    assert len(examples) >= 20
    for path in examples:
        assert len(path.read_text(encoding="utf-8").splitlines()) < 25, path.name
        assert cached[path.stem]["digest"] == digest(path), f"{path.name} changed: python docs/generate_gallery.py"
        assert (OUT / f"{path.stem}.svg").stat().st_size < 100_000


@pytest.mark.parametrize("name", ["spectrum", "checkup", "operator-norm"])
def test_examples_of_the_gallery_run(name):
    from generate_gallery import EXAMPLES, run

    picture, meaning = run(EXAMPLES / f"{name}.py")
    assert picture.startswith("<svg") and meaning


def test_notebooks_are_their_sources_executed():
    from generate_notebooks import FOLDER, cells

    sources = sorted(FOLDER.glob("*.py"))
    assert len(sources) >= 3
    for path in sources:
        book = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
        wanted = list(cells(path.read_text(encoding="utf-8")))
        assert [cell["cell_type"] for cell in book["cells"]] == [kind for kind, _ in wanted]
        assert all(cell["source"].startswith(text) for cell, (_, text) in zip(book["cells"], wanted, strict=True))
        assert "colab" in book["cells"][0]["source"]
        assert any("text/html" in out.get("data", {}) for cell in book["cells"] for out in cell.get("outputs", []))
