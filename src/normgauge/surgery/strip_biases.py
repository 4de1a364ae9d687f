"""`strip_biases`: biases that the normalizer behind them takes away again."""

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normgauge.network import KeepDouble, Step, role_of
from normgauge.objective import untouched
from normgauge.results import instrument
from normgauge.rng import generator
from normgauge.surgery._maps import layer_problem
from normgauge.surgery._operate import Options, Patient, operate
from normgauge.surgery._surgery import Surgery


@instrument
def strip_biases(model: nn.Module, *, example: Any, **options: Unpack[Options]) -> Surgery:
    r"""Remove the biases of layers before normalizers that subtract each channel's own mean (BatchNorm, InstanceNorm).

    $N(x + b) = N(x)$ with the statistics of the batch; with stored ones $(x + b) - m = x - (m - b)$, so that the
    running mean becomes m - b. LayerNorm and GroupNorm subtract the mean of several channels: their biases live.

    Kind: exact in both modes, or refused. Cost: nine forward passes.

    Examples:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> done = strip_biases(net, example=torch.randn(5, 3))
        >>> done.model[0].bias is None, done.model[2].bias is None
        (True, False)
    """

    def edit(patient: Patient) -> str:
        graph = patient.graph
        for step in graph.steps:
            if step.module is None or role_of(step.module) != "normalizer" or not step.reads or step.reads[0] < 0:
                continue
            source = graph.steps[step.reads[0]]
            layer = source.module
            if layer is None or not isinstance(getattr(layer, "bias", None), nn.Parameter):
                continue
            problem = layer_problem(patient.model, graph, source)
            if not problem and (len(graph.readers(source.number)) > 1 or source.number in graph.outputs):
                problem = f"{source.name} is read elsewhere too, where its bias lives"
            if not problem and graph.times(step.name) > 1:
                problem = f"{step.name} is called several times: one running mean cannot lose several biases"
            if problem or not _forgets_shifts(step):
                reason = problem or f"{step.name} takes away the mean of several channels, or none: the bias lives"
                patient.refuse(source.name, reason)
                continue
            bias, mean = layer.bias, getattr(step.module, "running_mean", None)
            assert isinstance(bias, Tensor)
            if mean is not None:
                mean -= bias.detach()
            layer.register_parameter("bias", None)
            corrected = "; its running mean corrected" if mean is not None else ""
            patient.did(source.name, f"bias removed, dead before {step.name}{corrected}")
        return "exact in train and eval mode"

    return operate("strip_biases", model, example, edit, modes=("eval", "train"), **options)


def _forgets_shifts(step: Step) -> bool:
    """Tell whether a normalizer, with the statistics of its inputs, gives the same for other constants per channel."""
    norm, shape = step.module, step.inputs[0]
    assert norm is not None
    if len(shape) < 2:
        return False
    source = generator(0)
    inputs = torch.randn((max(shape[0], 4), *shape[1:]), generator=source, dtype=torch.float64)
    shift = torch.randn(1, shape[1], *(1,) * (len(shape) - 2), generator=source, dtype=torch.float64)
    device = next((value.device for value in (*norm.parameters(), *norm.buffers())), inputs.device)

    def made(values: Tensor) -> Tensor:
        state = {name: value.clone() for name, value in norm.named_buffers()}
        with torch.no_grad(), untouched(norm, "train", 0), KeepDouble():
            return functional_call(norm, state, (values.to(device),))

    try:
        return torch.allclose(made(inputs), made(inputs + 3 * shift), rtol=1e-6, atol=1e-6)
    except (ValueError, RuntimeError):
        return False
