"""The lab: paired arms, divergence as a value, resumable sweeps, and an answer that follows from the numbers."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import normgauge as ng
from normgauge.errors import InputError, UnknownNameError
from normgauge.lab import data, models
from normgauge.lab.models.small import SMALL
from normgauge.lab.question import comparison_study, measuring_steps
from normgauge.lab.runs.executors import run_in_processes
from normgauge.lab.runs.run import execute
from normgauge.lab.runs.sweep import sweep
from normgauge.nn import registry
from normgauge.records import Run
from normgauge.store import Store, spec_id

SPEC = {
    "model": "mlp",
    "norm": "batch",
    "data": "digits",
    "lr": 0.1,
    "seed": 0,
    "steps": 6,
    "batch": 64,
    "measure_at": [0, 6],
    "measure_batch": 64,
    "target_loss": 100.0,
}


@pytest.fixture(autouse=True)
def single_precision(double_precision):
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("model", SMALL)
def test_arms_share_their_weights(model):
    dataset = data.load("gaussian" if model == "dln" else "digits")
    plain, normal = (models.build(model, norm, dataset.shape, dataset.classes, 3) for norm in ("none", "batch"))
    shared = [m.weight for m in plain.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    others = [m.weight for m in normal.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    assert len(shared) > 1 and all(torch.equal(a, b) for a, b in zip(shared, others, strict=True))
    assert plain(dataset.train[0][:4]).shape == (4, dataset.classes)


def test_weight_norm_starts_at_the_same_function():
    dataset = data.load("digits")
    plain, weight = (models.build("vgg", norm, dataset.shape, 10, 0) for norm in ("none", "weight"))
    inputs = dataset.train[0][:5]
    assert torch.allclose(plain(inputs), weight(inputs), atol=1e-4)


def test_vgg_takes_32x32_images_and_refuses_vectors():
    assert models.build("vgg", "batch", (3, 32, 32), 10, 0)(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(InputError, match="Choose --model mlp or dln"):
        models.build("vgg", "none", (10,), 10, 0)


def test_the_deep_linear_net_has_25_layers_and_is_linear():
    net = models.build("dln", "none", (10,), 10, 0)
    assert sum(isinstance(m, torch.nn.Linear) for m in net.modules()) == 25
    x, y = torch.randn(1, 10), torch.randn(1, 10)
    assert torch.allclose(net(x + 2 * y), net(x) + 2 * net(y), atol=1e-4)


def test_unknown_names_are_named():
    with pytest.raises(UnknownNameError, match="unknown model 'vg'. Did you mean 'vgg'"):
        models.build("vg", "none", (1, 8, 8), 10, 0)
    with pytest.raises(UnknownNameError, match="unknown normalizer 'bacth'. Did you mean 'batch'"):
        models.build("vgg", "bacth", (1, 8, 8), 10, 0)
    with pytest.raises(UnknownNameError, match="unknown data 'digit'. Did you mean 'digits'"):
        data.load("digit")
    with pytest.raises(InputError, match="Run from the folder that holds the package"):
        models.build("no_such_package:factory", "none", (1, 8, 8), 10, 0)


def test_splits_are_disjoint_and_standardized():
    dataset = data.load("digits")
    rows = torch.cat([split[0].flatten(1) for split in (dataset.train, dataset.validation, dataset.test)])
    assert len(rows) == 1797
    assert abs(float(dataset.train[0].mean())) < 1e-5 and abs(float(dataset.train[0].std()) - 1) < 1e-4


def test_a_run_is_deterministic_and_measures_on_schedule():
    first, second = execute(SPEC), execute(SPEC)
    assert first.ok, first.sentence
    assert first.readings == second.readings
    assert {reading.step for reading in first.readings} == {0, 6}
    names = {reading.name for reading in first.readings}
    assert {
        "train_loss",
        "test_accuracy",
        "effective_beta",
        "top_eigenvalue",
        "weight_norm",
        "steps_to_target",
    } <= names
    losses = first.series("train_loss")
    assert losses[-1] < losses[0]


def test_divergence_and_errors_are_values():
    wild = execute({**SPEC, "norm": "none", "lr": 1e6})
    assert wild.status == "diverged" and "training loss" in wild.sentence
    broken = execute({**SPEC, "model": "nothing"})
    assert broken.status == "error" and "unknown model" in broken.sentence
    assert broken.provenance.versions["torch"]


def study(**changes):
    settings = {"model": "mlp", "norms": ["none", "batch"], "rates": [0.1], "seeds": 2, "steps": 3, "size": "smoke"}
    return comparison_study(**{**settings, **changes})


def test_a_sweep_runs_only_what_is_missing(tmp_path):
    calls = []

    def task(spec):
        calls.append(spec_id(spec))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return Run(dict(spec))

    plan = study(rates=[0.1, 1.0]).plan()
    with Store(tmp_path / "runs.sqlite") as store:
        with pytest.raises(KeyboardInterrupt):
            sweep(plan, store, executor=1, task=task)
        assert len(store.finished()) == 2
        assert sweep(plan, store, executor=1, task=task) == len(plan) - 2
        assert sweep(plan, store, executor=1, task=task) == 0
    assert len(calls) == len(plan) + 1  # only the interrupted one ran twice
    assert set(calls) == {spec_id(spec) for spec in plan}


def dying_task(spec):
    if spec["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return Run(dict(spec))


def test_a_killed_worker_costs_its_own_run_only():
    specs = [{"n": n, "dies": n == 1} for n in range(4)]
    runs = list(run_in_processes(specs, 2, dying_task))
    assert sorted(run.spec["n"] for run in runs) == [0, 1, 2, 3]
    (lost,) = [run for run in runs if not run.ok]
    assert lost.spec["n"] == 1 and "died 3 times" in lost.sentence


def test_an_interrupted_command_resumes(tmp_path):
    """Ctrl-C on the real command: finished runs stay, the words say how to go on, the next call completes."""
    command = [sys.executable, "-m", "normgauge", "compare", "--model", "mlp", "--norms", "none,batch"]
    command += [
        "--rates",
        "0.1,0.3,1",
        "--seeds",
        "2",
        "--steps",
        "25",
        "--jobs",
        "1",
        "--out",
        str(tmp_path),
        "--json",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    store = tmp_path / "runs.sqlite"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (store.exists() and len(Store(store).finished()) >= 1):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    if process.returncode != 0:
        assert process.returncode == 130
        assert "run the same command again" in words
    kept = Store(store).finished()
    assert kept
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert kept <= Store(store).finished()
    assert '"answer"' in done.stdout
    assert (tmp_path / "report.html").exists()


def test_study_roles_are_checked():
    with pytest.raises(InputError, match="each knob has one role. Got two for lr"):
        ng.Study("s", "?", scientific={"lr": [1]}, nuisance={"lr": [2]})
    with pytest.raises(InputError, match="none for norm"):
        ng.Study("s", "?", scientific={"norm": []})
    with pytest.raises(InputError, match="tuning_seeds=5"):
        ng.Study("s", "?", scientific={"norm": [1]}, seeds=2, tuning_seeds=5)


def test_confirmation_runs_the_remaining_seeds_at_the_chosen_setting():
    whole = study(rates=[0.1, 1.0], seeds=4)
    assert len(whole.plan()) == 2 * 2 * 1
    second = whole.confirmation([{"norm": "none", "lr": 0.1}])
    assert [spec["seed"] for spec in second] == [1, 2, 3]
    assert not {spec_id(s) for s in second} & {spec_id(s) for s in whole.plan()}


def test_bad_settings_fail_before_the_first_run():
    with pytest.raises(UnknownNameError, match="unknown normalizer"):
        study(norms=["btch"])
    with pytest.raises(InputError, match="rates are positive"):
        study(rates=[-1.0])


def test_measuring_steps_hold_both_ends():
    for count in (2, 3, 5, 9):
        steps = measuring_steps(80, count)
        assert steps[0] == 0 and steps[-1] == 80 and len(steps) == count


def test_every_registered_normalizer_builds_on_the_mlp_and_the_vgg():
    dataset = data.load("digits")
    for norm in registry.names():
        for model in ("mlp", "vgg"):
            network = models.build(model, norm, dataset.shape, dataset.classes, 0)
            assert torch.isfinite(network(dataset.train[0][:16])).all(), (norm, model)
