"""Initializations and controls without normalization; each changes a model in place, from a generator of its own."""

from normgauge.nn._init_controls import ScalarBias as ScalarBias
from normgauge.nn._init_controls import ScalarScale as ScalarScale
from normgauge.nn._init_controls import fixup as fixup
from normgauge.nn._init_controls import lsuv as lsuv
from normgauge.nn._init_draws import delta_orthogonal as delta_orthogonal
from normgauge.nn._init_draws import fans as fans
from normgauge.nn._init_draws import glorot as glorot
from normgauge.nn._init_draws import he as he
from normgauge.nn._init_draws import orthogonal as orthogonal
from normgauge.nn._init_draws import selu as selu
from normgauge.nn._init_draws import weight_layers as weight_layers

__all__ = [
    "ScalarBias",
    "ScalarScale",
    "delta_orthogonal",
    "fans",
    "fixup",
    "glorot",
    "he",
    "lsuv",
    "orthogonal",
    "selu",
    "weight_layers",
]
