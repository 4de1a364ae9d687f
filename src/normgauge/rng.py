"""Random numbers that leave no trace: own generators, and a global state that comes back bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator of our own, so that drawing never touches the global stream.

    Examples:
        >>> a = torch.rand(2, generator=generator(0))
        >>> bool((a == torch.rand(2, generator=generator(0))).all())
        True
    """
    return torch.Generator(device=device).manual_seed(seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global random states on exit, also after an exception."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    cpu_state = torch.random.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.random.set_rng_state(cpu_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


def seed_everything(seed: int) -> None:
    """Seed the global streams (Python, NumPy, torch); call it inside `preserved_rng`.

    CUDA is seeded only if it is already in use: seeding it otherwise would leave a pending call behind.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
