"""The docs site builds without a warning, its commands are those of today, and its start pages work."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from scripts import site_hook, site_reference, try_docs

import cfedavg
from cfedavg.cli.commands import app
from cfedavg.compress import parse
from cfedavg.core.config import OPTIONS, Config

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "paper/cfedavg/README.md",
    ROOT / "paper/feedback/README.md",
    ROOT / "CONTRIBUTING.md",
]
EXTERNAL = re.compile(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=[\"']?(https?:)?//")


def python(*arguments: object, cwd: Path = ROOT, **variables: str) -> None:
    """Run Python with this checkout, and show what it printed if it failed."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "NO_MKDOCS_2_WARNING": "1"} | variables
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_site_is_whole(tmp_path: Path) -> None:
    python("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path)
    for page in tmp_path.rglob("*.html"):
        assert not EXTERNAL.search(page.read_text()), f"{page} loads something of another site"
    options = (tmp_path / "reference/options.html").read_text()
    assert [name for name in OPTIONS if f'id="{name}"' not in options] == []
    names = (tmp_path / "reference/python.html").read_text()
    assert [name for name in cfedavg.__all__ if f".{name}" not in names] == []
    packages = (tmp_path / "reference/packages.html").read_text()
    for package in site_reference.PACKAGES:
        public = {*importlib.import_module(f"cfedavg.{package}").__all__} - {*cfedavg.__all__}
        assert [name for name in public if f".{name}" not in packages and f">{name}<" not in packages] == []
    commands = (tmp_path / "reference/commands.html").read_text()
    assert [name for name in ("cfedavg run", "--round-timeout", "#eta_local") if name not in commands] == []
    assert (tmp_path / "source/src/cfedavg/algorithm.py.html").exists()
    assert (tmp_path / "images/both-ways.png").exists()


def test_options_and_quantities_stay_on_one_line() -> None:
    page = "<p><code>run --link 4g</code>: 3 MB in 2 s</p><pre>--link 3 MB</pre>"
    option = '<span class="whole">--link</span>'
    wanted = f"<p><code>run {option} 4g</code>: 3&nbsp;MB in 2&nbsp;s</p><pre>--link 3 MB</pre>"
    assert site_hook.on_page_content(page) == wanted


def test_links_that_leave_the_docs_are_rewritten() -> None:
    assert site_hook.resolve("../src/cfedavg/task.py", "runs.md") == "src/cfedavg/task.py"
    assert site_hook.resolve("docs/wire.md", "index.md") == "docs/wire.md"
    assert site_hook.resolve("https://flower.ai", "index.md") is None
    code = "```\n[a](b.md)\n```\n"
    assert site_hook.linked(f"[a](c.md#x)\n{code}", "runs.md") == ["docs/c.md"]
    assert site_hook.outside_code(f"a\n{code}a", lambda text: text.replace("a", "b")) == f"b\n{code}b"
    places = [site_hook.place(name) for name in [*site_hook.OUTSIDE, "docs/wire.md"]]
    assert [site_hook.place(site_hook.origin(place)) for place in places] == places


def command_lines() -> Iterator[Any]:
    """Yield the lines of the docs that call `cfedavg`: in code blocks, and in backticks with an option."""
    for page in PAGES:
        text = page.read_text()
        blocks = "\n".join(re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
        lines = [line for line in blocks.replace("\\\n", " ").splitlines() if line.startswith("cfedavg ")]
        lines += re.findall(r"`(cfedavg [^`]* --[^`]*)`", text)
        for line in dict.fromkeys(lines):
            if "..." not in line:
                yield pytest.param(line, id=f"{page.name}: {line[:60]}")


# What a reader puts in the place of a letter.
PLACEHOLDERS = {"P": "1", "S": "1", "C": "none", "PRECISION": "bf16"}


@pytest.mark.parametrize("line", list(command_lines()))
def test_commands_in_the_docs_parse(line: str) -> None:
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)[1:]]
    command = typer.main.get_command(app)
    while inner := getattr(command, "commands", None):
        command = inner[words.pop(0)]
    words = [word.strip("[]") for word in words if word != "--help"]  # [...] may be left out
    if words and words[-1].startswith("--"):  # the text names an option, and not its value
        assert words.pop() in {name for parameter in command.params for name in parameter.opts}
    given = command.make_context("cfedavg", words).params
    fields = {name: value for name, value in given.items() if name in OPTIONS and value is not None}
    config = Config().replace(**fields)
    assert parse(config.compressor)
    assert parse(config.compressor_down)


def test_programs_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(r"(?:`|^)make ([a-z-]+)(?:`|$)", text, re.MULTILINE):
            assert name in targets, f"{page.name}: make {name}"
        for name in re.findall(r"python (bench/\w+\.py)", text):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_a_page_is_read_as_it_is_typed() -> None:
    script = try_docs.read_page(ROOT / "docs/start/python.md")
    assert list(script.files) == ["mine.py"]
    assert script.commands.split("\n")[-3:-1] == ["python mine.py", "cfedavg report runs/none runs/small"]
    assert try_docs.read_page(ROOT / "docs/start/flower.md").extras == "[flower]"
    notebook = try_docs.read_page(try_docs.NOTEBOOK)
    assert (notebook.extras, notebook.packages) == ("[sim]", ("pandas", "nbconvert", "ipykernel"))


@pytest.mark.slow
@pytest.mark.parametrize("page", try_docs.PAGES, ids=lambda page: page.name)
def test_start_pages_work_as_written(page: Path, tmp_path: Path) -> None:
    """With the packages of this environment; `make try-docs` makes an empty one for each page."""
    (tmp_path / "work").mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src")}
    try_docs.type_commands(try_docs.read_page(page), tmp_path / "work", environment)
