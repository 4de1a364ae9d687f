"""Thin adapters to other libraries, imported only when asked for."""
