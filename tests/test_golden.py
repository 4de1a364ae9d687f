"""Numbers of every instrument, verdict and table are those of `tests/golden/`; `write.py` there changes them."""

import inspect
import json
import math
from pathlib import Path

import pytest
import torch

import normgauge as ng
from golden.pins import FLOOR, Section, Subject, differences
from golden.subjects import SUBJECTS

SECTIONS = [(name, section) for name, subject in SUBJECTS.items() for section in subject]
HERE = [pair for pair in SECTIONS if not pair[1].startswith("study, ")]  # those run in test_studies.py


@pytest.mark.parametrize(("subject", "section"), HERE, ids=[" | ".join(pair) for pair in HERE])
def test_values_are_the_golden_ones(subject, section):
    told = SUBJECTS[subject].departures(section, SUBJECTS[subject][section].values())
    assert not told, "\n".join(told)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_no_section_is_stored_and_not_computed(subject):
    assert list(SUBJECTS[subject].stored()["sections"]) == list(SUBJECTS[subject])


def test_every_public_instrument_is_pinned():
    instruments = {
        name for name in ng.__all__ if inspect.isfunction(getattr(ng, name)) and name not in ("compare", "reproduce")
    }
    instruments -= set(ng.surgery.__all__) - {"prune_norms"}  # operations, whose number is their own proof
    pinned = " ".join(SUBJECTS["instruments"])
    rule = {"register_lipschitz_rule"}  # gives no number; its effect is in the doctest
    alone = {path.stem.removeprefix("test_") for path in Path(__file__).parent.rglob("test_*.py")}
    unpinned = sorted(name for name in instruments - rule if name not in pinned and name not in alone)
    assert unpinned == [], "pin a value in golden/, or give the instrument a test file of its own"


def test_every_optimizer_and_normalizer_is_pinned():
    stored = SUBJECTS["instruments"].stored()["sections"]
    made = [(name, getattr(ng.optim, name)) for name in ng.optim.__all__]
    optimizers = {name for name, kind in made if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)}
    assert {key.partition(".")[0] for key in stored["optim, five steps"]} == optimizers
    layers = {key.partition(".")[0] for key in [*stored["nn.registry"], *stored["nn.registry, noisy"]]}
    assert layers == set(ng.nn.registry.names())


def strict(key):
    return 1e-6


STORED = {"loss": 2.0, "count": 3, "zero": 0.0, "word": "ok", "limit": "inf", "none": None}


def test_equal_values_and_values_within_the_tolerance_agree():
    assert differences(STORED, STORED, lambda key: 0.0) == []
    assert differences({**STORED, "loss": 2.0 * (1 + 0.9e-6), "zero": FLOOR / 2}, STORED, strict) == []


@pytest.mark.parametrize(
    "change",
    [
        {"loss": 2.0 * (1 + 1.1e-6)},
        {"loss": "nan"},
        {"loss": 2},
        {"count": 4},
        {"count": 3.0},
        {"count": True},
        {"zero": 2 * FLOOR},
        {"word": "skipped"},
        {"limit": "-inf"},
        {"none": 0.0},
        {"new": 1.0},
    ],
)
def test_a_value_that_is_off_or_new_is_told(change):
    told = differences({**STORED, **change}, STORED, strict)
    assert len(told) == 1 and told[0].startswith(next(iter(change)))


def test_a_value_that_is_missing_is_told():
    assert differences({}, {"loss": 2.0}, strict) == ["loss: stored, not computed"]


def test_another_torch_widens_only_what_hangs_on_its_random_streams():
    drawn, exact = Section("drawn", dict, 1e-6, elsewhere=0.3), Section("exact", dict, 1e-6)
    assert drawn.tolerance("loss", "0.0") == 0.3 and exact.tolerance("loss", "0.0") == 1e-6
    trained = {"loss": 2.0, "outcome": "reproduced"}
    assert differences({"loss": 9.0, "outcome": None}, trained, lambda key: math.inf) == []
    assert len(differences({"loss": 9.0}, trained, lambda key: math.inf)) == 1


def test_a_loose_pattern_widens_only_its_keys():
    section = Section("study", dict, 1e-4, loose=("accuracy", 0.1))
    assert section.tolerance("arms.batch.accuracy") == 0.1 and section.tolerance("arms.batch.loss") == 1e-4


def test_what_is_written_is_what_is_compared(tmp_path):
    subject = Subject("subject")
    subject.path = tmp_path / "subject.json"

    @subject.pin("section")
    def _():
        return {"third": 1 / 3, "nested": [{"limit": float("inf")}, 1], "nan": float("nan")}

    values = subject["section"].values()
    subject.write({"section": values})
    assert subject.departures("section", values) == []
    assert "NaN" not in json.dumps(values)
    told = subject.departures("section", {**values, "third": 0.3334})
    assert len(told) == 2 and told[0].startswith("third: 0.3334, stored 0.3333") and "write.py" in told[1]
