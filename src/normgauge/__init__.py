"""normgauge: what normalization did to your network, measured, explained and checked against the papers.

The public names are loaded when first used, so that `import normgauge` costs little next to `import torch`. Which they
are, and where they are written, is said once, in `__init__.pyi`.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def _read_stub() -> dict[str, tuple[str, str]]:
    """Return public name -> (module, name there), from the imports of the stub beside this file."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}


_PUBLIC = _read_stub()
__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604 (the stub is the list)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'normgauge' has no attribute {name!r}; public names: {', '.join(__all__)}")
    module, attribute = _PUBLIC[name]
    if module == "normgauge":
        return importlib.import_module(f"normgauge.{attribute}")
    home = importlib.import_module(module)
    return getattr(home, attribute) if hasattr(home, attribute) else importlib.import_module(f"{module}.{attribute}")


def __dir__() -> list[str]:
    return list(__all__)
