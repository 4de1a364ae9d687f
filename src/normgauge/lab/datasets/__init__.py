"""Image data on disk: read the usual layouts, fetch the published archives, keep one memory-mapped file each."""

from normgauge.lab.datasets.catalogue import KNOWN as KNOWN
from normgauge.lab.datasets.catalogue import State as State
from normgauge.lab.datasets.catalogue import fetch as fetch
from normgauge.lab.datasets.catalogue import open_folder as open_folder
from normgauge.lab.datasets.catalogue import open_known as open_known
from normgauge.lab.datasets.catalogue import state as state
from normgauge.lab.datasets.prepared import Prepared as Prepared
from normgauge.lab.datasets.prepared import data_folder as data_folder

__all__ = ["KNOWN", "Prepared", "State", "data_folder", "fetch", "open_folder", "open_known", "state"]
