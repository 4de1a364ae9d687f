"""Normalizers: functional forms, layers, weight parametrizations, and the registry that declares them."""
