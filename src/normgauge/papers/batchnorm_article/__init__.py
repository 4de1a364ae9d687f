"""The encyclopedia article on batch normalization: its claims, studies, shipped tables and typeset formulas."""
