"""Where readings go: any callable `(step, {name: value})`; CSV, TensorBoard, a folder for `normgauge watch`."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from normgauge.errors import InputError, MissingExtraError
from normgauge.records import Run, plain
from normgauge.store import STORE_NAME, Store

Sink = Callable[[int, Mapping[str, float]], object]
LOG_NAME = "monitor.jsonl"


class CSVSink:
    """Lines `step,name,value`, appended and flushed at every beat."""

    def __init__(self, path: str | Path) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = not target.exists() or not target.stat().st_size
        self._file = target.open("a", newline="")
        self._writer = csv.writer(self._file)
        if fresh:
            self._writer.writerow(("step", "name", "value"))

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.writerows((step, name, value) for name, value in values.items())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard; needs the package tensorboard."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            got, step = "an environment without it", "pip install tensorboard"
            raise MissingExtraError("TensorBoardSink", "it writes with tensorboard", got, step) from error
        self._writer: Any = SummaryWriter(str(folder))

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class FolderSink:
    """A folder for `normgauge watch`: one JSON line per beat and warning; a store with all readings at the end."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / LOG_NAME).open("a")
        self._run = Run({"monitor": self.folder.name})

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        self.note({"step": step, "values": {name: plain(value) for name, value in values.items()}})
        for name, value in values.items():
            self._run.record(step, name, value)

    def note(self, entry: Mapping[str, Any]) -> None:
        """Append one line."""
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the log and write the store."""
        self._file.close()
        with Store(self.folder / STORE_NAME) as store:
            store.put(self._run)


def sink_of(target: Sink | str | Path) -> Sink:
    """Return a callable as it is, a CSV for a name that ends so, a folder for any other path."""
    if callable(target):
        return target
    if isinstance(target, (str, Path)):
        return CSVSink(target) if str(target).endswith(".csv") else FolderSink(target)
    rule = "a sink is a callable (step, values) or a path"
    raise InputError("Monitor", rule, type(target).__name__, "Pass 'run' or print")
