"""The house's import law, read from the source: every room enters only the rooms it may."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "normgauge"
CELLAR = {"errors", "records", "store", "rng", "references"}
MAY_IMPORT = {
    "linalg": set(),
    "manifolds": set(),
    "theory": set(),
    "charts": set(),
    "nn": {"linalg", "manifolds"},
    "objective": {"linalg"},
    "optim": {"manifolds", "linalg"},
    "symmetry": {"nn", "manifolds", "objective", "linalg", "charts"},
    "measure": {"theory", "linalg", "nn", "objective", "symmetry", "charts"},
    "claims": {"theory", "linalg", "manifolds", "nn", "objective", "symmetry", "optim", "measure"},
    "surgery": {"nn", "objective", "linalg", "charts"},
    "doctor": {"measure", "symmetry", "objective", "nn", "optim", "charts"},
    "testing": {"theory", "linalg", "manifolds", "nn", "objective", "symmetry", "optim", "measure", "claims"},
    "report": {"charts", "claims", "theory"},
}
FLOORS = {
    "theory",
    "linalg",
    "manifolds",
    "charts",
    "nn",
    "objective",
    "optim",
    "symmetry",
    "measure",
    "surgery",
    "doctor",
}
MAY_IMPORT["lab"] = FLOORS | {"claims"}
MAY_IMPORT["cli"] = {"lab", "doctor", "claims", "report", "nn", "symmetry", "objective", "measure"}
FORBIDDEN_NAMES = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
LONGEST = 600


def imports(path):
    """Yield every module of ours that a file imports, at top level or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "normgauge")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            if (node.module or "").split(".")[0] == "normgauge":
                yield node.module if node.module != "normgauge" else f"normgauge.{node.names[0].name}"


def room_of(path):
    inside = path.relative_to(ROOT).parts
    return inside[0] if len(inside) > 1 else Path(inside[0]).stem


def trespasses(path, allowed_by_room=MAY_IMPORT):
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return []
    allowed = CELLAR | {room} if room not in CELLAR else CELLAR
    allowed = allowed | allowed_by_room.get(room, set())
    found = []
    for module in imports(path):
        target = module.split(".")[1] if "." in module else "the facade"
        if target not in allowed and not (room == "cli" and target == "__version__"):
            found.append(f"{path.relative_to(ROOT)}: {room} must not import {target}")
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_house(path):
    assert not trespasses(path)


def test_every_room_is_on_the_plan():
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= set(MAY_IMPORT)
    assert {path.stem for path in ROOT.glob("*.py")} == CELLAR | {"__init__", "__main__"}


def test_files_have_telling_names_and_readable_lengths():
    for path in ROOT.rglob("*.py"):
        assert path.name not in FORBIDDEN_NAMES
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST, f"{path.name} asks to become two"


def test_the_law_notices_trespassers(tmp_path, monkeypatch):
    monkeypatch.setattr("test_architecture.ROOT", tmp_path)
    (tmp_path / "theory").mkdir()
    bad = tmp_path / "theory" / "bound.py"
    bad.write_text(
        "import normgauge\nfrom normgauge.measure import spectrum\ndef f():\n    import normgauge.lab.data\n"
    )
    assert [line.rsplit(" ", 1)[-1] for line in trespasses(bad)] == ["facade", "measure", "lab"]
