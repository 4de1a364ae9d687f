"""`layer_to_rms`: a stream whose mean is zero needs no LayerNorm to take it away."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from normgauge.network import exchange
from normgauge.results import instrument
from normgauge.surgery._maps import Norm, Site
from normgauge.surgery._operate import Options, Patient, operate
from normgauge.surgery._stream import Anatomy, Stream, give_own_weight
from normgauge.surgery._surgery import Surgery


class ShiftedRMSNorm(nn.RMSNorm):
    """RMSNorm with a shift: what LayerNorm is on inputs of mean zero."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input times the gain, plus the shift."""
        return super().forward(input) + self.bias


@instrument
def layer_to_rms(model: nn.Module, *, example: Any, untie: bool = False, **options: Unpack[Options]) -> Surgery:
    r"""Replace LayerNorm by RMSNorm where all that writes into its stream can be centred.

    With $P = I - 11^T/d$: $\mathrm{LN}(x) = \mathrm{RMS}(Px)$ with the same eps, gain and shift. Every linear map and
    embedding that writes into the stream is multiplied by P, so that its mean is zero before anything is normalized.
    Refused where a normalizer writes into the stream (post-norm), or something else than LayerNorm reads it.

    Kind: exact in eval mode, or refused. Cost: five forward passes.

    Args:
        model: any model.
        example: a tensor, tuple or mapping of inputs.
        untie: give a map that shares its weight with a centred embedding a weight of its own.

    Examples:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> layer_to_rms(net, example=torch.randn(5, 3)).model[1].__class__.__name__
        'ShiftedRMSNorm'

    References: ashkboos2024.
    """

    def edit(patient: Patient) -> str:
        centre_streams(patient, Anatomy(patient.model, patient.graph), untie=untie)
        return "exact in eval mode"

    return operate("layer_to_rms", model, example, edit, **options)


def centre_streams(patient: Patient, anatomy: Anatomy, *, untie: bool) -> None:
    """Centre what writes into streams that only LayerNorm reads, and replace it; refuse the others."""
    for stream in anatomy.streams(through_norms=False):
        centred = {name: norm for name, norm in stream.norms.items() if norm.centred}
        if not centred:
            continue
        problems = stream.problems + [(name, "it reads the mean of the stream") for name in stream.readers]
        problems += [(name, "it reads the mean of the stream") for name in stream.norms if name not in centred]
        shared = _shared_readers(anatomy, stream)
        if shared and not untie and not _mean_free(anatomy, shared):
            problems.append((next(iter(shared)), "its weight is tied to what writes; untie=True gives it its own"))
        if problems:
            for name in centred:
                patient.refuse(name, "; ".join(f"{place}: {why}" for place, why in problems[:2]))
            continue
        if untie:
            for site in shared.values():
                give_own_weight(patient.model, site)
        for site in {id(site.parameter): site for site in stream.writers.values()}.values():
            offset = site.offset
            site.set(site.matrix - site.matrix.mean(0), None if offset is None else offset.detach() - offset.mean())
        for name, norm in centred.items():
            exchange(patient.model, name, _rms_of(norm))
            patient.did(name, f"LayerNorm -> RMSNorm; centred: {', '.join(stream.writers)}")


def _shared_readers(anatomy: Anatomy, stream: Stream) -> dict[str, Site]:
    """Return the maps outside of the stream's writers that have the weight of one."""
    own = {id(site.parameter) for site in stream.writers.values()}
    maps = {anatomy.graph.steps[number].name: mapping.reads for number, mapping in anatomy.maps.items()}
    return {name: s for name, s in maps.items() if id(s.parameter) in own and name not in stream.writers}


def _mean_free(anatomy: Anatomy, readers: dict[str, Site]) -> bool:
    """Tell whether maps read nothing but outputs of mean zero: of LayerNorm with gain one and shift zero."""
    steps = [step for step in anatomy.graph.steps if step.name in readers]
    sources = [anatomy.origin(step) for step in steps]
    return all(norm is not None and norm.centred and norm.is_plain() for norm in sources)


def _rms_of(norm: Norm) -> nn.Module:
    scale, shift = norm.scale(), getattr(norm.module, norm.shift).detach() if norm.shift else None
    width = norm.width
    new = nn.RMSNorm(width, norm.eps) if shift is None else ShiftedRMSNorm(width, norm.eps)
    new = new.double().to(norm.device)
    with torch.no_grad():
        new.weight.fill_(1.0)
        if scale is not None:
            new.weight.copy_(scale)
            new.weight.requires_grad_(getattr(norm.module, norm.gain).requires_grad)
        if isinstance(new, ShiftedRMSNorm) and shift is not None:
            new.bias.copy_(shift)
            new.bias.requires_grad_(getattr(norm.module, norm.shift).requires_grad)
    return new.train(norm.module.training)
