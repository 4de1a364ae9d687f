"""normgauge: what normalization did to your network, measured, explained and checked against the papers.

The public names are loaded when first used, so that `import normgauge` costs little next to `import torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from normgauge import claims as claims
    from normgauge import errors as errors
    from normgauge import nn as nn
    from normgauge import optim as optim
    from normgauge.errors import NormgaugeError as NormgaugeError
    from normgauge.lab import Study as Study
    from normgauge.lab import compare as compare
    from normgauge.measure import Bracket as Bracket
    from normgauge.measure import Density as Density
    from normgauge.measure import LayerSpectra as LayerSpectra
    from normgauge.measure import QuotientSpectrum as QuotientSpectrum
    from normgauge.measure import Spectrum as Spectrum
    from normgauge.measure import Trace as Trace
    from normgauge.measure import density as density
    from normgauge.measure import gradient_flow as gradient_flow
    from normgauge.measure import landscape as landscape
    from normgauge.measure import layer_spectra as layer_spectra
    from normgauge.measure import operator_norm as operator_norm
    from normgauge.measure import quotient_spectrum as quotient_spectrum
    from normgauge.measure import spectrum as spectrum
    from normgauge.measure import trace as trace
    from normgauge.measure import weight_dynamics as weight_dynamics
    from normgauge.objective import Objective as Objective
    from normgauge.objective import take as take
    from normgauge.references import cite as cite

_ROOMS = (
    "claims",
    "errors",
    "nn",
    "optim",
)
_NAMES = {
    "Bracket": "measure",
    "cite": "references",
    "compare": "lab",
    "Density": "measure",
    "density": "measure",
    "gradient_flow": "measure",
    "landscape": "measure",
    "layer_spectra": "measure",
    "LayerSpectra": "measure",
    "NormgaugeError": "errors",
    "Objective": "objective",
    "operator_norm": "measure",
    "quotient_spectrum": "measure",
    "QuotientSpectrum": "measure",
    "Spectrum": "measure",
    "spectrum": "measure",
    "Study": "lab",
    "take": "objective",
    "Trace": "measure",
    "trace": "measure",
    "weight_dynamics": "measure",
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
