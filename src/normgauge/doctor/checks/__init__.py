"""The checks: a function each, whose docstring is id, title, explanation, remedy and references."""

import pkgutil
from importlib import import_module
from importlib.metadata import entry_points

from normgauge.doctor.finding import CHECKS, Check

GROUP = "normgauge.checks"  # of entry points: each names a module whose import registers checks


def all_checks() -> dict[str, Check]:
    """Return our checks and those of installed packages (entry points of the group `normgauge.checks`), by id."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        import_module(module.name)
    for entry in entry_points(group=GROUP):
        entry.load()
    return dict(sorted(CHECKS.items()))
