"""The house: who may import whom, and what is public."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import cfedavg
from cfedavg.core.extras import EXTRAS

SOURCE = Path(cfedavg.__file__).parent

# Each room, and the rooms that it may import. A room may always import itself.
MAY_IMPORT = {
    "adapters": {"core"},
    "core": set(),
    "theory": set(),
    "wire": {"core"},
    "compress": {"core"},
    "feedback": {"compress", "core"},
    "channel": {"compress", "core", "feedback"},
    "optimise": {"core"},
    "algorithm": {"compress", "core", "feedback", "optimise"},
    "control": {"algorithm", "channel", "compress", "core", "feedback"},
    "callbacks": {"core"},
    "schedule": {"core", "optimise"},
    "guard": {"compress", "core", "feedback"},
    "models": {"core"},
    "task": {"core"},
    "data": {"core", "models", "task"},
    "report": {"__init__", "core"},
    "simulate": {"algorithm", "callbacks", "channel", "compress", "control", "core", "data", "feedback",
                 "guard", "optimise", "report", "schedule", "task", "theory", "wire"},
    "federate": {"channel", "compress", "core", "wire"},
    "flower": {"algorithm", "channel", "compress", "core", "federate", "feedback", "guard", "optimise",
               "report", "wire"},
    "launch": {"callbacks", "compress", "core", "data", "feedback", "flower", "simulate", "task"},
    "sweep": {"__init__", "callbacks", "core", "report", "schedule", "simulate"},
    "tuner": {"callbacks", "compress", "core", "data", "report", "simulate", "task", "wire"},
    "cli": {"__init__", "callbacks", "compress", "core", "data", "feedback", "launch", "optimise", "report",
            "simulate", "sweep", "tuner", "wire"},
}  # fmt: skip

# Who may import a library that the core does without, anywhere in the file. A name ends in .py for one
# module, and is a room otherwise.
MAY_USE = {
    "flwr": {"flower", "launch"},
    "cryptography": {"flower", "launch"},
    "fontTools": {"report"},  # comes with matplotlib
    "huggingface_hub": {"data"},
    "IPython": {"callbacks"},  # only inside a notebook
    "llvmlite": {"simulate"},
    "matplotlib": {"report"},
    "numba": {"core/kernels.py", "simulate"},
    "pandas": {"simulate/result.py"},
    "PIL": {"data", "report"},
    "pyarrow": {"data"},
    "rich": {"callbacks", "cli", "data"},
    "torch": {
        "adapters", "cli", "core/fingerprint.py", "core/tensors.py", "data", "launch", "models",
        "optimise/local.py", "simulate", "sweep", "task", "tuner",
    },
    "triton": {"simulate"},
    "typer": {"cli"},
}  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "cfedavg":
            found |= {f"cfedavg.{a.name}" if (SOURCE / a.name).exists() or (SOURCE / f"{a.name}.py").exists()
                      else "cfedavg.__init__" for a in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_dependencies_point_the_right_way() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        here = room(path)
        if here == "__init__":
            continue
        assert here in MAY_IMPORT, f"a new room {here}: say in MAY_IMPORT what it may import"
        used = {m.split(".")[1] for m in imports(path) if m.startswith("cfedavg.")} - {here}
        wrong += [f"{path.relative_to(SOURCE)} imports {other}" for other in used - MAY_IMPORT[here]]
    assert not wrong


def test_allowed_imports_have_no_circle() -> None:
    done: set[str] = set()
    left = {name: uses - {"__init__"} for name, uses in MAY_IMPORT.items()}
    while left:
        ready = {name for name, uses in left.items() if uses <= done}
        assert ready, f"a circle among {sorted(left)}"
        done |= ready
        left = {name: uses for name, uses in left.items() if name not in ready}


def test_the_picture_shows_this_table() -> None:
    """If it fails: python -m scripts.draw_rooms"""
    from scripts import draw_rooms  # which imports the table

    assert draw_rooms.fingerprint() in draw_rooms.PICTURE.read_text()


def import_graph(folder: Path) -> dict[str, set[str]]:
    """Each module of a package, and those of them it imports outside of functions, for types as well."""
    paths = {module_name(path, folder): path for path in folder.rglob("*.py")}
    return {name: (module_imports(path, {*paths}) & {*paths}) - {name} for name, path in paths.items()}


def module_name(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_imports(path: Path, modules: set[str]) -> set[str]:
    """What a file imports: `from a import b` is a.b if that is one of the modules, and a otherwise."""
    found, left = set(), list[ast.AST](ast.parse(path.read_text()).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left += ast.iter_child_nodes(node)
    return found


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The groups of modules that import each other, through others or at once."""
    reached = {name: set(uses) for name, uses in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    return {
        frozenset(other for other in graph if other in reached[name] and name in reached[other])
        for name in graph
        if name in reached[name]
    }


def test_no_modules_import_each_other() -> None:
    assert not cycles(import_graph(SOURCE))


def test_a_cycle_is_found(tmp_path: Path) -> None:
    """Through a third module, and if an import is for types only; not if it is made in a function."""
    package = tmp_path / "package"
    package.mkdir()
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.{} import X\n"
    texts = {"a": "import package.b\n", "b": typed.format("c"), "c": typed.format("a")}
    texts |= {"d": "import package.e\n", "e": "def f():\n    import package.d\n"}
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    assert cycles(import_graph(package)) == {frozenset({"package.a", "package.b", "package.c"})}


def test_libraries_stay_in_their_rooms() -> None:
    """Flower and NumPy are enough for a client: what else is installed is imported by those who need it."""
    wrong = []
    for path in SOURCE.rglob("*.py"):
        used = {m.split(".")[0] for m in imports(path)} - sys.stdlib_module_names - {"numpy", "cfedavg"}
        here = {room(path), path.relative_to(SOURCE).as_posix()}
        wrong += [f"{path} imports {name}" for name in used if not MAY_USE.get(name, set()) & here]
        assert not used or room(path) != "wire", path
    assert not wrong


def test_each_library_of_an_extra_has_its_rooms() -> None:
    assert EXTRAS.keys() <= MAY_USE.keys()


def test_public_names() -> None:
    assert len(set(cfedavg.__all__)) == len(cfedavg.__all__)  # ruff keeps the order
    for name in cfedavg.__all__:
        thing = getattr(cfedavg, name)
        assert thing.__doc__, f"{name} has no docstring"
    assert set(cfedavg.__all__) == {n for names in cfedavg._HOME.values() for n in names}
    assert dir(cfedavg) == sorted([*cfedavg.__all__, "__version__"])
