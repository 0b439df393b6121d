"""The paper's archive: tables, figures and claims are made of its cells, on the public API alone."""

from __future__ import annotations

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cfedavg
from cfedavg import Callback
from cfedavg.sweep import CELLS, read_cell, read_cells, write_markdown
from paper.cfedavg import __main__ as paper
from paper.cfedavg.claims.page import judge_all, write_page

HERE = Path(paper.__file__).parent
PUBLIC = ("cfedavg", "cfedavg.compress", "cfedavg.data", "cfedavg.report", "cfedavg.sweep", "cfedavg.theory")
PAPERS = HERE.parent
MODULES = sorted(PAPERS.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PAPERS).as_posix())
def test_the_paper_uses_the_public_api_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("cfedavg") for alias in node.names), ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "cfedavg":
            assert node.module in PUBLIC, ast.unparse(node)
            names = {alias.name for alias in node.names}
            assert names <= {*importlib.import_module(node.module).__all__}, ast.unparse(node)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PAPERS).as_posix())
def test_examples(path: Path) -> None:
    name = ".".join(path.relative_to(PAPERS).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(f"paper.{name}")
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("room", ["report", "sweep"])
def test_public_names_have_docstrings(room: str) -> None:
    module = importlib.import_module(f"cfedavg.{room}")
    for name in module.__all__:
        thing = getattr(module, name)
        assert not (callable(thing) and not thing.__doc__), name
    assert cfedavg.resolve_rates.__doc__


def test_tables_are_made_of_the_cells() -> None:
    """`make paper` again would change no number."""
    found, seen = read_cells(paper.RESULTS / CELLS), set[str]()
    for study in map(paper.find, paper.names()):
        own = {name: found[name] for name in study.cells(range(20)) if name in found}
        seen |= own.keys()
        path = paper.RESULTS / f"{study.name}.md"
        assert path.exists() == path.with_suffix(".png").exists() == bool(own), study.name
        if own:
            assert path.read_text() == f"# {study.title}\n\n{write_markdown(study.table(own))}", study.name
    assert seen == found.keys()


def test_claims_are_made_of_the_cells() -> None:
    found = read_cells(paper.RESULTS / CELLS)
    mine, planned = paper.cells_of_scale(found, "paper")
    assert mine == found
    judged = judge_all(found, planned)
    assert (HERE / "claims.md").read_text() == write_page(judged, HERE / "claims.toml")


def test_cells_say_how_they_were_made() -> None:
    for cell in read_cells(paper.RESULTS / CELLS).values():
        assert cell.made.keys() == {"command", "seconds", "version", "torch", "python", "hardware"}
        assert cell.made["command"].startswith(("cfedavg reproduce ", "python -m paper.cfedavg run "))
        assert "/" not in cell.made["command"].replace("--data-dir DIR", "")


def numbers(value: Any) -> Iterator[float | None]:
    """All numbers in lists and tables of a small study."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    else:
        yield value


LONG = (
    "speedup-m16-topk0.9-seed1", "bounds-theorem3-rd-T1024-m2-K1-3-g2.5-seed0", "variance-K4-m2-g2.5-seed0",
    "conditions-p1-start-seed0",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["speedup-m64-none-seed2", *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_cells_of_small_studies_come_out_again(name: str, tmp_path: Path) -> None:
    """To the digits that rounding on another processor leaves alone."""
    cell = read_cell(paper.RESULTS / CELLS / f"{name}.json")
    again = paper.find(name.partition("-")[0]).measure(name, cell.settings, tmp_path, Callback())
    assert list(numbers(again)) == pytest.approx(list(numbers(cell.values)), rel=0.01)
