"""The public names, and where each is written: the one list there is; `__init__.py` loads them when first used."""

from normgauge import charts as charts
from normgauge import errors as errors
from normgauge import lab as lab
from normgauge import measure as measure
from normgauge import nn as nn
from normgauge import optim as optim
from normgauge import report as report
from normgauge import surgery as surgery
from normgauge import symmetry as symmetry
from normgauge import testing as testing
from normgauge import theory as theory
from normgauge.errors import NormgaugeError as NormgaugeError
from normgauge.lab import Study as Study
from normgauge.lab.compare import compare as compare
from normgauge.measure.curvature.batch_noise import batch_noise as batch_noise
from normgauge.measure.curvature.density import density as density
from normgauge.measure.curvature.layer_spectra import layer_spectra as layer_spectra
from normgauge.measure.curvature.sharpness_track import sharpness_track as sharpness_track
from normgauge.measure.curvature.spectrum import quotient_spectrum as quotient_spectrum
from normgauge.measure.curvature.spectrum import spectrum as spectrum
from normgauge.measure.curvature.stable_rate import stable_rate as stable_rate
from normgauge.measure.curvature.trace import trace as trace
from normgauge.measure.decisions.drift import drift as drift
from normgauge.measure.decisions.margins import margins as margins
from normgauge.measure.decisions.robustness import robustness as robustness
from normgauge.measure.generalization.generalization import generalization as generalization
from normgauge.measure.generalization.stability import stability as stability
from normgauge.measure.landscape.flatness import flatness as flatness
from normgauge.measure.landscape.landscape import landscape as landscape
from normgauge.measure.landscape.landscape_bands import landscape_bands as landscape_bands
from normgauge.measure.landscape.loss_surface import loss_surface as loss_surface
from normgauge.measure.landscape.smoothing import smoothing as smoothing
from normgauge.measure.lipschitz.lipschitz import lipschitz as lipschitz
from normgauge.measure.lipschitz.operator_norm import operator_norm as operator_norm
from normgauge.measure.lipschitz.rules import register_lipschitz_rule as register_lipschitz_rule
from normgauge.measure.lipschitz.weight_lipschitz import weight_lipschitz as weight_lipschitz
from normgauge.measure.signal.activations import activation_history as activation_history
from normgauge.measure.signal.activations import activations as activations
from normgauge.measure.signal.covariate_shift import covariate_shift as covariate_shift
from normgauge.measure.signal.signal_propagation import signal_propagation as signal_propagation
from normgauge.measure.weights.gradient_flow import gradient_flow as gradient_flow
from normgauge.measure.weights.weight_dynamics import weight_dynamics as weight_dynamics
from normgauge.network import Network as Network
from normgauge.objective import Objective as Objective
from normgauge.objective import take as take
from normgauge.papers import court as claims  # noqa: F401 (the papers' court is called by what it holds)
from normgauge.papers.reproduce import reproduce as reproduce
from normgauge.references import cite as cite
from normgauge.surgery import prune_norms as prune_norms
from normgauge.symmetry import Symmetries as Symmetries
from normgauge.symmetry import param_groups as param_groups
from normgauge.symmetry import symmetries as symmetries

__version__: str
__all__: list[str]
