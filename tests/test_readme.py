"""What README and docs show runs: every `python` block (a `py` block is a sketch), and the first screen's commands."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    import torch

    from normgauge.measure.lipschitz import rules
    from normgauge.nn import registry

    monkeypatch.chdir(tmp_path)
    for room, name in ((registry, "_DECLARATIONS"), (rules, "_MODULES")):
        monkeypatch.setattr(room, name, dict(getattr(room, name)))  # what a page registers stays on the page
    torch.set_default_dtype(torch.float32)
    names = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


def test_the_readme_prints_a_real_number(capsys):
    names = {}
    exec(blocks(ROOT / "README.md", "python")[0], names)
    printed = capsys.readouterr().out
    top = names["ng"].spectrum(names["objective"], top=1).top[0]
    assert f"{float(top):.3g}"[:4] in printed


def test_the_two_commands_exist_and_install_everything_themselves():
    shown = [line for block in blocks(ROOT / "README.md", "console") for line in block.splitlines()]
    targets = [line.split()[1] for line in shown if line.startswith("make ")]
    assert targets == ["demo", "test"]
    if not shutil.which("make"):
        pytest.skip("no make on this machine")
    for target in targets:
        plan = subprocess.run(["make", "-n", "-B", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert "-m venv .venv" in plan and "torch==" in plan and "pip install" in plan


def test_every_verb_the_readme_names_exists():
    import sys

    words = set(re.findall(r"(?:^|`)normgauge ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M))
    assert "compare" in words
    for word in words:
        done = subprocess.run([sys.executable, "-m", "normgauge", word, "--help"], capture_output=True, timeout=120)
        assert done.returncode == 0, word


def test_pictures_and_links_exist():
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`]*`|\$[^$]+\$", "", page.read_text(encoding="utf-8"), flags=re.S)
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if "://" not in link and not link.startswith(
                "claims/"
            ):  # those are written at build: tests/docs/test_site.py
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_readme_has_the_ledgers_tally():
    tally = re.search(r"All together: .*", (ROOT / "docs/_generated/ledger.md").read_text(encoding="utf-8"))[0]
    counted = dict(reversed(pair) for pair in re.findall(r"(\d+) ([a-z ]+?)(?= \(|[,.)])", tally))
    said = (ROOT / "README.md").read_text(encoding="utf-8").partition("/generate_ledger.py -->")[2].partition("<!--")[0]
    sentences = {
        "false as stated": r"\*\*(\d+) of",
        "false": r": (\d+) are wrong",
        "missing hypothesis": r"(\d+) lack a hypothesis",
        "misprint": r"(\d+) are misprints",
        "holds": r"(\d+) hold,",
        "holds with correction": r"(\d+) hold once corrected",
        "empirical": r"(\d+) are about experiments",
    }
    for word, pattern in sentences.items():
        assert re.search(pattern, said)[1] == counted[word], f"{word}: run make generated"
