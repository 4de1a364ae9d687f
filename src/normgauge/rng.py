"""Random numbers that leave no trace: own generators, and a global state that comes back bit for bit."""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from normgauge.threads import MEASURING

Restore = Callable[[], object]


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator of our own, so that drawing never touches the global stream.

    Examples:
        >>> a = torch.rand(2, generator=generator(0))
        >>> bool((a == torch.rand(2, generator=generator(0))).all())
        True
    """
    return torch.Generator(device=device).manual_seed(seed)


def save_global_states() -> Restore:
    """Return what puts Python's, NumPy's and torch's global streams back where they are now."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    cpu_state = torch.random.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.random.set_rng_state(cpu_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)

    return restore


def save_generator(value: Any) -> Restore | None:
    """Return what puts a generator (torch's, NumPy's, Python's) back into its state; `None` for anything else.

    Examples:
        >>> own = generator(0)
        >>> restore, first = save_generator(own), float(torch.rand(1, generator=own))
        >>> _ = restore()
        >>> float(torch.rand(1, generator=own)) == first
        True
    """
    if isinstance(value, np.random.Generator):
        bits, inner = value.bit_generator, value.bit_generator.state
        return lambda: setattr(bits, "state", inner)
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        source: Any = value
        return functools.partial(source.set_state, source.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    return None


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global random states on exit, also after an exception.

    One thread at a time is inside: two would draw from each other's stream.
    """
    with MEASURING:
        restore = save_global_states()
        try:
            yield
        finally:
            restore()


def seed_everything(seed: int) -> None:
    """Seed the global streams (Python, NumPy, torch); call it inside `preserved_rng`.

    CUDA is seeded only if it is already in use: seeding it otherwise would leave a pending call behind.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
