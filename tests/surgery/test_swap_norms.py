"""Swapping: gains carried, groups that fit, affine maps fitted to data; what would break is refused."""

import pytest
import torch
from operations import convolutional, hugging_face, same_state, shaken, state
from torch import nn

import normgauge as ng
from normgauge.errors import InputError, UnknownNameError

pytestmark = pytest.mark.usefixtures("single_precision")
IMAGES = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


@pytest.mark.parametrize("to", ["group", "layer", "instance", "batch", "rms", "frozen_batch", "ghost_batch"])
def test_any_normalizer_to_any_other(to):
    model = convolutional()
    before = state(model)
    done = ng.swap_norms(model, to, example=IMAGES, where=["2", "5"])
    assert same_state(model, before) and not done.refused and not done.exact
    plain = float(done.note.split("move by ")[1].split()[0])
    assert done.change <= plain * 1.05 + 1e-6 and done.model(IMAGES).isfinite().all()
    done.model.train()(IMAGES).sum().backward()


def test_batch_to_batch_on_the_data_of_the_statistics_changes_nothing():
    model = convolutional()
    model.train()
    for module in model:
        if hasattr(module, "momentum"):
            module.momentum = None
            module.reset_running_stats()
    model(IMAGES)
    done = ng.swap_norms(model.eval(), "batch", example=IMAGES)
    assert done.proof < 1e-4 or done.change < 1e-3


def test_fitted_affine_maps_are_least_squares():
    model = shaken(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).eval()
    done = ng.swap_norms(model, "layer", example=IMAGES)
    y = model(IMAGES).transpose(0, 1).flatten(1)
    z = nn.functional.layer_norm(model[0](IMAGES), (4, 6, 6)).transpose(0, 1).flatten(1)
    for channel in range(4):
        design = torch.stack([z[channel], torch.ones_like(z[channel])], 1)
        expected = torch.linalg.lstsq(design, y[channel][:, None]).solution[:, 0]
        found = torch.stack([done.model[1].weight[channel], done.model[1].bias[channel]])
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-3, atol=1e-3)


def test_groups_are_never_of_one_and_vectors_get_larger_ones():
    """Opacus put GroupNorm(C, C) behind linear layers: every output was its bias."""
    model = shaken(nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))).eval()
    swapped = ng.swap_norms(model, "group", example=torch.randn(9, 3)).model[1]
    assert swapped.num_channels // swapped.num_groups >= 2
    lonely = ng.swap_norms(model, lambda channels, _: nn.GroupNorm(channels, channels), example=torch.randn(9, 3))
    assert "one value" in lonely.refused[0][1] and isinstance(lonely.model[1], nn.BatchNorm1d)


def test_nested_shared_and_subclassed_modules():
    class WithActivation(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    shared = nn.BatchNorm2d(4)
    model = nn.ModuleDict({"inner": nn.Sequential(nn.Conv2d(3, 4, 1), shared, nn.Conv2d(4, 4, 1), shared)})
    model["act"] = WithActivation(4)

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["act"](self.parts["inner"](x))

    done = ng.swap_norms(shaken(Nested()).eval(), "group", example=IMAGES)
    inner = done.model.parts["inner"]
    assert inner[1] is inner[3] and isinstance(inner[1], nn.GroupNorm)
    assert "does more" in dict(done.refused)["parts.act"] and isinstance(done.model.parts["act"], WithActivation)


def test_gains_stored_as_one_plus_w_are_carried():
    pytest.importorskip("transformers")
    model = hugging_face("gemma2")
    tokens = {"input_ids": torch.randint(3, 64, (2, 7)), "use_cache": False}
    done = ng.swap_norms(model, "rms", example=tokens, where="*.input_layernorm")
    assert done.change < 1e-3 and "LastAxis" in done.rows[0]["what"]


def test_a_class_that_is_not_called_a_norm_is_not_passed_over_in_silence():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    done = ng.swap_norms(model, "rms", example=torch.randn(3, 4))
    assert "no class here has norm in its name" in str(done)


def test_wrong_use_is_explained():
    with pytest.raises(UnknownNameError, match="group"):
        ng.swap_norms(convolutional(), "grup", example=IMAGES)
    with pytest.raises(InputError, match="wrap"):
        ng.swap_norms(convolutional(), "weight", example=IMAGES)
