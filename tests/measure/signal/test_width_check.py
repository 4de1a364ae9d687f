"""Sizes over widths: the standard parametrization is flagged, muP passes, seeded mis-scalings are named."""

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.errors import InputError, NonFiniteError
from normgauge.testing import check_result

WIDTHS = (32, 64, 128, 256)


def batch():
    source = torch.Generator().manual_seed(0)
    return torch.randn(64, 16, generator=source), torch.randint(0, 4, (64,), generator=source)


def standard(width, depth=2):
    hidden = [layer for _ in range(depth) for layer in (nn.ReLU(), nn.Linear(width, width))]
    return nn.Sequential(nn.Linear(16, width), *hidden, nn.ReLU(), nn.Linear(width, 4))


def mup(width, fault="", rate=2e-3):
    """Return the network of `standard` in muP for Adam: read-out 1 / width, rates of matrices 1 / width."""
    model, rates, n = standard(width), {}, width / 32
    with torch.no_grad():
        for name, layer in model.named_children():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=1 / width if name == "6" else (2 / layer.in_features) ** 0.5)
                nn.init.zeros_(layer.bias)
                rates[layer.weight], rates[layer.bias] = rate if name == "0" else rate / n, rate
        scale = {"2": ("hidden start large", n**0.5), "4": ("hidden start small", n**-0.5)}
        scale["6"] = ("output start large", width)
        for name, (called, factor) in scale.items():
            model[int(name)].weight.mul_(factor if fault == called else 1.0)
    speed = {"hidden rate": (4, n), "output rate": (6, n), "input rate": (0, 1 / n), "hidden rate small": (2, 1 / n)}
    if fault in speed:
        place, factor = speed[fault]
        rates[model[place].weight] *= factor
    return model, torch.optim.Adam([{"params": [p], "lr": r} for p, r in rates.items()])


FAULTS = {
    "hidden start large": ("2",),
    "hidden start small": ("4",),
    "output start large": ("6",),
    "hidden rate": ("4.weight",),
    "output rate": ("6.weight",),
    "input rate": ("0.weight",),
    "hidden rate small": ("2.weight",),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_mis_scalings_are_named_and_nothing_else(fault):
    assert ng.width_check(lambda n: mup(n, fault), widths=WIDTHS, data=batch()).offenders == FAULTS[fault]


def test_mup_passes_and_the_standard_parametrization_does_not():
    good = ng.width_check(mup, widths=WIDTHS, data=batch(), seeds=8)
    assert good.passes
    assert {item.name for item in good.slopes if item.verdict not in ("ok", "zero")} == set()
    check_result(good)
    bad = ng.width_check(standard, widths=WIDTHS, data=batch())
    assert bad.offenders == ("2.weight", "4.weight", "6.weight")
    check_result(bad)
    update = next(item for item in bad.slopes if (item.name, item.quantity) == ("4.weight", "update"))
    assert update.low > 0.5 and update.sizes[-1] > 4 * update.sizes[0]
    descent = ng.width_check(
        standard, widths=WIDTHS, data=batch(), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    assert {"2.weight", "6.weight"} <= set(descent.offenders)
    assert "width^+-0.25" in good.meaning() and "2.weight" in bad.meaning() and "2.weight" not in good.meaning()


def test_intervals_hold_slopes_known_in_closed_form():
    """Read-out weights of variance 1 make logits grow as the root of the width, a first layer the same at all."""
    held = {"logits": 0, "activation": 0}
    for draw in range(10):

        def network(width, draw=draw):
            torch.manual_seed(1000 * torch.initial_seed() + draw)
            model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 64, bias=False))
            nn.init.normal_(model[2].weight)
            return model

        found = ng.width_check(network, widths=WIDTHS, data=batch(), seeds=4)
        for name, quantity, slope in (("(model)", "logits", 0.5), ("0", "activation", 0.0)):
            item = next(s for s in found.slopes if (s.name, s.quantity) == (name, quantity))
            assert abs(item.slope - slope) < 0.15
            held[quantity] += item.low <= slope <= item.high
    assert min(held.values()) >= 7, held  # 95 % each: fewer than 7 of 10 would come once in 10,000


def test_factors_outside_of_layers_are_found():
    class Loud(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.body, self.optimizer = mup(width)
            self.factor, self.shift = width**0.5, nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return self.body(x) * self.factor**2 + self.shift

    def factory(width):
        model = Loud(width)
        return model, model.optimizer

    found = ng.width_check(factory, widths=WIDTHS, data=batch())
    assert found.offenders == ("(model)",) and found.unseen == ("shift",)


def test_convolutions_embeddings_and_norms_are_read():
    def words(width):
        body = nn.Embedding(9, width), nn.LayerNorm(width), nn.Linear(width, 9)
        return nn.Sequential(*body)

    tokens = torch.arange(24).view(4, 6) % 9
    found = ng.width_check(words, widths=(16, 32, 64), data=(tokens, tokens))
    assert found.offenders == ("2.weight",)

    def images(width):
        return nn.Sequential(
            nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(width, width, 3),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3),
        )  # fmt: skip

    pair = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
    assert {"4.weight", "7.weight"} <= set(ng.width_check(images, widths=(8, 16, 32, 64), data=pair).offenders)


@pytest.mark.parametrize(
    ("factory", "widths", "words"),
    [
        (standard, (32, 64), "three widths"),
        (lambda n: 3, (8, 16, 32), "returns a model"),
        (lambda n: nn.Linear(16, 4), (8, 16, 32), "wider networks"),
    ],
)
def test_bad_input_is_one_sentence(factory, widths, words):
    with pytest.raises(InputError, match=words):
        ng.width_check(factory, widths=widths, data=batch())


def test_a_run_that_breaks_says_where():
    def broken(m):
        return torch.optim.SGD(m.parameters(), lr=1e30)

    with pytest.raises(NonFiniteError, match="width 32"):
        ng.width_check(standard, widths=WIDTHS, data=batch(), optimizer=broken)
