"""The monitor inside a real Hugging Face Trainer and a real Lightning fit, on the CPU."""

import pytest
import torch
from torch import nn


def test_hugging_face_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from normgauge.integrations.transformers import NormgaugeCallback

    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(32, (16, 8))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    beats = {}
    callback = NormgaugeCallback(every=2, sinks=[lambda step, values: beats.update({step: values})])
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    assert set(beats) == {2, 4, 6}
    assert beats[6]["normgauge/loss/mean"] > 0
    assert beats[6]["normgauge/signal/logits_highest"] > 0
    assert beats[6]["normgauge/weights/relative_update_median"] > 0
    assert not any(module._forward_hooks for module in model.modules())


def test_lightning_fit(tmp_path):
    lightning = pytest.importorskip("lightning")
    from normgauge.integrations.lightning import NormgaugeCallback

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(2, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    callback = NormgaugeCallback(every=4, sinks=[tmp_path / "run"])
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
    )
    trainer.fit(Classifier(), loader)
    assert callback.monitor.steps == 16
    frame = callback.monitor.frame()
    assert set(frame["step"]) == {4, 8, 12, 16}
    assert "normgauge/signal/variance_median" in set(frame["name"])
    saved = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=False)["callbacks"]
    assert next(state for name, state in saved.items() if "Normgauge" in name)["steps"] == 16
