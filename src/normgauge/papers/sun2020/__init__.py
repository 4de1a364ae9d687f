"""Sun et al. 2020, a unified view of normalization: its claims, studies, shipped tables and typeset formulas."""
