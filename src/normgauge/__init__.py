"""normgauge: what normalization did to your network, measured, explained and checked against the papers.

The public names are loaded when first used, so that `import normgauge` costs little next to `import torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from normgauge import errors as errors
    from normgauge.errors import NormgaugeError as NormgaugeError
    from normgauge.objective import Objective as Objective
    from normgauge.objective import take as take
    from normgauge.references import cite as cite
    from normgauge.symmetry import Symmetries as Symmetries
    from normgauge.symmetry import Symmetry as Symmetry
    from normgauge.symmetry import param_groups as param_groups
    from normgauge.symmetry import symmetries as symmetries

_ROOMS = ("errors",)
_NAMES = {
    "NormgaugeError": "errors",
    "Objective": "objective",
    "Symmetries": "symmetry",
    "Symmetry": "symmetry",
    "cite": "references",
    "param_groups": "symmetry",
    "symmetries": "symmetry",
    "take": "objective",
}

__all__ = [  # noqa: PLE0604 (the two tables above are the list)
    "__version__",
    *_ROOMS,
    *_NAMES,
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"normgauge.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"normgauge.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'normgauge' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
