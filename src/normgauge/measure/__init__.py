"""Named quantities of an Objective, each with its kind, cost and status."""

from normgauge.measure._density import Density as Density
from normgauge.measure._density import density as density
from normgauge.measure._gradient_flow import GradientFlow as GradientFlow
from normgauge.measure._gradient_flow import gradient_flow as gradient_flow
from normgauge.measure._landscape import Landscape as Landscape
from normgauge.measure._landscape import landscape as landscape
from normgauge.measure._layer_spectra import LayerSpectra as LayerSpectra
from normgauge.measure._layer_spectra import layer_spectra as layer_spectra
from normgauge.measure._operator_norm import Bracket as Bracket
from normgauge.measure._operator_norm import operator_norm as operator_norm
from normgauge.measure._quotient import QuotientOperator as QuotientOperator
from normgauge.measure._quotient import QuotientSpectrum as QuotientSpectrum
from normgauge.measure._quotient import quotient_spectrum as quotient_spectrum
from normgauge.measure._spectrum import Spectrum as Spectrum
from normgauge.measure._spectrum import spectrum as spectrum
from normgauge.measure._trace import Trace as Trace
from normgauge.measure._trace import trace as trace
from normgauge.measure._weight_dynamics import WeightBlock as WeightBlock
from normgauge.measure._weight_dynamics import WeightDynamics as WeightDynamics
from normgauge.measure._weight_dynamics import weight_dynamics as weight_dynamics

__all__ = [
    "Bracket",
    "Density",
    "GradientFlow",
    "Landscape",
    "LayerSpectra",
    "QuotientOperator",
    "QuotientSpectrum",
    "Spectrum",
    "Trace",
    "WeightBlock",
    "WeightDynamics",
    "density",
    "gradient_flow",
    "landscape",
    "layer_spectra",
    "operator_norm",
    "quotient_spectrum",
    "spectrum",
    "trace",
    "weight_dynamics",
]
