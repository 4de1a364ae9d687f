"""The same eyes, live in training: a few numbers that explain a run with normalization, and early warnings."""

from normgauge.monitor._monitor import Monitor as Monitor
from normgauge.monitor._sinks import LOG_NAME as LOG_NAME
from normgauge.monitor._sinks import CSVSink as CSVSink
from normgauge.monitor._sinks import FolderSink as FolderSink
from normgauge.monitor._sinks import TensorBoardSink as TensorBoardSink
from normgauge.monitor._warnings import EarlyWarning as EarlyWarning

__all__ = ["LOG_NAME", "CSVSink", "EarlyWarning", "FolderSink", "Monitor", "TensorBoardSink"]
