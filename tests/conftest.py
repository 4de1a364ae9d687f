"""Shared climate of the tests: float64 by default, `tests/` importable, heavy tests only when asked."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
with contextlib.suppress(ImportError):
    import readline  # noqa: F401 (it tells every child process the width of a terminal)
os.environ["COLUMNS"] = ""
del os.environ["COLUMNS"]  # tables are as wide as they are


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def pytest_collection_modifyitems(config, items):
    if os.environ.get("NORMGAUGE_HEAVY") == "1":
        return
    heavy = pytest.mark.skip(reason="heavy: run with make test-all")
    for item in items:
        if "heavy" in item.keywords:
            item.add_marker(heavy)


def pytest_terminal_summary(terminalreporter):
    """Print what tests counted (`record_property("counts", text)`): worker processes swallow what tests print."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, text in getattr(report, "user_properties", ()):
                if name == "counts":
                    terminalreporter.write_line(f"{report.nodeid}\n{text}")
