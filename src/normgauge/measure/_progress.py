"""Progress of a long measurement: on stderr, and only where a person is watching a terminal."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Progress = Callable[[int, Sequence[float]], None]


@contextmanager
def residuals_shown(what: str, progress: Progress | None) -> Iterator[Progress | None]:
    """Give the caller's own callback, or one that shows products and residuals on a terminal, or none."""
    if progress is not None or not sys.stderr.isatty() or _another_display():
        yield progress
        return
    from rich.console import Console
    from rich.status import Status

    with Status(f"{what}: first product", console=Console(stderr=True)) as status:

        def show(products: int, residuals: Sequence[float]) -> None:
            numbers = " ".join(f"{value:.0e}" for value in residuals)
            status.update(f"{what}: {products} products, relative residuals {numbers}")

        yield show


def _another_display() -> bool:
    """Say whether somebody else draws on this terminal: the parent of a worker, or a live bar of this process."""
    from rich.file_proxy import FileProxy

    return multiprocessing.parent_process() is not None or isinstance(sys.stderr, FileProxy)
