"""A folder, a tar or a zip as one thing: names and bytes. Archives are read in memory and never unpacked to disk."""

import hashlib
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeVar

from normgauge.errors import DataError

# No file of the known layouts is larger; an archive that claims more is broken or hostile.
LARGEST_FILE = 2**29
# All that is read at once: as floats it takes four times the memory.
LARGEST_SUM = 2**31
MOST_FILES = 10**6
# How deep a folder is searched: DIR/FashionMNIST/raw/file is three, DIR/data/train/class/image four.
DEEPEST = 4
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
#: What the readers of broken archives raise.
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError, zlib.error)
Archive = TypeVar("Archive", tarfile.TarFile, zipfile.ZipFile)


class Folder:
    """A folder, searched to a small depth so that pointing at a home directory does not read the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """Return the files below the folder, sorted, hidden ones left out."""
        paths = []
        for place, folders, files in os.walk(self.path):
            depth = len(Path(place).relative_to(self.path).parts)
            folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < DEEPEST else []
            paths += [(Path(place) / name).relative_to(self.path).as_posix() for name in sorted(files)]
            _check_count(self.path, len(paths))
        return [name for name in paths if not PurePosixPath(name).name.startswith(".")]

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of these files; a pipe or a device, which may never end, is none."""
        contents, sizes = {}, _Sizes(self.path)
        for name in names:
            state = (self.path / name).stat()
            if not stat.S_ISREG(state.st_mode):
                what = "a pipe, a device or a socket"
                raise DataError(f"{name} in {self.path}", "it must be a regular file", what, "Remove it")
            sizes.add(name, state.st_size)
            contents[name] = (self.path / name).read_bytes()
        return contents


class Tar:
    """A tar, compressed or not; links, devices and oversized members are not files to us."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """Return the regular files inside."""
        names: list[str] = []
        sizes = _Sizes(self.path)
        with _opened(self.path, tarfile.open) as archive:
            for member in archive:
                sizes.add(member.name, member.size)  # what is not wanted must be unpacked too, to find the next one
                _check_count(self.path, len(names))
                names += [member.name] if member.isreg() else []
        return names

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of these members, in one pass: a compressed tar cannot be entered in the middle."""
        wanted, contents = set(names), {}
        with _opened(self.path, tarfile.open) as archive:
            for member in archive:
                if member.isreg() and member.name in wanted:
                    stream = archive.extractfile(member)
                    contents[member.name] = stream.read() if stream else b""
                    if len(contents) == len(wanted):
                        break
        return contents


class Zip:
    """A zip archive."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """Return the files inside."""
        with _opened(self.path, zipfile.ZipFile) as archive:
            _check_count(self.path, len(archive.infolist()))
            return [entry.filename for entry in archive.infolist() if not entry.is_dir()]

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of these members."""
        contents, sizes = {}, _Sizes(self.path)
        with _opened(self.path, zipfile.ZipFile) as archive:
            for name in names:
                sizes.add(name, archive.getinfo(name).file_size)
                contents[name] = archive.read(name)
        return contents


#: Something that holds files: their names (posix, relative) and their bytes.
Container = Folder | Tar | Zip


def containers(path: Path) -> Iterator[Container]:
    """Yield what a path may hold data in: itself, and if it is a folder the archives that lie in it."""
    if not path.exists():
        raise DataError(f"data in {path}", "the folder or archive must exist", "nothing", "Check the path")
    if path.is_file():
        yield _archive(path)
        return
    if not path.is_dir():
        what = "a pipe, a device or a socket"
        raise DataError(f"data in {path}", "it must be a folder or an archive", what, "Check the path")
    yield Folder(path)
    for file in sorted(path.iterdir()):
        if file.is_file() and file.name.endswith(ARCHIVES):
            yield _archive(file)


def fingerprint(path: Path) -> str:
    """Return 16 hex digits that change when a file of a folder or archive is added, removed or written."""
    files = [path / name for name in Folder(path).names()] if path.is_dir() else [path]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()]
    return hashlib.sha256(repr((str(path), stats)).encode()).hexdigest()[:16]


def find(names: Iterable[str], last: str) -> str | None:
    """Return the shortest name whose last part is `last`, so that a copy deeper down does not win.

    Examples:
        >>> find(["a/b/test_batch", "a/test_batch", "a/test_batch.png"], "test_batch")
        'a/test_batch'
    """
    matches = [name for name in names if PurePosixPath(name).name == last and "__MACOSX" not in name]
    return min(matches, key=lambda name: (len(PurePosixPath(name).parts), name), default=None)


def _archive(path: Path) -> Container:
    return Zip(path) if path.name.endswith(".zip") else Tar(path)


@contextmanager
def _opened(path: Path, open_archive: Callable[[Path], Archive]) -> Iterator[Archive]:
    """Yield an archive opened for reading, whose breakage is told in our words."""
    try:
        with open_archive(path) as archive:
            yield archive
    except DataError:
        raise
    except _BROKEN as error:
        rule = "it must be a complete tar or zip"
        raise DataError(f"archive {path.name}", rule, str(error) or "a cut end", "Get it again") from error


class _Sizes:
    """Adds up what is read of one container, and refuses before there is too much of it."""

    def __init__(self, path: Path) -> None:
        self._path, self._sum = path, 0

    def add(self, name: str, size: int) -> None:
        """Count a file that is about to be read."""
        self._sum += size
        for limit, what, amount in ((LARGEST_FILE, "one file", size), (LARGEST_SUM, "all files", self._sum)):
            if amount > limit:
                rule = f"{what} of it may hold {limit >> 20} MiB when unpacked"
                remedy = "Get it again from its home page, or take fewer images"
                raise DataError(self._path.name, rule, f"{amount >> 20} MiB at {name}", remedy)


def _check_count(path: Path, count: int) -> None:
    if count > MOST_FILES:
        raise DataError(path.name, f"it may hold {MOST_FILES:,} files", "more", "Take fewer images")
