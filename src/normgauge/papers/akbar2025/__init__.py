"""Akbar 2025, geometry and gradient flow: its claims, studies, shipped tables and typeset formulas."""
