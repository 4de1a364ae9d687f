"""Data as tensors in memory (`load`), and the image archives behind them: fetched, read, kept as one file each."""

from normgauge.lab.data.catalogue import KNOWN as KNOWN
from normgauge.lab.data.catalogue import State as State
from normgauge.lab.data.catalogue import fetch as fetch
from normgauge.lab.data.catalogue import state as state
from normgauge.lab.data.prepared import Prepared as Prepared
from normgauge.lab.data.prepared import data_folder as data_folder
from normgauge.lab.data.splits import ALPHABET as ALPHABET
from normgauge.lab.data.splits import Dataset as Dataset
from normgauge.lab.data.splits import is_own as is_own
from normgauge.lab.data.splits import load as load
from normgauge.lab.data.splits import names as names
from normgauge.lab.data.splits import text as text

__all__ = [
    "ALPHABET",
    "KNOWN",
    "Dataset",
    "Prepared",
    "State",
    "data_folder",
    "fetch",
    "is_own",
    "load",
    "names",
    "state",
    "text",
]
