"""A user's own code by its name: imported, called, and told apart by digests of its source."""

import ast
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from normgauge.errors import InputError, NormgaugeError

_LIBRARIES = [Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES.append(Path(__file__).resolve().parents[1])  # normgauge itself
_IMPORTED: dict[str, tuple[ModuleSpec | None, str]] = {}  # module -> its import, and the digest its source had then


def import_function(kind: str, path: str, what: str) -> Callable[..., Any]:
    """Import `package.module:function`, also from the folder the command is run in.

    The folder is searched last, so that no file in it can stand in for a library that others import.
    """
    module_name, _, name = path.partition(":")
    here = Path.cwd()
    if str(here) not in sys.path:  # `python -m` and scripts have it; console scripts and worker processes do not
        sys.path.append(str(here))
    try:
        module = importlib.import_module(module_name)
        _refuse_namesake(kind, path, here, module)
        function: Any = module
        for part in name.split("."):
            function = getattr(function, part)
        return function
    except NormgaugeError:
        raise
    except Exception as error:
        missing = isinstance(error, (ImportError, AttributeError, ValueError))
        rule, got = f"package.module:name must be importable and name {what}", describe_error(error)
        step = "Run from the folder that holds the package, or install it" if missing else "Correct the module"
        raise InputError(f"{kind} {path!r}", rule, str(error) if missing else got, step) from error


def _refuse_namesake(kind: str, path: str, here: Path, module: ModuleType) -> None:
    """Refuse a library that was imported although a file of that name lies here: it is not what was meant."""
    top = module.__name__.partition(".")[0]
    own = next((file for file in (here / f"{top}.py", here / top / "__init__.py") if file.is_file()), None)
    origin = getattr(sys.modules[top], "__file__", None)
    if own is not None and (origin is None or not Path(origin).resolve().is_relative_to(own.parent.resolve())):
        rule = f"{own.name if own.parent == here else own.parent.name} must not have the name of a library"
        raise InputError(f"{kind} {path!r}", rule, f"{top} from {origin or 'Python'}", "Rename your file")


def call_function(kind: str, path: str, what: str, *arguments: Any, **knobs: Any) -> Any:
    """Import a user's function and call it; see `import_function`."""
    function = import_function(kind, path, what)
    try:
        return function(*arguments, **knobs)
    except NormgaugeError:
        raise
    except Exception as error:
        given = ", ".join(repr(a) if isinstance(a, (str, float)) else type(a).__name__ for a in arguments)
        rule = f"the call ({given}) must return"
        raise InputError(f"{kind} {path!r}", rule, describe_error(error), "Correct it") from error


def name_of(function: Callable[..., Any]) -> str:
    """Return `package.module:function` of a function, by which worker processes find it.

    Examples:
        >>> name_of(name_of)
        'normgauge.lab.imports:name_of'
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<unnamed>")
    if module in (None, "__main__") or "<" in name:
        rule = "a function must stand at the top of a module, where worker processes can import it"
        step = "Move it into a file of its own, and pass it or its name package.module:function"
        raise InputError("compare", rule, f"{module}:{name}", step)
    return f"{module}:{name}"


def describe_error(error: BaseException) -> str:
    """Return an error's type, words and place: the last line in a user's own file, or else the last line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    place = ""
    if frames and not isinstance(error, SyntaxError):  # whose words name file and line
        last = ([frame for frame in frames if is_own(frame.filename)] or frames)[-1]
        place = f" ({last.filename}, line {last.lineno}, in {last.name})"
    return f"{type(error).__name__}: {error}{place}"


def is_own(file: str | None) -> bool:
    """Say whether a file is a user's: neither Python's, nor an installed package's, nor normgauge's."""
    if not file or file.startswith("<") or not file.endswith(".py"):
        return False
    place = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(place.parts):
        return False
    return not any(place.is_relative_to(library) for library in _LIBRARIES)


def code_digests(path: str) -> dict[str, str]:
    """Return module -> 12 hex digits of the SHA-256 of its source: a function's module, and what it imports.

    Imports are read from the sources, those inside of functions too, and followed through the user's own modules;
    Python's, installed packages and normgauge do not count. Files that code reads, and modules whose names it computes,
    are not seen.
    """
    import_function("model", path, "a function")
    digests: dict[str, str] = {}
    waiting = [path.partition(":")[0]]
    while waiting:
        name = waiting.pop()
        spec = _find_module(name)
        if name in digests or spec is None or not is_own(spec.origin):
            continue
        source = Path(str(spec.origin)).read_bytes()
        digests[name] = hashlib.sha256(source).hexdigest()[:12]
        _refuse_stale(name, digests[name])
        waiting += _imported_names(source, name if spec.submodule_search_locations else name.rpartition(".")[0])
        waiting += [name.rpartition(".")[0]] if "." in name else []
    return dict(sorted(digests.items()))


def _find_module(name: str) -> ModuleSpec | None:
    """Return where a module comes from, importing nothing; `None` for what is no module or cannot be found."""
    root, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def _refuse_stale(name: str, digest: str) -> None:
    module = sys.modules.get(name)
    if module is None:
        return
    loaded, before = _IMPORTED.get(name, (None, digest))
    if loaded is module.__spec__ and before != digest:
        rule = "the module must be the one this process imported"
        step = "Start Python anew, or importlib.reload it"
        raise InputError(f"module {name!r}", rule, "a file that was edited since", step)
    _IMPORTED[name] = (module.__spec__, digest)


def _imported_names(source: bytes, package: str) -> Iterator[str]:
    """Yield the absolute names that a source imports; `from a import b` may mean the module a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
