"""`ng.Monitor` in the loops people have: autocast with a scaler, clipping, several optimizers, DDP, MLflow's recipe."""

import pytest
import torch
from torch import nn

import normgauge as ng
from monitor.test_monitor import draw_batches, make_network, train


def test_autocast_with_a_scaler_that_skips_steps_counts_the_steps_taken():
    model = make_network(dropout=0.0).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)  # float32 overflows: the first steps are skipped
    with ng.Monitor(model, optimizer, every=1) as monitor:
        for inputs, labels in draw_batches(80):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs.float()).float(), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            monitor.step(loss)
    assert not monitor._off
    assert 0 < monitor.steps <= 80
    assert max(monitor.frame()["step"]) == monitor.steps


def test_several_optimizers_and_frozen_parts_are_watched_together():
    model = make_network(dropout=0.0)
    model[7].requires_grad_(False)
    first = torch.optim.SGD(model[:4].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[4:7].parameters(), lr=1e-2)
    with ng.Monitor(model, [first, second], every=2) as monitor:
        for inputs, labels in draw_batches(8):
            for optimizer in (first, second):
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            first.step()
            second.step()
            monitor.step()
    assert {name for name, track in monitor.blocks.tracks.items() if track.relative > 0} >= {"0.weight", "4.weight"}
    assert "7.weight" not in monitor.blocks.tracks
    assert monitor.steps == 8


@pytest.mark.heavy  # gloo may abort the process it is taken down in, under load
def test_ddp_is_looked_through(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = make_network(dropout=0.0)
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with ng.Monitor(wrapped, optimizer, every=2) as monitor:
            train(wrapped, optimizer, draw_batches(4), monitor)
        assert "0.weight" in monitor.blocks.tracks
        assert "normgauge/signal/variance_median" in monitor.seen.latest
    finally:
        torch.distributed.destroy_process_group()


def test_the_recipe_for_mlflow_logs_the_readings(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder, so that no database is needed
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("normgauge")

    def sink(step, values):
        mlflow.log_metrics({name.replace("/", "."): value for name, value in values.items()}, step=step)

    model = make_network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mlflow.start_run() as run, ng.Monitor(model, optimizer, every=2, sinks=[sink]) as monitor:
        train(model, optimizer, draw_batches(4), monitor)
    assert not monitor._off
    logged = mlflow.get_run(run.info.run_id).data.metrics
    assert logged["normgauge.loss.mean"] == pytest.approx(monitor.seen.latest["normgauge/loss/mean"])
