"""Algorithms on linear operators known by their products."""

from normgauge.linalg._operator import DenseOperator as DenseOperator
from normgauge.linalg._operator import Operator as Operator

__all__ = ["DenseOperator", "Operator"]
