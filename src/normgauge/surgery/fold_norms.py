"""`fold_norms`: normalizers, or their gains, put into the linear maps beside them."""

from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from normgauge.network import Graph, Step, exchange, fold_channels
from normgauge.results import instrument
from normgauge.surgery._maps import affine_of, layer_problem, response_to_constant, set_parameter
from normgauge.surgery._operate import Options, Patient, operate
from normgauge.surgery._stream import Anatomy, fold_gains
from normgauge.surgery._surgery import Surgery


@instrument
def fold_norms(model: nn.Module, *, example: Any, untie: bool = False, **options: Unpack[Options]) -> Surgery:
    r"""Fold BatchNorm with stored statistics, and gains and shifts of LayerNorm and RMSNorm, into the maps beside them.

    * BatchNorm after a Linear, Conv or ConvTranspose that only it reads: $W' = \mathrm{diag}(f) W$, $b' = f b + s$ with
      $f = \gamma / \sqrt{v + \epsilon}$, $s = \beta - f m$; before one: $W' = W \mathrm{diag}(f)$, $b' = b + W s$,
      where no padding of zeros comes between. An Identity stands in its place.
    * LayerNorm or RMSNorm whose output only linear maps read: $W' = W \mathrm{diag}(g)$, $b' = b + W \beta$; the gain
      (w, or 1 + w) is one and the shift zero afterwards.

    `untie` gives maps that share their weight with another layer (output embeddings) a weight of their own.

    Kind: exact in eval mode, or refused. Cost: five forward passes.

    Examples:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
        >>> done = fold_norms(net, example=torch.randn(5, 3))
        >>> done.model[1], done.proof < 1e-10
        (Identity(), True)

    References: graef2024.
    """

    def edit(patient: Patient) -> str:
        graph = patient.graph
        for step in graph.steps:
            if isinstance(step.module, _BatchNorm):
                _fold_batch(patient, graph, step)
        fold_gains(patient, Anatomy(patient.model, graph), untie=untie)
        return "exact in eval mode"

    return operate("fold_norms", model, example, edit, **options)


def _fold_batch(patient: Patient, graph: Graph, step: Step) -> None:
    affine = affine_of(cast(nn.Module, step.module), step)
    affine = "it is called several times" if graph.times(step.name) > 1 else affine
    if isinstance(affine, str):
        return patient.refuse(step.name, affine)
    before = _into_producer(patient, graph, step, *affine)
    after = _into_readers(patient, graph, step, *affine) if before else ""
    if after:
        return patient.refuse(step.name, f"{before}; {after}")
    return exchange(patient.model, step.name, nn.Identity())


def _into_producer(patient: Patient, graph: Graph, step: Step, factors: Tensor, shift: Tensor) -> str:
    if step.reads[0] < 0:
        return "the model's input stands before it"
    source = graph.steps[step.reads[0]]
    problem = layer_problem(patient.model, graph, source)
    if problem:
        return problem
    if len(graph.readers(source.number)) > 1 or source.number in graph.outputs:
        return f"{source.name} is read elsewhere too"
    layer = patient.model.get_submodule(source.name)
    if isinstance(layer, nn.Linear) and len(source.outputs[0]) > 2:
        return f"the channels of {step.name} are not those of {source.name}"
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    set_parameter(layer, "weight", fold_channels(layer, weight, factors, after=True))
    set_parameter(layer, "bias", shift if bias is None else bias * factors + shift, like=weight)  # type: ignore[operator]
    patient.did(step.name, f"folded into {source.name} before it")
    return ""


def _into_readers(patient: Patient, graph: Graph, step: Step, factors: Tensor, shift: Tensor) -> str:
    readers = graph.readers(step.number)
    if step.number in graph.outputs or not readers:
        return "its output is the model's"
    for reader in readers:
        problem = layer_problem(patient.model, graph, reader) or _border_problem(reader, shift)
        if problem:
            return problem
    for reader in readers:
        layer = patient.model.get_submodule(reader.name)
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        constant = 0.0 if not bool(shift.any()) else response_to_constant(layer, shift)
        set_parameter(layer, "weight", fold_channels(layer, weight, factors, after=False))
        if isinstance(constant, Tensor):
            set_parameter(layer, "bias", constant if bias is None else bias + constant, like=weight)  # type: ignore[operator]
    patient.did(step.name, f"folded into {', '.join(reader.name for reader in readers)} after it")
    return ""


def _border_problem(reader: Step, shift: Tensor) -> str:
    """Return why a shift before a layer is no bias after it: what is padded, or not covered, lacks the shift."""
    layer = reader.module
    if isinstance(layer, nn.Linear):
        return "" if len(reader.inputs[0]) == 2 else f"{reader.name} reads another axis than the channels"
    assert isinstance(layer, _ConvNd)
    if not bool(torch.any(shift != 0)):
        return ""
    if layer.transposed:
        return f"a shift does not go through the borders of {reader.name}"
    padded = layer.padding_mode == "zeros" and (layer.padding == "same" or any(layer.padding))
    return f"a shift does not go through the padding of {reader.name}" if padded and layer.padding != "valid" else ""
