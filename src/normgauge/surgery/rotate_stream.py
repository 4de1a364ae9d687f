"""`rotate_stream`: another basis of the stream, the same function."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, unknown_name
from normgauge.network import KeepDouble
from normgauge.objective import untouched
from normgauge.results import instrument, spend
from normgauge.rng import generator
from normgauge.surgery._operate import Options, Patient, RefusedError, operate
from normgauge.surgery._stream import Anatomy, Stream, fold_gains
from normgauge.surgery._surgery import Surgery
from normgauge.surgery.layer_to_rms import centre_streams

_ROTATIONS = ("random", "pca", "hadamard")


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

    Kind: exact in eval mode, or refused. Cost: five forward passes, six with `pca`.

    Args:
        model: any model.
        rotation: "random" (the default; Haar), "pca" (axes of the stream on the example, largest variance first),
            "hadamard" (with random signs; for widths that are powers of two) or an orthogonal matrix Q.
        example: a tensor, tuple or mapping of inputs.
        seed: of the random ones.
        untie: give maps that share their weight with another layer a weight of their own.

    References: ashkboos2024, ashkboos2024quarot.
    """
    if isinstance(rotation, str) and rotation not in _ROTATIONS:
        raise unknown_name("rotation", rotation, _ROTATIONS)

    def edit(patient: Patient) -> str:
        anatomy = Anatomy(patient.model, patient.graph)
        before = _main_stream(anatomy)
        fold_gains(patient, anatomy, untie=untie, only=before.norms)
        if any(norm.centred for norm in before.norms.values()):
            centre_streams(patient, anatomy, untie=untie)
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
        matrix = _matrix(rotation, width, seed, patient, stream)
        changed = _rotate(patient, stream, matrix)
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
    names: dict[int, int] = {}
    for _, value in patient.model.named_parameters(remove_duplicate=False):
        names[id(value)] = names.get(id(value), 0) + 1
    uses = [id(site.parameter) for site in (*stream.readers.values(), *stream.writers.values())]
    for key, (site, stored, offset) in new.items():
        if names[key] > uses.count(key):
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
        return torch.linalg.qr(given)[0] * torch.linalg.qr(given)[1].diagonal().sign()  # orthogonal to float64
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
    q, r = torch.linalg.qr(torch.randn(width, width, generator=source, dtype=torch.float64))
    return (q * r.diagonal().sign()).to(device)


def _principal_axes(patient: Patient, stream: Stream) -> Tensor:
    """Return the axes of what the stream's normalizers read on the example, largest variance first."""
    seen: list[Tensor] = []
    handles = [
        norm.module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().flatten(0, -2)))
        for norm in stream.norms.values()
    ]
    spend("forwards")
    try:
        with untouched(patient.model, "eval", 0), KeepDouble():
            patient.forward(patient.model, patient.inputs)
    finally:
        for handle in handles:
            handle.remove()
    values = torch.cat(seen)
    return torch.linalg.eigh(values.T @ values / len(values))[1].flip(1)
