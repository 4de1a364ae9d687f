"""Than 2025, capacity: its claims, studies, shipped tables and typeset formulas."""
