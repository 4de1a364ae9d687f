"""The words a study's file is written in."""

from normgauge.papers.experiment import Record, fit
from normgauge.papers.studies import register
from normgauge.records import Spec

__all__ = ["Record", "Spec", "fit", "register"]
