"""Which changes of the parameters change nothing: discover, certify, divide out."""

from normgauge.symmetry._discover import symmetries as symmetries
from normgauge.symmetry._family import Family as Family
from normgauge.symmetry._family import Symmetry as Symmetry
from normgauge.symmetry._groups import ParamGroups as ParamGroups
from normgauge.symmetry._groups import param_groups as param_groups
from normgauge.symmetry._result import Symmetries as Symmetries

__all__ = ["Family", "ParamGroups", "Symmetries", "Symmetry", "param_groups", "symmetries"]
