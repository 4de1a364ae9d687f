"""What is released: one version everywhere, floors that are tested, archives that are whole."""

import importlib.util
import re
import tomllib
from pathlib import Path

import normgauge as ng

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def load_check():
    spec = importlib.util.spec_from_file_location("check_dist", ROOT / "tools" / "check_dist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def floors(requirements):
    found = (re.match(r"([a-z0-9-]+)>=([0-9.]+)$", line) for line in requirements)
    return {match[1]: match[2] for match in found if match}


def test_one_version_everywhere():
    assert f"version: {ng.__version__}\n" in read("CITATION.cff")
    assert re.search(r"^## \[([^]]+)\]", read("CHANGELOG.md"), flags=re.M)[1] in (ng.__version__, "Unreleased")


def test_the_newest_section_of_the_changelog_says_which_numbers_changed():
    section = read("CHANGELOG.md").split("\n## [")[1]
    assert "### Numbers\n" in section


def test_the_lowest_versions_are_the_floors():
    extras = PROJECT["optional-dependencies"]
    wanted = floors(
        [*PROJECT["dependencies"], *(line for name in ("lab", "cluster", "transformers") for line in extras[name])]
    )
    pinned = dict(line.split("==") for line in read("constraints-lowest.txt").splitlines() if "==" in line)
    torch = wanted.pop("torch")
    assert f"PyTorch {torch} is the oldest" in read("README.md")
    for name, floor in wanted.items():
        assert (pinned[name] + ".").startswith(floor + "."), name


def test_archives_that_lack_or_add_a_file_are_told():
    check = load_check()
    package = check.package_files()
    assert {"normgauge/__init__.pyi", "normgauge/py.typed", "normgauge/references.bib"} <= package
    meta = {"normgauge-1.dist-info/METADATA", "normgauge-1.dist-info/licenses/LICENSE"}
    assert check.wheel_faults(package | meta, package) == []
    assert check.wheel_faults((package | meta) - {"normgauge/py.typed"}, package) == [
        "the wheel lacks normgauge/py.typed"
    ]
    assert len(check.wheel_faults(package | meta | {"tests/test_store.py"}, package)) == 1
    whole = check.BESIDE | {f"src/{name}" for name in package}
    assert check.sdist_faults(whole, package) == []
    assert check.sdist_faults(whole | {".ci/run", "tests/__pycache__/a.pyc"}, package) == [
        "the sdist has .ci/run",
        "the sdist has tests/__pycache__/a.pyc",
    ]
    assert check.sdist_faults(whole - {"SECURITY.md"}, package) == ["the sdist lacks SECURITY.md"]


def test_the_example_that_is_run_is_the_readmes():
    assert "ng.spectrum(objective, top=3)" in load_check().example()
