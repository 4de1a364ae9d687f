"""A user's own code by its name: `package.module:function`, importable from the folder the command is run in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from normgauge.errors import InputError, explain


def import_function(kind: str, path: str, what: str) -> Callable[..., Any]:
    """Import `package.module:function`.

    The folder is searched last, so that no file in it can stand in for a library that others import.

    Args:
        kind: what the name stands for in messages: "model" or "data".
        path: the name.
        what: what the function is, for messages.

    Raises:
        InputError: when there is no such module or function, or a library has the name of the user's file.
    """
    module_name, _, name = path.partition(":")
    here = Path.cwd()
    if str(here) not in sys.path:  # `python -m` and scripts have it; console scripts and worker processes do not
        sys.path.append(str(here))
    try:
        module = importlib.import_module(module_name)
        _refuse_namesake(kind, path, here, module)
        return getattr(module, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            explain(
                f"{kind} {path!r}",
                f"package.module:name must be importable and name {what}",
                str(error),
                "Run from the folder that holds the package, or install it",
            )
        ) from error


def _refuse_namesake(kind: str, path: str, here: Path, module: ModuleType) -> None:
    """Refuse a library that was imported although a file of that name lies here: it is not what was meant."""
    top = module.__name__.partition(".")[0]
    own = next((file for file in (here / f"{top}.py", here / top / "__init__.py") if file.is_file()), None)
    origin = getattr(sys.modules[top], "__file__", None)
    if own is not None and (origin is None or not Path(origin).resolve().is_relative_to(own.parent.resolve())):
        rule = f"{own.name if own.parent == here else own.parent.name} must not have the name of a library"
        raise InputError(explain(f"{kind} {path!r}", rule, f"{top} from {origin or 'Python'}", "Rename your file"))
