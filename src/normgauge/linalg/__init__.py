"""Algorithms on linear operators known by their products."""

from normgauge.linalg._basis import inner
from normgauge.linalg._bidiagonalization import SingularPair, random_start_bound, top_singular_pair
from normgauge.linalg._operator import DenseOperator, Operator
from normgauge.linalg._symbol import SymbolBound, peak_frequency, symbol_bound, symbol_is_exact
from normgauge.linalg.convolution import Convolution
from normgauge.linalg.lanczos import Eigenpairs, eigenpairs, machine_memory
from normgauge.linalg.quadrature import Nodes, TraceEstimate, hutchinson, spectral_nodes

__all__ = ["Convolution", "DenseOperator", "Eigenpairs", "Nodes", "Operator", "SingularPair", "SymbolBound"]
__all__ += ["TraceEstimate", "eigenpairs", "hutchinson", "inner", "machine_memory", "peak_frequency"]
__all__ += ["random_start_bound", "spectral_nodes", "symbol_bound", "symbol_is_exact", "top_singular_pair"]
