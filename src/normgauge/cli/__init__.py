"""The command line: one thin door per verb."""

from normgauge.cli._app import main as main

__all__ = ["main"]
