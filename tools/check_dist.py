"""Check what would be released: `python tools/check_dist.py dist [requirement ...]`, after `python -m build`.

Wheel and sdist hold every file of the package and nothing foreign; the wheel, installed in a clean environment (after
the given requirements, such as `torch==2.13.0`), says its version and runs README's Python example from another folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml", "constraints.txt"}
FOREIGN = re.compile(
    r"__pycache__|\.pyc$|\.sqlite$|(^|/)\.(venv|git|ci|mypy|ruff|pytest|hypothesis)[^/]*/|(^|/)(site|dist)/"
)


def package_files() -> set[str]:
    """Return the files of the package, as paths below src/."""
    src = ROOT / "src"
    files = (path for path in (src / "normgauge").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(src).as_posix() for path in files}


def wheel_faults(names: set[str], package: set[str]) -> list[str]:
    """Return what a wheel's file names lack or have too much."""
    inside = {name for name in names if not re.match(r"normgauge-[^/]+\.dist-info/", name)}
    return [
        *(f"the wheel lacks {name}" for name in sorted(package - inside)),
        *(f"the wheel has {name}, which is no file of the package" for name in sorted(inside - package)),
        *(
            f"the wheel lacks {end}"
            for end in ("METADATA", "licenses/LICENSE")
            if not any(n.endswith(end) for n in names)
        ),
    ]


def sdist_faults(names: set[str], package: set[str]) -> list[str]:
    """Return what an sdist's file names, below its top folder, lack or have too much."""
    wanted = BESIDE | {f"src/{name}" for name in package}
    return [
        *(f"the sdist lacks {name}" for name in sorted(wanted - names)),
        *(f"the sdist has {name}" for name in sorted(names) if FOREIGN.search(name)),
    ]


def example() -> str:
    """Return README's first Python block, preceded by a check that the installed package runs."""
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    assert block, "README.md has no Python block"
    first = "import sys, normgauge\nassert normgauge.__file__.startswith(sys.prefix), normgauge.__file__\n"
    return first + block.group(1)


def run_installed(wheel: Path, requirements: list[str]) -> None:
    """Install the wheel in a clean environment and use it from another folder."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder).resolve()
        venv.create(there / "env", with_pip=True)
        programs = there / "env" / ("Scripts" if os.name == "nt" else "bin")
        pip = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]

        def run(*command: str | Path) -> str:
            print("+", *(str(word).replace(str(there), "") for word in command[:4]), flush=True)
            return subprocess.run(command, cwd=there, env=clean, check=True, stdout=subprocess.PIPE, text=True).stdout

        for requirement in requirements:
            run(*pip, requirement)
        run(*pip, wheel.resolve())
        said = run(programs / "normgauge", "--version")
        version = wheel.name.split("-")[1]
        assert said.startswith(f"normgauge {version} "), f"normgauge --version said {said!r}, the wheel is {version}"
        (there / "example.py").write_text(example(), encoding="utf-8")
        print(said + run(programs / "python", "example.py"))


def main(folder: Path, requirements: list[str]) -> None:
    """Check the one wheel and the one sdist of a folder."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    package = package_files()
    with zipfile.ZipFile(wheel) as archive:
        faults = wheel_faults(set(archive.namelist()), package)
    with tarfile.open(sdist) as archive:
        faults += sdist_faults({m.name.split("/", 1)[1] for m in archive if m.isfile()}, package)
    if faults:
        sys.exit("\n".join(faults))
    print(f"{wheel.name} and {sdist.name}: {len(package)} files of the package, all there")
    run_installed(wheel, requirements)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
