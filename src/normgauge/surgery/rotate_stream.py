"""Another basis of the stream, the same function: centred (`layer_to_rms`), or rotated (`rotate_stream`)."""

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, unknown_name
from normgauge.network import exchange
from normgauge.results import instrument
from normgauge.rng import generator
from normgauge.surgery._maps import Norm, Site
from normgauge.surgery._operate import Options, Patient, RefusedError, hooked, operate, run
from normgauge.surgery._stream import Anatomy, Stream, fold_gains, give_own_weight
from normgauge.surgery._surgery import Surgery

_ROTATIONS = ("random", "pca", "hadamard")


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
    Refused where a normalizer writes into the stream (post-norm), or something else than LayerNorm reads it. `untie`
    gives a map that shares its weight with a centred embedding a weight of its own.

    Kind: exact in eval mode, or refused. Cost: five forward passes.

    Examples:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> layer_to_rms(net, example=torch.randn(5, 3)).model[1].__class__.__name__
        'ShiftedRMSNorm'

    References: ashkboos2024.
    """

    def edit(patient: Patient) -> str:
        _centre_streams(patient, Anatomy(patient.model, patient.graph), untie=untie)
        return "exact in eval mode"

    return operate("layer_to_rms", model, example, edit, **options)


def _centre_streams(patient: Patient, anatomy: Anatomy, *, untie: bool) -> None:
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
    sources = [anatomy.origin(step) for step in anatomy.graph.steps if step.name in readers]
    return all(norm is not None and norm.centred and norm.is_plain() for norm in sources)


def _rms_of(norm: Norm) -> nn.Module:
    scale = norm.scale()
    new = (ShiftedRMSNorm if norm.shift else nn.RMSNorm)(norm.width, norm.eps).double().to(norm.device)
    with torch.no_grad():
        if scale is not None:
            new.weight.copy_(scale).requires_grad_(getattr(norm.module, norm.gain).requires_grad)
        if isinstance(new, ShiftedRMSNorm):
            shift = getattr(norm.module, norm.shift)
            new.bias.copy_(shift.detach()).requires_grad_(shift.requires_grad)
    return new.train(norm.module.training)


@instrument
def rotate_stream(
    model: nn.Module,
    rotation: str | Tensor | None = None,
    *,
    example: Any,
    seed: int = 0,
    untie: bool = False,
    **options: Unpack[Options],
) -> Surgery:
    r"""Rotate the residual stream: $x \to Q^T x$ in all that writes it, $W \to W Q$ in all that reads it.

    $\mathrm{RMS}(Q^T x) = Q^T \mathrm{RMS}(x)$ where the gain is one: gains are folded first, and LayerNorm becomes
    RMSNorm (`layer_to_rms`) where there is any. The stream is the largest set of values that additions, shape changes
    and normalizers join; refused where a gain stands between it and a sum (sandwich and post-norm), where something
    else than a linear map reads or writes it, and where it is an input or output of the model.

    The rotation is "random" (the default; Haar, by `seed`), "pca" (axes of the stream on the example, largest variance
    first), "hadamard" (with random signs; for widths that are powers of two) or an orthogonal matrix Q. `untie` gives
    maps that share their weight with another layer a weight of their own.

    Kind: exact in eval mode, or refused. Cost: five forward passes, six with `pca`.

    References: ashkboos2024, ashkboos2024quarot.
    """
    if isinstance(rotation, str) and rotation not in _ROTATIONS:
        raise unknown_name("rotation", rotation, _ROTATIONS)

    def edit(patient: Patient) -> str:
        anatomy = Anatomy(patient.model, patient.graph)
        before = _main_stream(anatomy)
        fold_gains(patient, anatomy, untie=untie, only=before.norms)
        if any(norm.centred for norm in before.norms.values()):
            _centre_streams(patient, anatomy, untie=untie)
            anatomy = Anatomy(patient.model, patient.graph)
        stream = _main_stream(anatomy)
        why = {name: f"its gain does not turn and cannot be folded: {reason}" for name, reason in patient.refused}
        problems = [(name, why[name]) for name in why if name in stream.norms]
        problems += stream.problems + [
            (name, "it does not commute with rotations (its gain, or LayerNorm's mean)")
            for name, norm in stream.norms.items()
            if not (norm.equivariant and norm.is_plain()) and name not in dict(problems)
        ]
        if problems:
            raise RefusedError(*problems)
        width = next(iter(stream.norms.values())).width
        changed = _rotate(patient, stream, _matrix(rotation, width, seed, patient, stream))
        name = rotation if isinstance(rotation, str) else "random" if rotation is None else "given"
        for norm in stream.norms:
            patient.did(norm, "turns with the stream")
        patient.did("(stream)", f"{name} rotation of width {width} in {changed} weights")
        return f"exact in eval mode; rotation {name}"

    return operate("rotate_stream", model, example, edit, **options)


def _main_stream(anatomy: Anatomy) -> Stream:
    streams = anatomy.streams(through_norms=True)
    if not streams:
        raise RefusedError(("(model)", "no normalizer over the last axis reads a stream"))
    return streams[0]


def _rotate(patient: Patient, stream: Stream, matrix: Tensor) -> int:
    """Write the new weights, once for each; refuse weights that other layers have too, or that would need two."""
    new: dict[int, tuple[Any, Tensor, Tensor | None]] = {}
    for sites, reading in ((stream.readers, True), (stream.writers, False)):
        for name, site in sites.items():
            turned = site.matrix @ matrix if reading else matrix.T @ site.matrix
            stored = turned.T if site.transposed else turned
            offset = None if reading or site.offset is None else matrix.T @ site.offset.detach()
            if id(site.parameter) in new and not torch.allclose(new[id(site.parameter)][1], stored, atol=1e-12):
                raise RefusedError((name, "its weight is tied to a layer that would need another one"))
            new[id(site.parameter)] = (site, stored, offset)
    names = [id(value) for _, value in patient.model.named_parameters(remove_duplicate=False)]
    uses = [id(site.parameter) for site in (*stream.readers.values(), *stream.writers.values())]
    for key, (site, stored, offset) in new.items():
        if names.count(key) > uses.count(key):
            raise RefusedError(("(stream)", "a weight of the stream is tied to a layer outside of it"))
        site.set(stored.T if site.transposed else stored, offset)
    return len(new)


def _matrix(rotation: str | Tensor | None, width: int, seed: int, patient: Patient, stream: Stream) -> Tensor:
    device = next(patient.model.parameters()).device
    source = generator(seed)
    if isinstance(rotation, Tensor):
        given = rotation.detach().double().to(device)
        square = given.shape == (width, width)
        gap = float((given.T @ given - torch.eye(width, device=device)).abs().max()) if square else float("inf")
        if gap > 1e-6:
            rule = f"rotation is an orthogonal matrix of width {width}"
            got = f"shape {tuple(given.shape)}, |QQ' - I| = {gap:.2g}"
            raise InputError("rotate_stream", rule, got, "Take the Q of torch.linalg.qr")
        return _orthogonal(given)  # to float64
    if rotation == "pca":
        return _principal_axes(patient, stream)
    if rotation == "hadamard":
        if width & (width - 1):
            rule = "a Hadamard matrix of this kind has a power of two as its width"
            raise InputError("rotate_stream", rule, str(width), "Use rotation='random'")
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < width:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        signs = torch.randint(0, 2, (width, 1), generator=source).double() * 2 - 1
        return (signs * matrix / width**0.5).to(device)
    return _orthogonal(torch.randn(width, width, generator=source, dtype=torch.float64)).to(device)


def _orthogonal(matrix: Tensor) -> Tensor:
    q, r = torch.linalg.qr(matrix)
    return q * r.diagonal().sign()


def _principal_axes(patient: Patient, stream: Stream) -> Tensor:
    """Return the axes of what the stream's normalizers read on the example, largest variance first."""
    seen: list[Tensor] = []

    def note(_: nn.Module, args: Any) -> None:
        seen.append(args[0].detach().flatten(0, -2))

    with hooked(norm.module.register_forward_pre_hook(note) for norm in stream.norms.values()):
        run(patient.model, patient.inputs, patient.forward, "eval")
    values = torch.cat(seen)
    return torch.linalg.eigh(values.T @ values / len(values))[1].flip(1)
