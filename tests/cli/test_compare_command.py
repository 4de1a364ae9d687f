"""`compare` from the command line: a race with a recipe, the live page, the tutorial, one store against another."""

import json
import re
import shlex
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
import torch

from normgauge.cli import main
from normgauge.cli._compare import _arm, _live_page
from normgauge.cli._watch import serve_live
from normgauge.lab.compare import comparison_study, conclude
from normgauge.records import Run
from normgauge.report import changes_between, page_of_store
from normgauge.stats import welch_difference
from normgauge.store import Store

DOCS = Path(__file__).parents[2] / "docs" / "lab"


@pytest.fixture(autouse=True)
def single_precision(double_precision):
    torch.set_default_dtype(torch.float32)


def run(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["normgauge", *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


def tutorial(folder):
    """The tutorial's file written into a folder, and its command as words."""
    page = (DOCS / "unet.md").read_text(encoding="utf-8")
    (folder / "mynet.py").write_text(re.search(r'```python title="mynet.py"\n(.*?)```', page, re.DOTALL)[1])
    sys.modules.pop("mynet", None)
    return shlex.split(re.search(r"```bash\nnormgauge (.*?)```", page, re.DOTALL)[1])


def test_the_tutorial_runs_end_to_end(tmp_path, monkeypatch, capsys):
    short = ["--steps", "6", "--seeds", "4", "--rates", "0.003,0.01", "--jobs", "1", "--json"]
    code, out, err = run([*tutorial(tmp_path), *short], tmp_path, monkeypatch, capsys)
    assert code == 0, err
    answer = json.loads(out)
    assert {row["norm"] for row in answer["rows"]} == {"as built", "group", "layer", "none"}
    assert answer["answer"] and all(row["test_metric"] and row["step_time"] for row in answer["rows"])
    assert "test psnr" in (tmp_path / "unet" / "report.html").read_text(encoding="utf-8").lower()


@pytest.mark.heavy
def test_the_tutorial_as_it_is_printed_recommends_a_normalizer_and_a_rate(tmp_path, monkeypatch, capsys):
    code, out, err = run([*tutorial(tmp_path), "--json"], tmp_path, monkeypatch, capsys)
    answer = json.loads(out)["answer"]
    assert code == 0 and re.search(r"[Uu]se (as built|group|layer|none) at learning rate [\d.]+", answer), (answer, err)


def test_arms_are_read_as_what_they_are():
    assert _arm("clip=none,1,0.5") == ("clip", [None, 1, 0.5])
    assert _arm("place=pre,post") == ("place", ["pre", "post"]) and _arm("augment=true") == ("augment", [True])


def test_the_live_page_is_served_on_loopback_and_loads_itself_anew(tmp_path):
    store = tmp_path / "runs.sqlite"
    said = []
    with serve_live(lambda: _live_page(store), said.append):
        address = said[0].split()[0]
        assert address.startswith("http://127.0.0.1:")
        assert b"No run has finished yet" in urllib.request.urlopen(address).read()
        with Store(store) as opened:
            opened.put(Run({"norm": "batch", "lr": 0.1, "seed": 0}))
        page = urllib.request.urlopen(address).read().decode()
        assert '<meta http-equiv="refresh"' in page and "batch" in page
    assert all(thread.name != "serve_forever" for thread in threading.enumerate())
    assert 'http-equiv="refresh"' not in page_of_store(store, tmp_path / "a.html").read_text(encoding="utf-8")


def test_a_race_has_no_shards(tmp_path, monkeypatch, capsys):
    code, _, err = run(["compare", "--shard", "1/2", "--minutes", "1"], tmp_path, monkeypatch, capsys)
    assert code == 2 and "has no shards" in err


def stored(folder, accuracies, steps=3, seeds=range(4)):
    """A store of made-up runs: norm -> accuracies."""
    study = comparison_study(
        model="mlp", norms=list(accuracies), rates=[0.1], seeds=len(seeds), steps=steps, size="small"
    )
    specs = [{**study.fixed, "norm": norm, "lr": 0.1, "seed": seed} for norm in accuracies for seed in seeds]
    with Store(folder / "runs.sqlite") as store:
        for spec in specs:
            run = Run(spec)
            value = accuracies[spec["norm"]][list(seeds).index(spec["seed"])]
            for name in ("test_accuracy", "validation_accuracy"):
                run.record(steps, name, value)
            store.put(run)
        conclude(study, store, specs)
    return folder / "runs.sqlite"


def test_against_says_what_changed_and_whether_it_is_real(tmp_path):
    old = {"none": [0.80, 0.82, 0.81, 0.83], "batch": [0.9, 0.91, 0.92, 0.90], "layer": [0.5] * 4}
    new = {"none": [0.70, 0.721, 0.712, 0.73], "batch": [0.91, 0.90, 0.915, 0.905], "group": [0.7] * 4}
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    found = changes_between(stored(tmp_path / "new", new, steps=5), stored(tmp_path / "old", old))
    assert "steps 3 -> 5" in found.settings
    lines = {line.partition(":")[0]: line for line in found.arms}
    assert "really worse" in lines["none"] and "paired over n = 4 seeds" in lines["none"]
    assert "not told from no change" in lines["batch"]
    assert lines["group"].endswith("new here.") and lines["layer"].endswith("no longer here.")
    assert found.sentence.endswith("1 of 2 arms: none.")
    same = changes_between(tmp_path / "old" / "runs.sqlite", tmp_path / "old" / "runs.sqlite")
    assert not same.settings and all("the same to the last digit" in line for line in same.arms)
    page = page_of_store(tmp_path / "new" / "runs.sqlite", tmp_path / "p.html", found).read_text(encoding="utf-8")
    assert "Since the earlier store" in page and "really worse" in page


def test_welch_against_scipy():
    from scipy.stats import ttest_ind

    a, b = [1.0, 2.5, 3.0, 4.5], [2.0, 6.0, 9.0]
    ours = welch_difference(a, b)
    theirs = ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
