"""Santurkar et al. 2018, smoothness: its claims, studies, shipped tables and typeset formulas."""
