"""Sphere, oblique and product manifolds: project, tangent, retract, transport, inner, exp."""

from normgauge.manifolds import sphere as sphere
from normgauge.manifolds._manifold import Euclidean as Euclidean
from normgauge.manifolds._manifold import Manifold as Manifold
from normgauge.manifolds._manifold import Oblique as Oblique
from normgauge.manifolds._manifold import Product as Product
from normgauge.manifolds._manifold import Sphere as Sphere

__all__ = ["Euclidean", "Manifold", "Oblique", "Product", "Sphere", "sphere"]
