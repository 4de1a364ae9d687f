"""The words a study's file is written in."""

from normgauge.papers.experiment import Record, build, fit, record_accuracies
from normgauge.papers.studies import register
from normgauge.records import Spec

__all__ = ["Record", "Spec", "build", "fit", "record_accuracies", "register"]
