"""Where a number came from: versions, machine, revision; never names of people or hosts."""

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from normgauge.records import Provenance

PACKAGES = ("normgauge", "torch", "numpy", "scipy", "scikit-learn", "altair")


@cache
def provenance() -> Provenance:
    """Return versions, machine and code revision, the same for all runs of a process."""
    machine: dict[str, str | int] = {
        "system": platform.system(),
        "processor": platform.machine(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "threads": 1,  # of every run, wherever it runs: see `run.one_thread`
    }
    return Provenance(platform.python_version(), {name: _version(name) for name in PACKAGES}, machine, _revision())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """Return the git revision of a source checkout, with `+dirty` if it has uncommitted changes."""
    root = Path(__file__).resolve().parents[4]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+dirty" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
