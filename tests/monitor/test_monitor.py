"""`ng.Monitor` against dense twins, on the faults it is for, and in the loops people have."""

import csv
import gc
import inspect
import logging
import math
import re
import weakref

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.errors import InputError
from normgauge.monitor import CSVSink, FolderSink, TensorBoardSink


def make_network(width=24, *, seed=0, dropout=0.1):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(10, width),
        nn.BatchNorm1d(width),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(width, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, 3),
    )


def draw_batches(count, *, seed=0, size=32):
    source = torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = torch.randn(size, 10, generator=source)
        yield inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long()


def train(model, optimizer, batches, monitor=None, before_step=None):
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).float(), labels)
        loss.backward()
        if before_step:
            before_step()
        optimizer.step()
        if monitor is not None:
            monitor.step(loss)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_bit_identical_with_and_without(kind, tmp_path):
    states = []
    for watched in (False, True):
        model = make_network()
        optimizer = OPTIMIZERS[kind](model.parameters())
        torch.manual_seed(7)
        if watched:
            batch = next(draw_batches(1, seed=5))

            def loss(model, batch):
                return nn.functional.cross_entropy(model(batch[0]), batch[1])

            with ng.Monitor(model, optimizer, batch=batch, loss=loss, every=4, sinks=[tmp_path / "run"]) as monitor:
                train(model, optimizer, draw_batches(30), monitor)
            assert len(set(monitor.frame()["step"])) == 7
            assert any("edge_ratio" in name for name in monitor.frame()["name"])
        else:
            train(model, optimizer, draw_batches(30))
        states.append([*model.state_dict().values(), torch.rand(3)])  # the random stream too
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_nothing_stays_on_model_and_optimizer_after_an_exception():
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="own"), ng.Monitor(model, optimizer, every=1) as monitor:
        train(model, optimizer, draw_batches(2), monitor)
        raise RuntimeError("own")
    hooks = [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    assert not hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_angles_norms_and_relative_updates_are_those_of_whole_copies():
    model = make_network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with ng.Monitor(model, optimizer, every=1) as monitor:
        for inputs, labels in draw_batches(8):
            before = {name: value.detach().clone() for name, value in model.named_parameters()}
            train(model, optimizer, [(inputs, labels)], monitor)
            for name in ("0.weight", "4.weight", "7.weight"):
                track, old, new = monitor.blocks.tracks[name], before[name].double(), model.get_parameter(name).double()
                if track.rows > 1:
                    angles = torch.arccos(nn.functional.cosine_similarity(old, new, dim=1).clamp(-1, 1))
                    assert track.angle == pytest.approx(angles.median().item(), rel=1e-3)
                assert track.relative == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-4)


def test_free_scales_are_those_that_symmetries_certifies():
    model = make_network(dropout=0.0)
    batch = next(draw_batches(1, size=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.Monitor(model, optimizer, every=1) as monitor:
        train(model, optimizer, draw_batches(6, size=64), monitor)
    objective = ng.Objective(model, nn.functional.cross_entropy, batch, mode="train")
    certified = {
        name for family in ng.symmetries(objective).families if family.kind == "scale" for name in family.parameters
    }
    free = {name for name, track in monitor.blocks.tracks.items() if track.free}
    assert free == {"0.weight", "4.weight"}
    assert free <= certified


def test_a_weight_is_free_together_with_its_bias_before_a_layer_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16, eps=1e-8), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        model[0].bias.normal_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.Monitor(model, optimizer, every=1) as monitor:
        for inputs, labels in draw_batches(6):
            before = [value.detach().clone().flatten() for value in model[0].parameters()]
            train(model, optimizer, [(inputs, labels)], monitor)
            after = [value.detach().flatten() for value in model[0].parameters()]
    assert {name for name, track in monitor.blocks.tracks.items() if track.free} == {"0.weight"}
    track, (old, new) = monitor.blocks.tracks["0.weight"], (torch.cat(before).double(), torch.cat(after).double())
    angle = 2 * torch.asin((old / old.norm() - new / new.norm()).norm() / 2)
    assert track.norm == pytest.approx(old.norm().item(), rel=1e-5)
    assert track.angle == pytest.approx(angle.item(), rel=1e-3)
    assert track.effective_rate == pytest.approx(0.1 / old.norm().item() ** 2, rel=1e-5)


def test_warnings_carry_ids_of_the_doctors_checks():
    from normgauge.doctor.checks import all_checks
    from normgauge.monitor import _warnings

    used = set(re.findall(r"NG\d\d", inspect.getsource(_warnings)))
    assert len(used) >= 9
    assert used <= set(all_checks())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_edge_is_that_of_the_instrument_with_one_tensor_copied_at_a_time(kind, monkeypatch):
    from normgauge.measure.curvature.edge import critical_rate
    from normgauge.monitor import _blocks

    model, batch = make_network(dropout=0.0), next(draw_batches(1))
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, draw_batches(3))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    objective = ng.Objective.from_step(model, loss, [batch], mode="train")
    wanted = optimizer.param_groups[0]["lr"] / critical_rate(objective, optimizer, tol=0.01)
    copies, usual = [], _blocks.next_value

    def counted(*given):
        assert sum(copy() is not None for copy in copies) == 0, "an earlier tensor's copy is still there"
        copies.append(weakref.ref(moved := usual(*given)))
        return moved

    monkeypatch.setattr(_blocks, "next_value", counted)
    states = [*model.state_dict().values(), *optimizer.state_dict()["state"][0].values()]
    before = [value.clone() for value in states]
    with ng.Monitor(model, optimizer, batch=batch, loss=loss, every=1) as monitor:
        monitor.steps = 1
        monitor.step()
    assert all(torch.equal(a, b) for a, b in zip(before, states, strict=True))
    assert not monitor._off and len(copies) > 20
    assert monitor.seen.latest["normgauge/stability/edge_ratio"] == pytest.approx(wanted, rel=0.12)


def test_what_stays_in_memory_is_a_twentieth_of_the_parameters():
    model = make_network(256, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, draw_batches(2))
    with ng.Monitor(model, optimizer, every=2) as monitor:
        gc.collect()
        others = {id(value) for value in gc.get_objects() if isinstance(value, torch.Tensor)}
        train(model, optimizer, draw_batches(12), monitor)
        optimizer.zero_grad()
        gc.collect()
        fresh = [v for v in gc.get_objects() if isinstance(v, torch.Tensor) and id(v) not in others]
    size = sum(value.numel() * value.element_size() for value in model.parameters())
    assert sum(value.untyped_storage().nbytes() for value in fresh) <= size / 20
    assert not monitor.blocks._held


def test_angle_settles_at_the_predicted_one_and_the_ratio_says_so():
    model = nn.Sequential(nn.Linear(10, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    with ng.Monitor(model, optimizer, every=10) as monitor:
        source = torch.Generator().manual_seed(0)
        noise = ((torch.randn(16, 10, generator=source), torch.randint(3, (16,), generator=source)) for _ in range(900))
        train(model, optimizer, noise, monitor)
    frame = monitor.frame()
    late = frame[(frame["name"] == "normgauge/weights/angle_over_predicted_median") & (frame["step"] > 600)]["value"]
    assert late.mean() == pytest.approx(1.0, abs=0.3)


def test_effective_rate_that_collapses_for_want_of_decay_is_told_with_its_step():
    model = make_network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    with ng.Monitor(model, optimizer, every=5) as monitor:
        train(model, optimizer, draw_batches(150), monitor)
    told = [warning for warning in monitor.warnings if warning.id == "NG42"]
    assert {warning.where for warning in told} == {"0.weight", "4.weight"}
    assert 0 < told[0].step <= 150
    assert len(told) == 2  # each once

    model = make_network(dropout=0.0)
    decayed = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    with ng.Monitor(model, decayed, every=5) as monitor:
        train(model, decayed, draw_batches(150), monitor)
    assert not [warning for warning in monitor.warnings if warning.id == "NG42"]


def test_frozen_backbone_that_moves_is_told_and_one_in_eval_mode_is_not():
    for really in (False, True):
        model = make_network(dropout=0.0)
        for module in model[:7]:
            module.requires_grad_(False)
        if really:
            for module in model[:7]:
                module.eval()
        optimizer = torch.optim.SGD(model[7].parameters(), lr=0.1)
        with ng.Monitor(model, optimizer, every=2) as monitor:
            train(model, optimizer, draw_batches(8), monitor)
        told = {(w.id, w.where) for w in monitor.warnings}
        assert told == (set() if really else {("NG03", "1"), ("NG03", "5")})


def test_bfloat16_gains_that_do_not_move_are_told_and_float32_ones_are_not():
    for dtype, expected in ((torch.bfloat16, True), (torch.float32, False)):
        model = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with ng.Monitor(model, optimizer, every=2) as monitor:
            train(model, optimizer, ((x.to(dtype), y) for x, y in draw_batches(12)), monitor)
        assert ("NG44", "1.weight") in {(w.id, w.where) for w in monitor.warnings} or not expected
        assert expected or not [w for w in monitor.warnings if w.id == "NG44"]


def test_poisoned_and_standing_statistics_are_told():
    model = make_network(dropout=0.0)
    model[5].momentum = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ng.Monitor(model, optimizer, every=2) as monitor:
        train(model, optimizer, draw_batches(6), monitor)
        with torch.no_grad():
            model(torch.full((4, 10), math.inf))
        train(model, optimizer, draw_batches(4), monitor)
    assert {("NG05", "5"), ("NG10", "1")} <= {(w.id, w.where) for w in monitor.warnings}


@pytest.mark.parametrize(("rate", "beyond"), [(0.05, False), (30.0, True)])
def test_a_rate_beyond_the_edge_is_told_from_one_within(rate, beyond):
    model = make_network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = next(draw_batches(1))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with ng.Monitor(model, optimizer, batch=batch, loss=loss, every=2) as monitor:
        train(model, optimizer, draw_batches(2))
        optimizer.param_groups[0]["lr"] = rate  # of the next step, which is the one that is asked about
        monitor.step()
    ratio = monitor.seen.latest["normgauge/stability/edge_ratio"]
    assert (ratio > 2) == beyond
    assert bool([w for w in monitor.warnings if w.id == "edge"]) == beyond


def test_healthy_run_is_not_warned_about():
    model = make_network(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = next(draw_batches(1))
    with ng.Monitor(model, optimizer, batch=batch, every=10) as monitor:
        train(model, optimizer, draw_batches(200), monitor)
    assert not monitor.warnings


def test_spike_names_the_tensor_that_turned():
    model = make_network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-2)
    with ng.Monitor(model, optimizer, every=5) as monitor:
        train(model, optimizer, draw_batches(60), monitor)

        def kick():
            model[7].weight.grad.mul_(2e3)

        train(model, optimizer, draw_batches(5, seed=3), monitor, kick)
    spikes = [w for w in monitor.warnings if w.id == "spike"]
    assert [w.where for w in spikes] == ["7.weight"]
    assert spikes[0].step == 65


def test_accumulation_and_skipped_steps_are_counted_as_the_optimizer_took_them():
    model = make_network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.Monitor(model, optimizer, every=2) as monitor:
        for number, (inputs, labels) in enumerate(draw_batches(12)):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            monitor.step(loss)
    assert monitor.steps == 4
    frame = monitor.frame()
    assert set(frame["step"]) == {2, 4}
    assert frame[frame["name"] == "normgauge/statistics/updates_per_step"]["value"].tolist() == [3.0]


def test_checkpoint_and_resume_go_on_as_one_run():
    def begin():
        model = make_network(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, ng.Monitor(model, optimizer, every=3)

    model, optimizer, whole = begin()
    with whole:
        train(model, optimizer, draw_batches(24), whole)
    model, optimizer, first = begin()
    batches = list(draw_batches(24))
    with first:
        train(model, optimizer, batches[:12], first)
    second = ng.Monitor(model, optimizer, every=3)
    second.load_state_dict(first.state_dict())
    with second:
        train(model, optimizer, batches[12:], second)
    wanted = [r for r in whole.rows if r["step"] > 15 and "weights" in r["name"]]
    assert wanted == [r for r in second.rows if r["step"] > 15 and "weights" in r["name"]]


def test_a_fault_of_ours_is_said_once_and_training_goes_on(caplog):
    model = make_network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def sink(step, values):
        raise OSError("disk full")

    with caplog.at_level(logging.WARNING), ng.Monitor(model, optimizer, every=1, sinks=[sink]) as monitor:
        train(model, optimizer, draw_batches(4), monitor)
    assert monitor.steps == 4
    assert sum("disk full" in record.message for record in caplog.records) == 1


def test_sinks_hold_the_same_readings(tmp_path):
    model = make_network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {}
    sinks = [lambda step, values: seen.update({step: dict(values)}), tmp_path / "a.csv", FolderSink(tmp_path / "run")]
    with ng.Monitor(model, optimizer, every=2, sinks=[*sinks, TensorBoardSink(tmp_path / "board")]) as monitor:
        train(model, optimizer, draw_batches(4), monitor)
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert {(int(r["step"]), r["name"]): float(r["value"]) for r in rows} == {
        (step, name): value for step, values in seen.items() for name, value in values.items()
    }
    assert all(name.startswith("normgauge/") and name.count("/") == 2 for name in seen[4])
    (run,) = (
        ng.lab.Store(tmp_path / "run" / "runs.sqlite", write=False).runs()
        if hasattr(ng.lab, "Store")
        else _runs(tmp_path)
    )
    assert {(r.step, r.name) for r in run.readings} == {(step, name) for step, v in seen.items() for name in v}
    assert list((tmp_path / "board").glob("events*"))


def _runs(folder):
    from normgauge.store import Store

    with Store(folder / "run" / "runs.sqlite", write=False) as store:
        return store.runs()


def test_sink_of_csv_appends(tmp_path):
    for step in (1, 2):
        sink = CSVSink(tmp_path / "deep" / "a.csv")
        sink(step, {"x": 1.0})
        sink.close()
    assert (tmp_path / "deep" / "a.csv").read_text().splitlines() == ["step,name,value", "1,x,1.0", "2,x,1.0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda m, o: (o, m, {}), "a model and its torch optimizer"),
        (lambda m, o: (nn.Linear(2, 2), o, {}), "parameters of the model"),
        (lambda m, o: (m, o, {"every": 0}), "at least 1"),
        (lambda m, o: (m, o, {"sinks": [3]}), "callable"),
    ],
)
def test_wrong_use_is_said(arguments, words):
    model = make_network()
    first, second, settings = arguments(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match=words):
        ng.Monitor(first, second, **settings)


def test_step_outside_of_its_time_is_said():
    model = make_network()
    with pytest.raises(InputError, match="between start and close"):
        ng.Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1)).step(1.0)


def test_attention_logits_and_streams_of_a_transformer_are_read():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True, dropout=0.0)
    model = nn.Sequential(
        nn.Linear(10, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ng.Monitor(model, optimizer, every=1) as monitor:
        for inputs, labels in draw_batches(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[:, None].repeat(1, 4, 1)).mean(1), labels)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    assert monitor.seen.latest["normgauge/signal/logits_highest"] > 0
    assert monitor.seen.latest["normgauge/signal/stream_growth"] >= 1
    assert monitor.seen.latest["normgauge/signal/gradient_growth"] > 0


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.heavy)])
def test_compiled_model_is_not_recompiled_and_read_outside(backend):
    model = make_network(dropout=0.0)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch._dynamo.reset()
    with ng.Monitor(compiled, optimizer, batch=next(draw_batches(1)), every=2) as monitor:
        train(compiled, optimizer, draw_batches(3), monitor)
        torch._dynamo.config.error_on_recompile = True
        try:
            train(compiled, optimizer, draw_batches(9), monitor)
        finally:
            torch._dynamo.config.error_on_recompile = False
    assert "normgauge/signal/variance_median" in set(monitor.frame()["name"])
