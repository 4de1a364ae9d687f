"""The same eyes, live in training: a few numbers that explain a run with normalization, and early warnings."""

from normgauge.monitor._monitor import Monitor
from normgauge.monitor._sinks import LOG_NAME, CSVSink, FolderSink, TensorBoardSink
from normgauge.monitor._warnings import EarlyWarning

__all__ = ["LOG_NAME", "CSVSink", "EarlyWarning", "FolderSink", "Monitor", "TensorBoardSink"]
