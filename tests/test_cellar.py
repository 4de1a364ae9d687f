"""Errors, records, references and random states: the words and rules everything else relies on."""

import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normgauge.errors import InputError, MissingExtraError, StoreError, UnknownNameError, explain, require, unknown_name
from normgauge.records import Reading, format_number, format_table
from normgauge.references import bibliography, cite
from normgauge.results import Result
from normgauge.rng import preserved_rng, seed_everything

SOURCE = Path(__file__).parents[1] / "src" / "normgauge"


def test_messages_have_one_form():
    assert explain("thing", "must be red.", "blue", "Paint it.") == "thing: must be red. Got blue. Paint it."
    assert "Did you mean 'batch'?" in str(unknown_name("norm", "bach", ["batch", "layer"]))
    assert "Did you mean" not in str(unknown_name("norm", "zzz", ["batch"]))
    with pytest.raises(MissingExtraError, match=r"Objective: .*'no_such_thing'.*pip install 'normgauge\[lab\]'"):
        require("no_such_thing", "lab", "Objective")


def test_readings_speak_a_fixed_vocabulary():
    assert str(Reading("x", 1.0, "upper", 0.5, "nonconverged", "too slow")) == (
        "x = 1 +- 0.5 (upper) [nonconverged: too slow]"
    )
    with pytest.raises(InputError, match="kind is one of exact, upper, lower, unbiased, estimate. Got 'about'"):
        Reading("x", 1.0, kind="about")
    with pytest.raises(InputError, match="status is one of"):
        Reading("x", 1.0, status="fine")


def test_tables_align_and_have_holes():
    text = format_table([{"name": "a", "value": 1.5}, {"name": "bb", "value": None}], title="T", footer="F")
    assert text.splitlines()[0] == "T" and text.splitlines()[-1] == "F"
    assert "1.5" in text and " -" in text
    assert format_number(float("nan")) == "-" and format_number(False) == "no"


def test_a_result_must_say_its_rows():
    with pytest.raises(NotImplementedError):
        print(Result())


def test_global_random_states_come_back():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with pytest.raises(ValueError), preserved_rng():
        seed_everything(7)
        torch.rand(1), np.random.rand(), random.random()
        raise ValueError
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()


def test_every_citation_exists_and_every_entry_is_cited():
    known = bibliography()
    bib = (SOURCE / "references.bib").read_text()
    assert len(known) == len(re.findall(r"^@", bib, flags=re.M)), "a key stands twice"
    sources = [p for p in SOURCE.rglob("*.py") if "doctor" not in p.parts]  # whose checks name threads, not texts
    text = "\n".join(p.read_text() for p in (*sources, *SOURCE.rglob("claims.toml")))
    named = {key for line in re.findall(r"References: (.+?)\.?$", text, flags=re.M) for key in re.split(r",\s*", line)}
    assert named <= set(known), f"unknown keys: {named - set(known)}"
    papers = {"akbar2025", "santurkar2018", "than2025", "batchnorm_article", "sun2020"}  # the five the ledger is about
    assert not [key for key in known if key not in papers and not re.search(rf"\b{key}\b", text)]
    assert "@inproceedings{santurkar2018," in cite("santurkar2018", "ioffe2015")
    with pytest.raises(UnknownNameError, match="unknown reference 'santurkar'"):
        cite("santurkar")


@pytest.mark.parametrize("width", [80, 40])
def test_tables_keep_the_width_and_lose_no_word(monkeypatch, width):
    sentence = "Does batch normalization widen the range of rates at which a network trains?"
    rows = [
        {"layer": f"encoder.layer.{k}", "question": sentence, **{f"number {i}": 1e-5 / 3 for i in range(9)}}
        for k in (0, 1)
    ]
    wide = format_table(rows, title=sentence * 2, footer=sentence * 2)
    assert max(map(len, wide.splitlines())) > 150, "what is no terminal gets whole lines"
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = format_table(rows, title=sentence * 2, footer=sentence * 2)
    assert max(map(len, narrow.splitlines())) <= width
    assert set(narrow.split()) - {word for word in narrow.split() if set(word) == {"─"}} == {
        word for word in wide.split() if set(word) != {"─"}
    }, "no word is broken or lost"
    assert narrow.count("encoder.layer.0") > 1, "columns that do not fit stand below, beside the first one again"
    assert "x" * 100 in format_table([{"name": "x" * 100, "value": 1.0}]), "a long word is not cut"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.text("abc", min_size=1, max_size=18), min_size=1, max_size=6), min_size=4, max_size=12),
    st.integers(60, 130),
)
def test_no_letter_is_lost_at_the_edge_of_a_terminal(words, width):
    names = ("study", "question", "paper", "place")
    rows = [dict(zip(names, map(" ".join, words[k : k + 4]), strict=True)) for k in range(0, len(words) - 3, 4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        text = format_table(rows)
    assert max(map(len, text.splitlines())) <= width
    # a word in the first column is repeated in every block of columns
    for row in rows:
        for word in " ".join(row.values()).split():
            assert word in text.split()


def test_an_error_is_its_sentence_or_its_four_parts():
    for kind in (InputError, StoreError, MissingExtraError):
        error = kind("thing", "must be red", "blue", "Paint it")
        assert str(error) == explain("thing", "must be red", "blue", "Paint it")
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert str(kind("one sentence.")) == "one sentence."
