"""One file per dataset, memory-mapped: rows of (split, label, pixels) that appear complete or not at all."""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from normgauge.errors import DataError
from normgauge.lab.data.layouts import Images


def data_folder() -> Path:
    """Return where data are kept: `NORMGAUGE_DATA` if it is set, else the platform's cache folder."""
    if os.environ.get("NORMGAUGE_DATA"):
        return Path(os.environ["NORMGAUGE_DATA"]).expanduser()
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "normgauge"


@dataclass(frozen=True)
class Prepared:
    """A dataset on disk."""

    path: Path  # the file
    rows: np.ndarray  # the memory-mapped records, training first: `test` (0 or 1), `label` and `pixels` (8 or 16 bits)
    source: str  # where the data came from, in words

    @property
    def train(self) -> int:
        """How many training rows there are; they come first."""
        return len(self.rows) - int(np.count_nonzero(self.rows["test"]))

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.rows["label"].max()) + 1

    def checksum(self) -> str:
        """Return the SHA-256 over pixels, then labels as 32-bit integers, both in the order of the rows."""
        return checksum(self.rows["pixels"], self.rows["label"])


def checksum(pixels: np.ndarray, labels: np.ndarray) -> str:
    """Return the SHA-256 over pixels (count, channels, height, width), then little-endian int32 labels."""
    digest = hashlib.sha256()
    for start in range(0, len(pixels), 4096):  # a slice at a time: a memory-mapped file need not fit in memory
        digest.update(np.ascontiguousarray(pixels[start : start + 4096]).tobytes())
    digest.update(np.ascontiguousarray(labels, dtype="<i4").tobytes())
    return digest.hexdigest()


def write(images: Images, folder: Path, name: str, source: str) -> Prepared:
    """Write images as the file `name`.npy in `folder`; it appears by a rename, so half a file never counts as data."""
    kind = np.dtype([("test", "u1"), ("label", "<i4"), ("pixels", images.pixels.dtype.str, images.pixels.shape[1:])])
    rows = np.empty(len(images.pixels), kind)
    rows["pixels"], rows["label"] = images.pixels, images.labels
    rows["test"] = np.arange(len(rows)) >= images.train
    path = folder / f"{name}.npy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        note = {"source": source, "sha256": checksum(images.pixels, images.labels)}
        path.with_suffix(".json").write_text(json.dumps(note, indent=1), encoding="utf-8")
        part = folder / f"{name}.{os.getpid()}.part"
        try:
            with part.open("wb") as file:
                np.save(file, rows, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        rule, got = "the folder for data must be writable and have room", f"{error.strerror or error} for {folder}"
        step = "Free space, or set NORMGAUGE_DATA to another folder"
        raise DataError(f"data {name!r}", rule, got, step) from error
    return Prepared(path, rows, source)


def read(folder: Path, name: str) -> Prepared | None:
    """Return the dataset `name` in `folder`, memory-mapped, or None when it is not there or not what was written.

    The note beside it holds the checksum; a file is read in full to compare it once per process and change.
    """
    path = folder / f"{name}.npy"
    try:
        note = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        source, wanted = str(note["source"]), note["sha256"]
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
        state = path.stat()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if rows.dtype.names != ("test", "label", "pixels") or not len(rows):
        return None
    whole = _checksum_of_file(path, (state.st_mtime_ns, state.st_size, state.st_ino)) == wanted
    return Prepared(path, rows, source) if whole else None


@lru_cache(maxsize=64)
def _checksum_of_file(path: Path, stamp: tuple[int, int, int]) -> str:
    del stamp  # part of the key only: a file that was written anew is read anew
    rows = np.load(path, mmap_mode="r", allow_pickle=False)
    return checksum(rows["pixels"], rows["label"])
