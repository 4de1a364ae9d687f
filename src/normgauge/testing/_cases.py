"""Cases for conformance: shapes, dtypes, memory formats, and modules whose state a call does not disturb."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normgauge.nn.registry import Declaration
from normgauge.rng import generator

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
FORMATS = ("contiguous", "channels_last", "strided")
VANISHING = 1e-300  # an eps that adds nothing in any precision; torch's batch norm refuses 0

Build = Callable[[int, int], torch.nn.Module]


@dataclass(frozen=True)
class Case:
    """One drawn situation."""

    seed: int
    batch: int
    channels: int
    spatial: int
    side: int
    dtype: torch.dtype
    layout: str
    eps: float

    def inputs(self, channels: int | None = None) -> Tensor:
        """Return inputs of the case; in bfloat16 on a grid, so that sums and doublings are exact."""
        shape = (self.batch, channels or self.channels, *(self.side,) * self.spatial)
        x = torch.randn(shape, generator=generator(self.seed), dtype=torch.float64)
        if self.dtype == torch.bfloat16:
            x = (x * 16).round().clamp(-48, 48) / 16
        return lay_out(x.to(self.dtype), self.layout)

    def factors(self, shape: tuple[int, ...], salt: int = 1) -> Tensor:
        """Return positive factors, powers of two in bfloat16."""
        powers = torch.randint(-2, 3, shape, generator=generator(self.seed + salt)).double()
        if self.dtype == torch.bfloat16:
            return 2.0**powers
        return 2.0**powers * (1 + 0.3 * torch.rand(shape, generator=generator(self.seed + salt), dtype=torch.float64))

    def shifts(self, shape: tuple[int, ...], salt: int = 2) -> Tensor:
        """Return shifts, whole numbers in bfloat16."""
        draw = torch.randint(-4, 5, shape, generator=generator(self.seed + salt)).double()
        return draw if self.dtype == torch.bfloat16 else draw * 0.9


def lay_out(x: Tensor, layout: str) -> Tensor:
    """Return x with the memory layout of that name, equal in value."""
    if layout == "channels_last" and x.dim() >= 4:
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "strided":
        return torch.stack([x, x], dim=-1)[..., 0]
    return x.contiguous()


def strategy(strategies: Any, spatial: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = DTYPES) -> Any:
    """Return a Hypothesis strategy of cases."""
    return strategies.builds(
        Case,
        seed=strategies.integers(0, 10**6),
        batch=strategies.integers(2, 6),
        channels=strategies.sampled_from([1, 2, 3, 4, 6, 16, 24]),
        spatial=strategies.sampled_from(spatial),
        side=strategies.integers(2, 4),
        dtype=strategies.sampled_from(dtypes),
        layout=strategies.sampled_from(FORMATS),
        eps=strategies.sampled_from([1e-3, 1e-5, VANISHING]),
    )


def prepare_module(build: Build, case: Case, mode: str, eps: float) -> torch.nn.Module:
    """Return a module of the case with lively parameters, the given eps in every part, in the given mode."""
    module = build(case.channels, case.spatial).double()
    draw = generator(case.seed + 7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=draw, dtype=torch.float64))
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and name.endswith(("var", "moment", "mean")):
                buffer.add_(0.3 * torch.rand(buffer.shape, generator=draw, dtype=torch.float64))
    for part in module.modules():
        if isinstance(getattr(part, "eps", None), float):
            setattr(part, "eps", eps)  # noqa: B010 (modules type their attributes as tensors)
    return module.to(case.dtype).train(mode == "train")


def call(module: torch.nn.Module, x: Tensor) -> Tensor:
    """Return the output of a copy, so that running statistics and noise of the module stay where they are."""
    return copy.deepcopy(module)(x)


def builder(declaration: Declaration) -> Build:
    """Return `(channels, spatial) -> module` for any placement; weight normalizers wrap a layer of three inputs."""
    if declaration.placement != "weights":
        return declaration.layer
    return lambda channels, spatial: declaration.wrap(linear_map(3, channels, spatial))


def linear_map(inputs: int, outputs: int, spatial: int, *, bias: bool = True) -> torch.nn.Module:
    """Return a Linear layer, or a convolution of kernel 2 with as many axes of space."""
    if spatial == 0:
        return torch.nn.Linear(inputs, outputs, bias=bias)
    kinds = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
    return kinds[spatial](inputs, outputs, 2, padding=1, bias=bias)
