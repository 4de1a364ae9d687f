"""Algorithms on linear operators known by their products."""

from normgauge.linalg._operator import DenseOperator as DenseOperator
from normgauge.linalg._operator import Operator as Operator
from normgauge.linalg.lanczos import Eigenpairs as Eigenpairs
from normgauge.linalg.lanczos import eigenpairs as eigenpairs

__all__ = [
    "DenseOperator",
    "Eigenpairs",
    "Operator",
    "eigenpairs",
]
