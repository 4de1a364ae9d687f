"""Data as tensors in memory (`load`), and the image archives behind them: fetched, read, kept as one file each."""

from normgauge.lab.data.catalogue import KNOWN, State, fetch, state
from normgauge.lab.data.prepared import Prepared, data_folder
from normgauge.lab.data.splits import ALPHABET, Dataset, is_own, load, names, text

__all__ = ["ALPHABET", "KNOWN", "Dataset", "Prepared", "State", "data_folder", "fetch", "is_own", "load", "names"]
__all__ += ["state", "text"]
