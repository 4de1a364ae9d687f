"""normgauge: what normalization did to your network, measured, explained and checked against the papers.

The public names are loaded when first used, so that `import normgauge` costs little next to `import torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from normgauge import charts as charts
    from normgauge import errors as errors
    from normgauge import lab as lab
    from normgauge import nn as nn
    from normgauge import optim as optim
    from normgauge import report as report
    from normgauge import testing as testing
    from normgauge import theory as theory
    from normgauge.errors import NormgaugeError as NormgaugeError
    from normgauge.lab import Study as Study
    from normgauge.lab.compare import compare as compare
    from normgauge.measure import ActivationHistory as ActivationHistory
    from normgauge.measure import Activations as Activations
    from normgauge.measure import Bracket as Bracket
    from normgauge.measure import CovariateShift as CovariateShift
    from normgauge.measure import Density as Density
    from normgauge.measure import Drift as Drift
    from normgauge.measure import Flatness as Flatness
    from normgauge.measure import Generalization as Generalization
    from normgauge.measure import LandscapeBands as LandscapeBands
    from normgauge.measure import LayerSpectra as LayerSpectra
    from normgauge.measure import LipschitzBracket as LipschitzBracket
    from normgauge.measure import LossSurface as LossSurface
    from normgauge.measure import Margins as Margins
    from normgauge.measure import QuotientSpectrum as QuotientSpectrum
    from normgauge.measure import Robustness as Robustness
    from normgauge.measure import SignalPropagation as SignalPropagation
    from normgauge.measure import Spectrum as Spectrum
    from normgauge.measure import Stability as Stability
    from normgauge.measure import StableRate as StableRate
    from normgauge.measure import Trace as Trace
    from normgauge.measure import WeightLipschitz as WeightLipschitz
    from normgauge.measure import activation_history as activation_history
    from normgauge.measure import activations as activations
    from normgauge.measure import covariate_shift as covariate_shift
    from normgauge.measure import density as density
    from normgauge.measure import drift as drift
    from normgauge.measure import flatness as flatness
    from normgauge.measure import gradient_flow as gradient_flow
    from normgauge.measure import landscape_bands as landscape_bands
    from normgauge.measure import layer_spectra as layer_spectra
    from normgauge.measure import loss_surface as loss_surface
    from normgauge.measure import margins as margins
    from normgauge.measure import operator_norm as operator_norm
    from normgauge.measure import quotient_spectrum as quotient_spectrum
    from normgauge.measure import register_lipschitz_rule as register_lipschitz_rule
    from normgauge.measure import robustness as robustness
    from normgauge.measure import signal_propagation as signal_propagation
    from normgauge.measure import spectrum as spectrum
    from normgauge.measure import stability as stability
    from normgauge.measure import stable_rate as stable_rate
    from normgauge.measure import trace as trace
    from normgauge.measure import weight_dynamics as weight_dynamics
    from normgauge.measure import weight_lipschitz as weight_lipschitz
    from normgauge.measure.generalization.generalization import generalization as generalization
    from normgauge.measure.landscape.landscape import landscape as landscape
    from normgauge.measure.lipschitz.lipschitz import lipschitz as lipschitz
    from normgauge.objective import Objective as Objective
    from normgauge.objective import take as take
    from normgauge.papers import court as claims  # noqa: F401 (`ng.claims`)
    from normgauge.papers.reproduce import reproduce as reproduce
    from normgauge.references import cite as cite
    from normgauge.surgery import Surgery as Surgery
    from normgauge.surgery import prune_norms as prune_norms
    from normgauge.symmetry import Symmetries as Symmetries
    from normgauge.symmetry import Symmetry as Symmetry
    from normgauge.symmetry import param_groups as param_groups
    from normgauge.symmetry import symmetries as symmetries

_ROOMS = {
    "charts": "charts",
    "claims": "papers.court",
    "errors": "errors",
    "lab": "lab",
    "nn": "nn",
    "optim": "optim",
    "report": "report",
    "testing": "testing",
    "theory": "theory",
}
_NAMES = {
    "activation_history": "measure",
    "ActivationHistory": "measure",
    "Activations": "measure",
    "activations": "measure",
    "Bracket": "measure",
    "cite": "references",
    "compare": "lab",
    "covariate_shift": "measure",
    "CovariateShift": "measure",
    "Density": "measure",
    "density": "measure",
    "Drift": "measure",
    "drift": "measure",
    "Flatness": "measure",
    "flatness": "measure",
    "Generalization": "measure",
    "generalization": "measure",
    "gradient_flow": "measure",
    "landscape": "measure",
    "landscape_bands": "measure",
    "LandscapeBands": "measure",
    "layer_spectra": "measure",
    "LayerSpectra": "measure",
    "lipschitz": "measure",
    "LipschitzBracket": "measure",
    "loss_surface": "measure",
    "LossSurface": "measure",
    "Margins": "measure",
    "margins": "measure",
    "NormgaugeError": "errors",
    "Objective": "objective",
    "operator_norm": "measure",
    "param_groups": "symmetry",
    "prune_norms": "surgery",
    "quotient_spectrum": "measure",
    "QuotientSpectrum": "measure",
    "reproduce": "papers.reproduce",
    "register_lipschitz_rule": "measure",
    "Robustness": "measure",
    "robustness": "measure",
    "signal_propagation": "measure",
    "SignalPropagation": "measure",
    "Spectrum": "measure",
    "spectrum": "measure",
    "Stability": "measure",
    "stability": "measure",
    "stable_rate": "measure",
    "StableRate": "measure",
    "Study": "lab",
    "Surgery": "surgery",
    "Symmetries": "symmetry",
    "symmetries": "symmetry",
    "Symmetry": "symmetry",
    "take": "objective",
    "Trace": "measure",
    "trace": "measure",
    "weight_dynamics": "measure",
    "weight_lipschitz": "measure",
    "WeightLipschitz": "measure",
}

__all__ = [  # noqa: PLE0604 (the two tables above are the list)
    "__version__",
    *_ROOMS,
    *_NAMES,
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"normgauge.{_ROOMS[name]}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"normgauge.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'normgauge' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
