"""The index of the papers: every name in it exists, every claim of the ledger is in it, no entry says nothing."""

import ast
import importlib
import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from normgauge.cli._app import app
from normgauge.errors import UnknownNameError
from normgauge.papers.court import ledger
from normgauge.papers.index import STATES, Entry, count_states, index_text, read_index
from normgauge.papers.shelf import PAPERS, studies

ROOT = Path(__file__).parents[2]
ENTRIES = read_index()
KINDS = {"definition", "equation", "theorem", "lemma", "proposition", "corollary", "remark", "observation", "fact"}
KINDS |= {"algorithm", "figure", "table", "experiment", "example", "recommendation", "claim", "conjecture", "question"}


def resolve(name):
    """Return the object a public name stands for."""
    parts = name.replace("ng.", "normgauge.", 1).split(".")
    assert not any(part.startswith("_") for part in parts), f"{name} is not public"
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@cache
def functions(file):
    return {node.name for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body if hasattr(node, "name")}


def test_every_public_name_imports():
    for name in sorted({name for entry in ENTRIES for name in entry.code}):
        assert name.startswith("ng.") and resolve(name) is not None, name


def test_every_test_exists():
    for test in sorted({test for entry in ENTRIES for test in entry.tests}):
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert not function or function in functions(file), test


def test_every_public_name_is_spoken_of_by_a_test_of_its_entry_or_by_a_judge():
    for entry in ENTRIES:
        keys = {PAPERS[id.partition("-")[0]].key for id in entry.claims}
        files = {ROOT / test.partition("::")[0] for test in entry.tests}
        files |= {file for key in keys for file in (ROOT / "src/normgauge/papers" / key / "claims").glob("*.py")}
        words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
        assert {name.rpartition(".")[2] for name in entry.code} <= words, f"{entry.paper} {entry.at}"


def test_every_claim_of_the_ledger_is_in_the_index_and_every_claim_named_is_in_the_ledger():
    ids = {claim.id for claim in ledger() if claim.paper in {entry.paper for entry in ENTRIES}}
    named = {id for entry in ENTRIES for id in entry.claims}
    assert ids - named == set() and named - {claim.id for claim in ledger()} == set()


def test_every_study_is_in_the_index_and_every_study_named_exists():
    assert {name for entry in ENTRIES for name in entry.studies} == set(studies())


def test_every_entry_says_what_it_is_and_where_or_why_not():
    assert {entry.paper for entry in ENTRIES} == {"S0", "S1", "S2", "S3", "S4"}
    for entry in ENTRIES:
        assert entry.kind in KINDS and entry.says, entry
        assert entry.code or entry.claims or entry.studies or entry.hole, f"{entry.at}: neither here nor a hole"
        assert bool(entry.tests) or not entry.code, f"{entry.paper} {entry.at}: code without a test"
    places = [(entry.paper, entry.at, entry.says) for entry in ENTRIES]
    assert len(places) == len(set(places))


def test_states_follow_from_what_is_there():
    full = Entry("S1", "here", "fact", "x", code=("ng.spectrum",))
    some = Entry("S1", "here", "fact", "x", claims=("S1-FC.1",), hole="a figure")
    none = Entry("S1", "here", "fact", "x", hole="no instrument")
    assert [entry.state for entry in (full, some, none)] == list(STATES)
    assert count_states([full, some, none]) == dict.fromkeys(STATES, 1)


def test_the_command_prints_the_index_in_eighty_columns_and_as_json():
    runner = CliRunner()
    done = runner.invoke(app, ["claims", "--index", "--paper", "S4", "--shipped", "--workers", "1"])
    assert done.exit_code == 0 and max(map(len, done.stdout.splitlines())) <= 80
    assert "S4-L1b holds with correction" in done.stdout and "norm-growth (small)" in done.stdout
    done = runner.invoke(app, ["claims", "--index", "--paper", "S4", "--shipped", "--workers", "1", "--json"])
    records = json.loads(done.stdout)
    assert len(records) == len(read_index("S4")) and {record["paper"] for record in records} == {"S4"}
    assert runner.invoke(app, ["claims", "--index", "--id", "S4-L1b"]).exit_code != 0


def test_no_line_of_any_index_is_wider_than_a_terminal():
    class Book:
        def __getitem__(self, id):
            return ledger(ids=["S4-L1b"])["S4-L1b"]

    assert max(map(len, index_text(ENTRIES, Book()).splitlines())) <= 80


def test_a_paper_without_an_index_is_refused():
    with pytest.raises(UnknownNameError):
        read_index("S9")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("generate_index", ROOT / "docs" / "generate_index.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_docs_page_has_every_entry_and_its_holes(script):
    text = script.PAGE.read_text(encoding="utf-8")
    for entry in ENTRIES:
        row = f"| {script._plain(entry.at)} ({entry.kind}) | {script._plain(entry.says)} |"
        assert row in text and script._plain(entry.hole) in text, f"{entry.paper} {entry.at}: run make generated"
    assert text.count("\n| ") == 3 + len(ENTRIES) + 2 * len({entry.paper for entry in ENTRIES}) - 1
    assert PAPERS["S0"].name in text


@pytest.mark.heavy
def test_the_docs_page_has_the_verdicts_of_today(script):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(ENTRIES, ledger().judge(workers=2))


NUMBERED = {
    "S0": [
        "Proposition 4.1",
        "Corollary 4.1.1",
        "Proposition 4.2",
        "Proposition 4.3",
        "Lemma 5.1",
        "Example 5.1",
        "eq (1)",
        "Table 1",
        "Experiment 1",
        "Experiment 2",
        "Experiment 3",
        "Experiment 4",
        "Fig 5.1",
        "Fig 8.1",
        "Fig 8.2",
    ],
    "S1": [
        "Definition 2.1",
        "Theorem 4.1",
        "Theorem 4.2",
        "Observation 4.3",
        "Theorem 4.4",
        "Lemma 4.5",
        "Algorithm 1",
        "Fact C.1",
        "Fact C.2",
        "Theorem C.1",
        *(f"Fig {k}" for k in range(1, 14)),
    ],
    "S2": [f"Lemma {k}" for k in (1, 2, 3, 5, 23)]
    + [f"Theorem {k}" for k in (6, 9, 12, 13, 15, 20)]
    + [f"Corollary {k}" for k in (10, 11, 14, 18, 19, 21, 22)]
    + ["Definition 4", "Definition 8", "Remark 7", "Remark 16", "Remark 17", "Fig 1", "Fig 2", "Fig 3"],
    "S3": [
        "Transformation",
        "Backpropagation",
        "Inference",
        "Smoothness",
        "Measure",
        "Decoupling",
        "Least-square",
        "GDNP",
    ],
    "S4": ["Lemma 1", "Lemma 2", "Lemma 3", "Fig 1", "Fig 2", "Fig 3", "Table 1", "Table 2"]
    + [f"eq ({k})" for k in range(10, 17)],
}


@pytest.mark.parametrize("paper", NUMBERED)
def test_everything_a_paper_numbers_is_in_its_index(paper):
    places = " ".join(f"{entry.at};" for entry in read_index(paper))
    assert [name for name in NUMBERED[paper] if not re.search(rf"{re.escape(name)}(?!\d)", places)] == []


def test_what_waits_for_a_study_is_a_hole():
    waiting = {claim.id for claim in ledger() if claim.kind == "empirical" and not claim.study}
    assert [entry.at for entry in ENTRIES if waiting & set(entry.claims) and not entry.hole] == []
