"""A user's own code by its name: `package.module:function`, importable from the folder the command is run in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normgauge.errors import InputError, explain


def import_function(kind: str, path: str, what: str) -> Callable[..., Any]:
    """Import `package.module:function`.

    Args:
        kind: what the name stands for in messages: "model" or "data".
        path: the name.
        what: what the function is, for messages.

    Raises:
        InputError: when there is no such module or function.
    """
    module_name, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # `python -m` and scripts have it; console scripts and worker processes do not
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            explain(
                f"{kind} {path!r}",
                f"package.module:name must be importable and name {what}",
                str(error),
                "Run from the folder that holds the package, or install it",
            )
        ) from error
