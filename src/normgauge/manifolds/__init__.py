"""Sphere, oblique and product manifolds: project, tangent, retract, transport, inner, exp."""

from normgauge.manifolds import sphere
from normgauge.manifolds._manifold import Euclidean, Manifold, Oblique, Product, Sphere

__all__ = ["Euclidean", "Manifold", "Oblique", "Product", "Sphere", "sphere"]
