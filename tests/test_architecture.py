"""The house's import law, read from the source: every room enters only the rooms it may."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "normgauge"
CELLAR = {"errors", "records", "stats", "documents", "store", "rng", "references", "threads"}
SEEN_BY_ALL = CELLAR | {"results"}  # what instruments give stands on the ground floor: it draws itself
MAY_IMPORT = {
    "results": {"charts"},
    "linalg": set(),
    "manifolds": set(),
    "theory": set(),
    "charts": set(),
    "nn": {"charts", "linalg"},
    "objective": {"linalg"},
    "optim": {"charts", "manifolds", "theory"},
    "network": {"objective"},
    "symmetry": {"charts", "linalg", "network", "objective"},
    "measure": {"charts", "linalg", "network", "nn", "objective", "symmetry", "theory"},
    "monitor": {"measure", "network", "objective"},
    "integrations": {"monitor"},
    "surgery": {"charts", "network", "nn", "objective", "symmetry"},
    "doctor": {"charts", "network", "objective", "surgery"},
    "lab": {"charts", "doctor", "measure", "nn", "objective", "optim", "surgery", "symmetry"},
    "papers": {"charts", "lab", "measure", "nn", "objective", "optim", "surgery", "symmetry", "theory"},
    "report": {"charts", "papers"},
    "cli": {"doctor", "lab", "monitor", "nn", "objective", "papers", "report", "surgery", "symmetry"},
    "testing": {"doctor", "nn", "objective"},
}
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
    allowed = SEEN_BY_ALL | {room} if room not in (*CELLAR, "charts") else CELLAR | {room}
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
    assert rooms - CELLAR <= set(MAY_IMPORT)
    assert {path.stem for path in ROOT.glob("*.py")} | rooms & CELLAR == SEEN_BY_ALL | {"__init__", "__main__"}


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


# -- cycles -----------------------------------------------------------------------------------------------------------


def import_graph(root):
    """Return the modules each module imports, lazily and for typing included; `from package import module` counts."""
    files = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for module, path in files.items():
        seen = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                seen |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = (f"{node.module}.{alias.name}" for alias in node.names)
                seen |= {name if name in files else node.module for name in inside}
        graph[module] = seen & set(files) - {module}
    return graph


def cycles(graph):
    """Return the sets of modules that import each other, directly or by way of others."""

    def reached(start):
        seen, open_ = set(), [start]
        while open_:
            for module in graph[open_.pop()] - seen:
                seen.add(module)
                open_.append(module)
        return seen

    behind = {module: reached(module) for module in graph}
    circles = {frozenset(other for other in behind[m] if m in behind[other]) for m in graph if m in behind[m]}
    return [set(circle) for circle in circles]


def test_no_import_goes_in_a_circle():
    assert cycles(import_graph(ROOT)) == []


def test_cycles_are_noticed(tmp_path):
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from house import b\n")
    (package / "b.py").write_text("def f():\n    import house.c\n")
    (package / "c.py").write_text("if TYPE_CHECKING:\n    from house.a import A\n")
    (package / "d.py").write_text("from house.a import A\n")
    assert cycles(import_graph(package)) == [{"house.a", "house.b", "house.c"}]


# -- calls ------------------------------------------------------------------------------------------------------------

MOST_POSITIONS = 6
FOREIGN = {"apply"}  # torch.autograd.Function.apply takes no keywords


def definitions(root):
    """Return the names of our functions and classes; one that collects `*names` has no positions to mix up."""
    names = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and node.args.vararg is None):
                names.add(node.name)
    return names - FOREIGN


def crowded_calls(path, names):
    """Return the calls of our own functions and classes with more positional arguments than one can keep apart."""
    crowded = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or len(node.args) <= MOST_POSITIONS:
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in names:
            crowded.append(f"{path.name}:{node.lineno} {name}")
    return crowded


def test_calls_name_their_arguments():
    names = definitions(ROOT)
    assert [call for path in ROOT.rglob("*.py") for call in crowded_calls(path, names)] == []


def test_crowded_calls_are_noticed(tmp_path):
    path = tmp_path / "crowd.py"
    path.write_text(
        "def f(a, b, c, d, e, f, g): ...\ndef g(*names): ...\n"
        "f(1, 2, 3, 4, 5, 6, 7)\nf(1, 2, 3, 4, 5, 6, g=7)\ng(1, 2, 3, 4, 5, 6, 7)\nprint(1, 2, 3, 4, 5, 6, 7)\n"
    )
    assert crowded_calls(path, definitions(tmp_path)) == ["crowd.py:3 f"]


# -- doors ------------------------------------------------------------------------------------------------------------


def break_ins(path):
    """Return where a file enters another room by its private modules, names, or an objective's private parts."""
    room, entered = room_of(path), []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("normgauge."):
            steps = [*node.module.split("."), *(alias.name for alias in node.names)]
            private = any(step.startswith("_") and not step.startswith("__") for step in steps)
            if private and steps[1] != room:
                entered.append(f"{path.name}:{node.lineno} {node.module}")
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
            if owner == "objective" != room:
                entered.append(f"{path.name}:{node.lineno} objective.{node.attr}")
    return entered


def test_rooms_are_entered_by_their_doors():
    assert [place for path in ROOT.rglob("*.py") for place in break_ins(path)] == []


def test_break_ins_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("test_architecture.ROOT", tmp_path)
    (tmp_path / "measure").mkdir()
    path = tmp_path / "measure" / "thief.py"
    path.write_text(
        "from normgauge.objective._data import take\nfrom normgauge.measure._own import f\n"
        "from normgauge.objective import Objective\ndef g(self, objective):\n"
        "    return objective._recipe, self.objective._terms, objective.loss()\n"
    )
    assert [place.split(" ")[1] for place in break_ins(path)] == [
        "normgauge.objective._data",
        "objective._recipe",
        "objective._terms",
    ]


PAGE = ROOT.parents[1] / "docs" / "dev" / "architecture.md"
MARKS = ("<!-- rooms: written by `python tests/test_architecture.py`, held by its test -->\n", "<!-- /rooms -->")


def entered(room):
    """Return the rooms a room enters now, besides the cellar and itself."""
    paths = [path for path in ROOT.rglob("*.py") if room_of(path) == room]
    rooms = {module.split(".")[1] for path in paths for module in imports(path) if "." in module}
    return sorted(rooms - SEEN_BY_ALL - {room, "__version__"})


def rooms_table():
    rooms = sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").exists() and path.name not in CELLAR)
    lines = [f"| {room} | {', '.join(entered(room)) or 'nothing'} |" for room in rooms]
    return "\n".join(["| room | enters |", "|---|---|", *lines]) + "\n"


def test_the_page_shows_the_rooms_as_they_are():
    shown = PAGE.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    assert shown == rooms_table(), "run python tests/test_architecture.py"


def test_no_room_is_allowed_what_it_does_not_use():
    idle = {
        room: sorted(allowed - set(entered(room))) for room, allowed in MAY_IMPORT.items() if (ROOT / room).exists()
    }
    assert not {room: names for room, names in idle.items() if names}


if __name__ == "__main__":
    head, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    PAGE.write_text(head + MARKS[0] + rooms_table() + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")
