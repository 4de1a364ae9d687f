"""S0 sec. 9.5, S3: dropout with and without BN, and the shift of variances that the two make together."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate
from normgauge.papers.language import Record, Spec, build, fit, record_accuracies, register


class SeededDropout(nn.Module):
    """Dropout of a share `rate` from a generator of its own: runs are the same whatever else draws random numbers."""

    def __init__(self, rate: float, seed: int) -> None:
        super().__init__()
        self.rate = rate
        self._source = torch.Generator().manual_seed(seed)

    def __deepcopy__(self, memo: dict[int, object]) -> SeededDropout:
        """Return a copy with the same stream; generators cannot be copied by themselves."""
        twin = SeededDropout(self.rate, 0)
        twin._source.set_state(self._source.get_state())
        twin.training = self.training
        return twin

    def forward(self, x: Tensor) -> Tensor:
        """Return x with a fresh mask in training, x itself in evaluation."""
        if not self.training or self.rate == 0:
            return x
        kept = torch.rand(x.shape, generator=self._source) >= self.rate
        return x * kept / (1 - self.rate)


@register("dropout")
def run(spec: Spec, record: Record) -> None:
    """Train an MLP with dropout behind every ReLU; record accuracies and the shift of the stored variances."""
    plain, dataset = build(spec, model="mlp")
    steps, network = int(spec["steps"]), _insert_dropout(plain, float(spec["dropout"]), int(spec["seed"]))
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    result = fit(spec, network, dataset, optimizer)
    record_accuracies(record, steps, network, dataset, "train", "validation", "test")
    if spec["norm"] == "batch":
        ratios = _variance_ratios(network, dataset)
        for number, ratio in enumerate(ratios, start=1):
            record(steps, "layer_variance_ratio", ratio, layer=str(number))
        record(steps, "variance_ratio", ratios[-1])  # dropout stands before all layers but the first
        again = evaluate(network, dataset, statistics="recalibrated", inputs=[dataset.train[0]])  # without dropout
        record(steps, "recalibrated_accuracy", again.accuracy)
    result.whole()


def _insert_dropout(network: nn.Module, rate: float, seed: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for part in network.children():
        layers.append(part)
        if isinstance(part, nn.ReLU):
            layers.append(SeededDropout(rate, 100 * seed + len(layers)))
    return nn.Sequential(*layers)


def _variance_ratios(network: nn.Module, dataset: Dataset) -> list[float]:
    """Return, per BN layer, the mean over units of (variance in evaluation on training data) / (stored variance)."""
    twin = copy.deepcopy(network).eval()
    ratios: list[float] = []

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        stored = module.running_var
        assert isinstance(stored, Tensor)
        ratios.append(float((inputs[0].var(0) / stored).mean()))

    for part in twin.modules():
        if isinstance(part, _BatchNorm):
            part.register_forward_pre_hook(look)
    with torch.no_grad():
        twin(dataset.train[0])
    return ratios
