"""Data of a chosen condition number for the studies of GDNP: Gaussian and other, with a target or two classes."""

import torch
from torch import Tensor

from normgauge.lab import data as datasets
from normgauge.rng import generator

FEATURES = 16
# The distance of the class means in units of the noise: classes overlap, so that a best length exists.
SEPARATION = 1.0


def spectrum(condition: float) -> Tensor:
    """Return eigenvalues from 1 down to 1 / condition, evenly on a log scale."""
    return torch.logspace(0, -1, FEATURES, base=condition, dtype=torch.float64)


def unit_noise(kind: str, samples: int, source: torch.Generator) -> Tensor:
    """Return `[samples, FEATURES]` of mean 0 and variance 1: gaussian, laplace (heavy tails), exponential (skewed)."""
    shape = (samples, FEATURES)
    if kind == "gaussian":
        return torch.randn(shape, generator=source, dtype=torch.float64)
    drawn = -torch.rand(shape, generator=source, dtype=torch.float64).clamp_min(1e-300).log()
    if kind == "exponential":
        return drawn - 1
    sign = torch.where(torch.rand(shape, generator=source) < 0.5, -1.0, 1.0).double()
    return sign * drawn / 2**0.5


def rotation(source: torch.Generator) -> Tensor:
    """Return a random orthogonal matrix."""
    return torch.linalg.qr(torch.randn(FEATURES, FEATURES, generator=source, dtype=torch.float64))[0]


def regression(kind: str, condition: float, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs whose sample second moment has exactly this condition number, and noisy linear targets."""
    source = generator(seed)
    white = _whiten(unit_noise(kind, samples, source))
    x = white * spectrum(condition).sqrt() @ rotation(source).T
    truth = torch.randn(FEATURES, generator=source, dtype=torch.float64)
    return x, x @ truth + 0.1 * torch.randn(samples, generator=source, dtype=torch.float64)


def two_classes(kind: str, condition: float, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return centred inputs of this condition number and labels -1, 1.

    Synthetic: `x = y m + noise`, so that `-y x` is Gaussian where the noise is. `digits`: even against odd from the
    first principal components, whitened and coloured like the others; which samples is the seed's choice.
    """
    source = generator(seed)
    if kind == "digits":
        inputs, classes = datasets.load("digits").train
        rows = torch.randperm(len(classes), generator=source)[:samples]
        flat = inputs[rows].flatten(1).double()
        centred = flat - flat.mean(0)
        axes = torch.linalg.svd(centred, full_matrices=False)[2][:FEATURES]
        white, y = _whiten(centred @ axes.T), torch.where(classes[rows] % 2 == 0, 1.0, -1.0).double()
    else:
        y = torch.where(torch.arange(samples) % 2 == 0, 1.0, -1.0).double()
        mean = torch.randn(FEATURES, generator=source, dtype=torch.float64)
        noise = unit_noise(kind, samples, source)
        white = _whiten(y[:, None] * SEPARATION * mean / mean.norm() + noise)
    return white * spectrum(condition).sqrt() @ rotation(source).T, y


def _whiten(x: Tensor) -> Tensor:
    """Return x with sample second moment I, turned as little as possible."""
    values, vectors = torch.linalg.eigh(x.T @ x / len(x))
    return x @ vectors * values.rsqrt() @ vectors.T


def gaussian_moments(condition: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return mean u and second moment S of the Gaussian `-y x` of `two_classes`, for the exact expectation."""
    source = generator(seed)
    mean = torch.randn(FEATURES, generator=source, dtype=torch.float64)
    turn, scale = rotation(source), spectrum(condition).sqrt()
    white = -mean / mean.norm() * SEPARATION / (1 + SEPARATION**2) ** 0.5
    return turn @ (scale * white), turn * scale.square() @ turn.T
