"""Algorithms on linear operators known by their products."""

from normgauge.linalg._bidiagonalization import SingularPair as SingularPair
from normgauge.linalg._bidiagonalization import random_start_bound as random_start_bound
from normgauge.linalg._bidiagonalization import top_singular_pair as top_singular_pair
from normgauge.linalg._operator import DenseOperator as DenseOperator
from normgauge.linalg._operator import Operator as Operator
from normgauge.linalg._symbol import SymbolBound as SymbolBound
from normgauge.linalg._symbol import peak_frequency as peak_frequency
from normgauge.linalg._symbol import symbol_bound as symbol_bound
from normgauge.linalg._symbol import symbol_is_exact as symbol_is_exact
from normgauge.linalg.convolution import Convolution as Convolution
from normgauge.linalg.lanczos import Eigenpairs as Eigenpairs
from normgauge.linalg.lanczos import eigenpairs as eigenpairs
from normgauge.linalg.lanczos import machine_memory as machine_memory
from normgauge.linalg.quadrature import Nodes as Nodes
from normgauge.linalg.quadrature import TraceEstimate as TraceEstimate
from normgauge.linalg.quadrature import hutchinson as hutchinson
from normgauge.linalg.quadrature import spectral_nodes as spectral_nodes

__all__ = [
    "Convolution",
    "DenseOperator",
    "Eigenpairs",
    "Nodes",
    "Operator",
    "SingularPair",
    "SymbolBound",
    "TraceEstimate",
    "eigenpairs",
    "hutchinson",
    "machine_memory",
    "peak_frequency",
    "random_start_bound",
    "spectral_nodes",
    "symbol_bound",
    "symbol_is_exact",
    "top_singular_pair",
]
