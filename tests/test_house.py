"""The house: who may import whom, and what is public."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import cfedavg

SOURCE = Path(cfedavg.__file__).parent

# Each room, and the rooms that it may import. A room may always import itself.
MAY_IMPORT = {
    "errors": set(),
    "interrupts": set(),
    "keys": set(),
    "layout": set(),
    "payload": set(),
    "metrics": set(),
    "spec": {"errors"},
    "files": {"errors"},
    "option": {"errors"},
    "config": {"errors", "files", "option", "spec"},
    "kernel": set(),
    "draws": {"kernel"},
    "wire": {"draws", "kernel", "layout", "payload"},
    "compress": {"draws", "kernel", "errors", "keys", "layout", "payload", "spec"},
    "algorithm": {"compress", "layout", "payload"},
    "theory": set(),
    "generators": set(),
    "fingerprint": {"generators", "layout"},
    "task": {"errors", "fingerprint"},
    "schedule": {"config", "errors", "keys", "spec"},
    "local": {"keys", "layout", "task"},
    "evaluate": {"errors", "local", "metrics", "task"},
    "plan": {"compress", "config", "errors", "keys", "layout", "schedule", "task"},
    "tensors": {"files", "kernel"},
    "residuals": {"errors", "files", "keys", "tensors"},
    "state": {"errors", "residuals", "tensors"},
    "models": {"errors", "keys", "spec"},
    "data": {"config", "errors", "files", "keys", "models", "task"},
    "stack": {"errors", "keys", "local", "task", "tensors"},
    "engines": {"algorithm", "config", "errors", "evaluate", "files", "generators", "interrupts", "keys",
                "layout", "local", "metrics", "payload", "plan", "residuals", "stack", "state",
                "task", "tensors", "wire"},
    "folder": {"config", "errors", "files", "metrics", "residuals", "state"},
    "workers": {"config", "data", "engines", "errors", "files", "interrupts", "local", "plan", "state",
                "task"},
    "loop": {"config", "data", "engines", "errors", "files", "folder", "interrupts", "metrics", "plan",
             "report", "residuals", "state", "task", "tensors", "theory", "units", "wire", "workers"},
    "sweep": {"compress", "config", "errors", "schedule", "spec"},
    "units": set(),
    "report": {"config", "errors", "files", "metrics", "units", "__init__"},
    "display": {"loop", "metrics", "units"},
    "inspection": {"compress", "errors", "files", "layout", "payload", "wire"},
    "federation": {"algorithm", "compress", "errors", "files", "keys", "layout", "payload", "tensors",
                   "wire"},
    "flower": {"algorithm", "compress", "config", "data", "display", "engines", "errors", "evaluate",
               "federation", "files", "folder", "interrupts", "keys", "layout", "local", "metrics",
               "payload", "plan", "report", "task", "tensors", "wire"},
    "reproduce": {"compress", "config", "data", "display", "errors", "files", "folder", "layout", "local",
                  "loop", "metrics", "models", "option", "report", "schedule", "task", "theory", "units",
                  "__init__"},
    "cli": {"compress", "config", "data", "display", "errors", "files", "flower", "inspection", "layout",
            "interrupts", "loop", "report", "reproduce", "sweep", "units", "__init__"},
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


def test_the_core_stays_light() -> None:
    """Only report and reproduction draw, only the command parses options, and the wire needs no torch.

    Flower and what it brings along are for one room, and nobody but the command enters it, when asked to.
    """
    for path in SOURCE.rglob("*.py"):
        used = {m.split(".")[0] for m in imports(path)}
        assert "matplotlib" not in used or room(path) in {"report", "reproduce"}, path
        assert "typer" not in used or room(path) == "cli", path
        assert not used & {"flwr", "cryptography"} or room(path) == "flower", path
        if room(path) in {"wire", "keys", "layout", "payload", "errors", "kernel"}:
            assert "torch" not in used, path
        if room(path) == "wire":
            assert used - sys.stdlib_module_names <= {"numpy", "cfedavg"}, path


def test_public_names() -> None:
    assert sorted(cfedavg.__all__) == list(cfedavg.__all__)
    for name in cfedavg.__all__:
        thing = getattr(cfedavg, name)
        assert thing.__doc__, f"{name} has no docstring"
    assert set(cfedavg.__all__) == {n for names in cfedavg._HOME.values() for n in names}
    assert dir(cfedavg) == sorted([*cfedavg.__all__, "__version__"])
