"""Algorithms on linear operators known by their products."""

from normgauge.linalg._operator import DenseOperator as DenseOperator
from normgauge.linalg._operator import Operator as Operator
from normgauge.linalg.lanczos import Eigenpairs as Eigenpairs
from normgauge.linalg.lanczos import eigenpairs as eigenpairs
from normgauge.linalg.quadrature import Nodes as Nodes
from normgauge.linalg.quadrature import TraceEstimate as TraceEstimate
from normgauge.linalg.quadrature import hutchinson as hutchinson
from normgauge.linalg.quadrature import spectral_nodes as spectral_nodes

__all__ = [
    "DenseOperator",
    "Eigenpairs",
    "Nodes",
    "Operator",
    "TraceEstimate",
    "eigenpairs",
    "hutchinson",
    "spectral_nodes",
]
