"""Named quantities of an Objective, each with its kind, cost and status."""

from normgauge.measure.curvature.density import Density as Density
from normgauge.measure.curvature.density import density as density
from normgauge.measure.curvature.layer_spectra import LayerSpectra as LayerSpectra
from normgauge.measure.curvature.layer_spectra import layer_spectra as layer_spectra
from normgauge.measure.curvature.quotient import QuotientOperator as QuotientOperator
from normgauge.measure.curvature.spectrum import QuotientSpectrum as QuotientSpectrum
from normgauge.measure.curvature.spectrum import Spectrum as Spectrum
from normgauge.measure.curvature.spectrum import quotient_spectrum as quotient_spectrum
from normgauge.measure.curvature.spectrum import spectrum as spectrum
from normgauge.measure.curvature.stable_rate import StableRate as StableRate
from normgauge.measure.curvature.stable_rate import stable_rate as stable_rate
from normgauge.measure.curvature.trace import Trace as Trace
from normgauge.measure.curvature.trace import trace as trace
from normgauge.measure.decisions.drift import Drift as Drift
from normgauge.measure.decisions.drift import drift as drift
from normgauge.measure.decisions.margins import Margins as Margins
from normgauge.measure.decisions.margins import margins as margins
from normgauge.measure.decisions.robustness import Robustness as Robustness
from normgauge.measure.decisions.robustness import robustness as robustness
from normgauge.measure.generalization.bounds import Bound as Bound
from normgauge.measure.generalization.bounds import Cell as Cell
from normgauge.measure.generalization.complexity import Complexity as Complexity
from normgauge.measure.generalization.generalization import Generalization as Generalization
from normgauge.measure.generalization.generalization import generalization as generalization
from normgauge.measure.generalization.stability import Stability as Stability
from normgauge.measure.generalization.stability import stability as stability
from normgauge.measure.landscape.flatness import Flatness as Flatness
from normgauge.measure.landscape.flatness import flatness as flatness
from normgauge.measure.landscape.landscape import Landscape as Landscape
from normgauge.measure.landscape.landscape import landscape as landscape
from normgauge.measure.landscape.landscape_bands import LandscapeBands as LandscapeBands
from normgauge.measure.landscape.landscape_bands import landscape_bands as landscape_bands
from normgauge.measure.landscape.loss_surface import LossSurface as LossSurface
from normgauge.measure.landscape.loss_surface import loss_surface as loss_surface
from normgauge.measure.lipschitz.lipschitz import LayerGain as LayerGain
from normgauge.measure.lipschitz.lipschitz import LipschitzBracket as LipschitzBracket
from normgauge.measure.lipschitz.lipschitz import lipschitz as lipschitz
from normgauge.measure.lipschitz.operator_norm import Bracket as Bracket
from normgauge.measure.lipschitz.operator_norm import operator_norm as operator_norm
from normgauge.measure.lipschitz.rules import register_lipschitz_rule as register_lipschitz_rule
from normgauge.measure.lipschitz.weight_lipschitz import WeightGain as WeightGain
from normgauge.measure.lipschitz.weight_lipschitz import WeightLipschitz as WeightLipschitz
from normgauge.measure.lipschitz.weight_lipschitz import weight_lipschitz as weight_lipschitz
from normgauge.measure.signal.activations import ActivationHistory as ActivationHistory
from normgauge.measure.signal.activations import Activations as Activations
from normgauge.measure.signal.activations import activation_history as activation_history
from normgauge.measure.signal.activations import activations as activations
from normgauge.measure.signal.covariate_shift import CovariateShift as CovariateShift
from normgauge.measure.signal.covariate_shift import LayerShift as LayerShift
from normgauge.measure.signal.covariate_shift import covariate_shift as covariate_shift
from normgauge.measure.signal.signal_propagation import LayerSignal as LayerSignal
from normgauge.measure.signal.signal_propagation import SignalPropagation as SignalPropagation
from normgauge.measure.signal.signal_propagation import signal_propagation as signal_propagation
from normgauge.measure.weights.gradient_flow import GradientFlow as GradientFlow
from normgauge.measure.weights.gradient_flow import gradient_flow as gradient_flow
from normgauge.measure.weights.weight_dynamics import WeightBlock as WeightBlock
from normgauge.measure.weights.weight_dynamics import WeightDynamics as WeightDynamics
from normgauge.measure.weights.weight_dynamics import weight_dynamics as weight_dynamics

__all__ = [
    "ActivationHistory",
    "Activations",
    "Bound",
    "Bracket",
    "Cell",
    "Complexity",
    "CovariateShift",
    "Density",
    "Drift",
    "Flatness",
    "Generalization",
    "GradientFlow",
    "Landscape",
    "LandscapeBands",
    "LayerGain",
    "LayerShift",
    "LayerSignal",
    "LayerSpectra",
    "LipschitzBracket",
    "LossSurface",
    "Margins",
    "QuotientOperator",
    "QuotientSpectrum",
    "Robustness",
    "SignalPropagation",
    "Spectrum",
    "Stability",
    "StableRate",
    "Trace",
    "WeightBlock",
    "WeightDynamics",
    "WeightGain",
    "WeightLipschitz",
    "activation_history",
    "activations",
    "covariate_shift",
    "density",
    "drift",
    "flatness",
    "generalization",
    "gradient_flow",
    "landscape",
    "landscape_bands",
    "layer_spectra",
    "lipschitz",
    "loss_surface",
    "margins",
    "operator_norm",
    "quotient_spectrum",
    "register_lipschitz_rule",
    "robustness",
    "signal_propagation",
    "spectrum",
    "stability",
    "stable_rate",
    "trace",
    "weight_dynamics",
    "weight_lipschitz",
]
