"""The register: names, errors, factories that fit every width, and citations that exist."""

import dataclasses

import pytest
import torch

import normgauge as ng
from normgauge import errors
from normgauge.nn import registry
from normgauge.references import bibliography

ORDERED = {
    "none", "batch", "layer", "group", "instance", "rms", "batch_renorm", "lp1_batch", "lp2_batch", "lpinf_batch",
    "noisy_batch", "whitening", "ghost_batch", "norm_propagation", "frozen_batch", "stat", "weight",
}  # fmt: skip


def test_the_names_of_the_contract_are_there():
    assert set(registry.names()) >= ORDERED
    assert registry.names()[0] == "none"
    assert ng.nn.registry is registry


@pytest.mark.parametrize("name", registry.names())
def test_declarations_are_frozen_complete_and_cited(name):
    declaration = registry.get(name)
    assert declaration.name == name
    assert declaration.title and declaration.axes and declaration.formula and declaration.behaviour.endswith(".")
    assert declaration.cite and set(declaration.cite) <= set(bibliography())
    with pytest.raises(dataclasses.FrozenInstanceError):
        declaration.name = "other"


@pytest.mark.parametrize("spatial", [0, 1, 2, 3])
@pytest.mark.parametrize("channels", [1, 7, 48])
@pytest.mark.parametrize("name", registry.names())
def test_every_normalizer_fits_every_width(name, channels, spatial):
    declaration = registry.get(name)
    if declaration.placement == "weights":
        kind = [torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d][spatial]
        sizes = (5, channels) if spatial == 0 else (5, channels, 2)
        module = kind(*sizes)
        assert declaration.wrap(module) is module
        assert module(torch.randn(3, 5, *(4,) * spatial)).isfinite().all()
    else:
        x = torch.randn(6, channels, *(4,) * spatial)
        layer = declaration.layer(channels, spatial)
        assert layer(x).shape == x.shape
        assert layer.eval()(x).isfinite().all()


def test_unknown_names_bring_the_nearest():
    with pytest.raises(errors.UnknownNameError, match="Did you mean 'layer'"):
        registry.get("layr")
    with pytest.raises(errors.UnknownNameError, match="Did you mean 'center'"):
        registry.get("stat:centre=mean")
    with pytest.raises(errors.UnknownNameError, match="Did you mean 'median'"):
        registry.get("stat:center=medain")
    with pytest.raises(errors.UnknownNameError, match="scale of StatNorm"):
        registry.get("stat:scale=size")
    with pytest.raises(errors.InputError, match="key=value"):
        registry.get("stat:median")
    with pytest.raises(errors.InputError, match="quantile is a number"):
        registry.get("stat:quantile=much")
    with pytest.raises(errors.InputError, match="p is at least 1"):
        registry.get("stat:scale=l0.5")


def test_design_points_set_the_layer():
    layer = registry.get("stat:axes=group,center=median,scale=quantile,quantile=0.1").layer(16, 2)
    assert (layer.axes, layer.center, layer.scale, layer.quantile, layer.groups) == (
        "group", "median", "quantile", 0.1, 8,
    )  # fmt: skip


def test_a_name_is_registered_once_and_without_colon():
    batch = registry.get("batch")
    with pytest.raises(errors.InputError, match="already registered"):
        registry.register(batch)
    with pytest.raises(errors.InputError, match="colon"):
        registry.register(dataclasses.replace(batch, name="batch:2"))


def test_a_declaration_says_what_is_missing():
    batch = registry.get("batch")
    with pytest.raises(errors.InputError, match="needs make"):
        dataclasses.replace(batch, make=None)
    with pytest.raises(errors.InputError, match="placement is one of"):
        dataclasses.replace(batch, placement="inside")
    with pytest.raises(errors.InputError, match="per is one of"):
        registry.Invariance("input", "scale", "pixel")
    with pytest.raises(errors.InputError, match=r"Use wrap\(module\)"):
        registry.get("weight").layer(4, 0)
    with pytest.raises(errors.InputError, match="Put layer"):
        batch.wrap(torch.nn.Linear(2, 2))
    with pytest.raises(errors.InputError, match="at least two axes"):
        registry.get("weight").wrap(torch.nn.ReLU())
    with pytest.raises(errors.InputError, match="spatial is 0, 1, 2 or 3"):
        batch.layer(4, 5)
