# ruff: noqa: E501
"""`ng.identify`: torch's norms, hand-written ones, and what must stay unknown."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.errors import InputError
from normgauge.testing import check_result

ROWS, MAPS = torch.randn(2, 5, 8), torch.randn(3, 4, 5, 6)


class Hand(nn.Module):
    def __init__(self, place="inside", plus=False, eps=1e-3):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8) + (0 if plus else 0.5))
        self.place, self.plus, self.eps = place, plus, eps

    def forward(self, x):
        square = x.pow(2).mean(-1, keepdim=True)
        root = (square + self.eps).sqrt() if self.place == "inside" else square.sqrt() + self.eps
        return x / root * (self.scale + 1 if self.plus else self.scale)


CASES = {
    "layer": (nn.LayerNorm(8, eps=1e-3), ROWS, ("layer", (2,), True, 1e-3, "inside", "w", True, "input")),
    "layer without gain": (nn.LayerNorm(8, elementwise_affine=False), ROWS, ("layer", (2,), True, 1e-5, "inside", "none", False, "input")),
    "batch": (nn.BatchNorm2d(4), MAPS, ("batch", (0, 2, 3), True, 1e-5, "inside", "w", True, "batch")),
    "stored": (nn.BatchNorm2d(4, eps=1e-3).eval(), MAPS, ("batch", (0, 2, 3), True, 1e-3, "inside", "w", True, "stored")),
    "group": (nn.GroupNorm(2, 4), MAPS, ("group", (1, 2, 3), True, 1e-5, "inside", "w", True, "input")),
    "one group": (nn.GroupNorm(1, 4), MAPS, ("group", (1, 2, 3), True, 1e-5, "inside", "w", True, "input")),
    "instance": (nn.InstanceNorm2d(4), MAPS, ("instance", (2, 3), True, 1e-5, "inside", "none", False, "input")),
    "rms": (nn.RMSNorm(8, eps=1e-6), ROWS, ("rms", (2,), False, 1e-6, "inside", "w", False, "input")),
    "rms 1+w": (Hand(plus=True), ROWS, ("rms", (2,), False, 1e-3, "inside", "1+w", False, "input")),
    "rms outside": (Hand("outside"), ROWS, ("rms", (2,), False, 1e-3, "outside", "w", False, "input")),
    "l2": (lambda x: F.normalize(x, dim=-1), ROWS, ("l2", (2,), False, 1e-12, "outside", "none", False, "input")),
    "identity": (nn.Identity(), ROWS, ("none", (), False, 0.0, "none", "none", False, "input")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_law_is_found(name, dtype):
    norm, example, expected = CASES[name]
    norm = norm.to(dtype) if isinstance(norm, nn.Module) else norm
    found = ng.identify(norm, example=example.to(dtype))
    got = (found.kind, found.axes, found.centred, found.eps, found.eps_place, found.gain, found.bias, found.statistics)
    assert got[:3] + got[4:] == expected[:3] + expected[4:] and found.eps == pytest.approx(expected[3], rel=1e-4)
    assert found.residual < 1e-7


def test_an_unbiased_variance_is_said():
    def unbiased(x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-3).sqrt()

    found = ng.identify(unbiased, example=ROWS)
    assert found.factor == pytest.approx((7 / 8) ** 0.5) and found.eps == pytest.approx(1e-3 * 7 / 8, rel=1e-4)
    assert "times 0.935414, as by an unbiased variance" in found.meaning() and "factor" in str(found)
    gains = torch.linspace(0.5, 2, 8)
    for plain in (nn.LayerNorm(8), lambda x: gains * F.layer_norm(x, (8,)), nn.BatchNorm1d(5).eval()):
        assert "factor" not in str(ng.identify(plain, example=ROWS))


@pytest.mark.parametrize("norm", [nn.Tanh(), nn.Softmax(-1), nn.Linear(8, 8), lambda x: x / x.std(-1, keepdim=True)])
def test_unknown_is_no_guess(norm):
    assert ng.identify(norm, example=ROWS).kind == "unknown"


def test_default_eps_of_torch_rms_is_that_of_the_type():
    assert ng.identify(nn.RMSNorm(8).float(), example=ROWS.float()).eps == pytest.approx(2.0**-23, rel=1e-3)


def test_the_type_of_the_computation():
    class Up(nn.Module):
        def forward(self, x):
            return F.layer_norm(x.float(), (8,)).to(x.dtype)

    class Low(nn.Module):
        def forward(self, x):
            y = x - x.mean(-1, keepdim=True)
            return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)

    example = torch.randn(4, 16, 8).bfloat16()
    assert ng.identify(Up(), example=example).compute_dtype is torch.float32
    assert ng.identify(Low(), example=example).compute_dtype is torch.bfloat16
    assert ng.identify(Up(), example=example.double()).compute_dtype is torch.float32


def test_the_contract_and_no_trace():
    norm = nn.BatchNorm2d(4)
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    check_result(ng.identify(norm, example=MAPS.to(norm.weight.dtype)))
    check_result(ng.identify(nn.Tanh(), example=ROWS))
    assert all(torch.equal(v, norm.state_dict()[k]) for k, v in before.items())


def test_wrong_use_is_explained():
    with pytest.raises(InputError, match="identify"):
        ng.identify(nn.LayerNorm(8), example=3)
    with pytest.raises(InputError, match="identify"):
        ng.identify(3, example=ROWS)
