# ruff: noqa: E501
"""Models that resist: the doctor says so, and leaves no trace."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import normgauge as ng
from normgauge.testing import assert_norms_healthy


def same_state(model, before):
    return all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Raises(nn.Module):
    def __init__(self, modes):
        super().__init__()
        self.fc, self.norm, self.modes = nn.Linear(4, 4), nn.BatchNorm1d(4), modes

    def forward(self, x):
        y = self.norm(self.fc(x))
        if self.training in self.modes:
            raise RuntimeError("not today")
        return y


@pytest.mark.parametrize("modes", [(True,), (False,), (True, False)])
def test_a_forward_that_raises_leaves_no_trace(modes):
    model = Raises(modes)
    before = copy.deepcopy(model.state_dict())
    checkup = ng.checkup(model, torch.randn(32, 4))
    assert "not today" in checkup.sentence and same_state(model, before)
    assert checkup.healthy == (len(modes) == 1) and ("Skipped" in checkup.text()) == (len(modes) == 2)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, a, b=None):
        return {"x": self.norm(self.fc(a)), "n": 3, "extra": (a if b is None else b,)}


PATIENTS = {
    "no norm": (lambda: nn.Linear(4, 2), lambda: torch.randn(8, 4)),
    "no parameter": (nn.ReLU, lambda: torch.randn(8, 4)),
    "all frozen": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False), lambda: torch.randn(32, 4)),
    "one sample": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), lambda: torch.randn(1, 4)),
    "nan": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), lambda: torch.full((8, 4), torch.nan)),
    "integers": (lambda: nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8)), lambda: torch.randint(0, 9, (4, 5))),
    "several outputs": (Several, lambda: {"a": torch.randn(8, 4), "b": torch.randn(8, 4)}),
    "positional": (Several, lambda: (torch.randn(8, 4), torch.randn(8, 4))),
    "spectral": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.LayerNorm(4)), lambda: torch.randn(8, 4)),
    "recurrent": (lambda: nn.LSTM(4, 4), lambda: torch.randn(5, 8, 4)),
    "empty batch": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), lambda: torch.randn(0, 4)),
    "empty batch of images": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), lambda: torch.randn(0, 3, 8, 8)),
    "time on axis 0": (lambda: nn.GRU(4, 8, bidirectional=True), lambda: torch.randn(6, 3, 4)),
    "tokens on axis 0": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), lambda: torch.randn(6, 3, 8)),
    "one sequence, tokens on axis 0": (lambda: nn.TransformerEncoderLayer(8, 2, 16), lambda: torch.randn(6, 1, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", PATIENTS)
def test_odd_patients_are_examined(name):
    make, batch = PATIENTS[name]
    model = make()
    before, flags = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    checkup = ng.checkup(model, batch())
    assert checkup.text() and same_state(model, before) and flags == [m.training for m in model.modules()]
    assert not [finding for finding in checkup if finding.severity == "error"]


class Company(nn.Module):
    """Tokens on axis 0, samples on axis 1, and a mean over the samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)

    def forward(self, x):
        y = self.layer(x)
        return y - y.mean(1, keepdim=True)


def test_samples_that_see_each_other_are_found_behind_time_on_axis_0():
    assert "NG48" in {finding.id for finding in ng.checkup(Company(), torch.randn(6, 4, 8))}


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), lambda: nn.BatchNorm1d(4).to("meta")]
)
def test_a_model_without_values_is_refused_in_words(make):
    with pytest.raises(ng.errors.ModelError, match="have values"):
        ng.checkup(make(), torch.randn(8, 4))


def test_a_loss_that_is_no_number_is_said():
    checkup = ng.checkup(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.full((8, 4), torch.nan))
    assert "the loss is nan in train mode" in checkup.text()


def test_a_norm_with_its_own_forward_stays_in_its_mode():
    class Clipped(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x).clamp_min(0)

    model = nn.Sequential(nn.Linear(4, 8), Clipped(8), nn.Linear(8, 2)).train()
    assert "NG13" in {finding.id for finding in ng.checkup(model, torch.randn(32, 4))}
    assert all(module.training for module in model.modules())


def test_under_no_grad_and_inference_mode():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.9), nn.Linear(8, 2))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert "NG07" in {f.id for f in ng.checkup(model, torch.randn(64, 4))}


@pytest.mark.heavy  # gloo may abort the process it is taken down in, under load
def test_distributed_wrapper_with_small_shares(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2))
        wrapped = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
        found = [f for f in ng.checkup(wrapped, torch.randn(20, 4)) if f.id == "NG19"]
        assert len(found) == 2
        assert "NG19" not in {f.id for f in ng.checkup(net, torch.randn(20, 4))}
    finally:
        torch.distributed.destroy_process_group()


def test_the_cost_of_a_resnet():
    from benchmarks.doctor.zoo import resnet18

    torch.set_default_dtype(torch.float32)
    batch = torch.randn(16, 3, 16, 16), torch.randint(0, 4, (16,))
    assert ng.checkup(resnet18(), batch).cost.gradients_worth <= 60
    assert ng.checkup(resnet18(), batch, quick=True).cost.gradients_worth <= 6


def test_the_pytest_helper():
    x = torch.randn(64, 4)
    assert_norms_healthy(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), x)
    sick = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.99))
    with pytest.raises(AssertionError, match="NG07"):
        assert_norms_healthy(sick, x)
    assert_norms_healthy(sick, x, ignore=["NG07"])


def test_an_entry_point_adds_a_check(monkeypatch):
    from normgauge.doctor import Sign, all_checks, checks, finding

    def look(exam):
        """MY01: it is there.

        One sentence. Another one.
        Fix: Nothing.
        References: none.
        """
        yield Sign("(model)", "seen")

    class Entry:
        def load(self):
            if "MY01" not in finding.CHECKS:
                finding.check("info")(look)

    monkeypatch.setattr(checks, "entry_points", lambda group: [Entry()])
    monkeypatch.setattr(finding, "CHECKS", finding.CHECKS)
    try:
        assert "MY01" in all_checks()
        assert "MY01" in {f.id for f in ng.checkup(nn.Linear(4, 2), torch.randn(8, 4))}
    finally:
        finding.CHECKS.pop("MY01", None)
