"""Wheel and sdist hold what they must and nothing else, and the wheel works where it alone is installed."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from html.parser import HTMLParser
from pathlib import Path

import pytest
from scripts import check_package, package_page
from scripts.build_package import build, copy_source, read_wheel, unpack

import cfedavg

for tool in ("build", "twine"):
    pytest.importorskip(tool)
clean = pytest.importorskip("readme_renderer.clean").clean
markdown, yaml = pytest.importorskip("markdown"), pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
SHORT = "--model", "linear", "--clients", "2", "--rounds", "1"
INSTALLED = """
import sys
from importlib.resources import files
import cfedavg.data, cfedavg.report
assert cfedavg.__file__.startswith(sys.prefix), cfedavg.__file__
assert files("cfedavg").joinpath("py.typed").is_file()
print(len(cfedavg.data.load("embedded").train))
"""


def source_files() -> set[str]:
    package = ROOT / "src" / "cfedavg"
    paths = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT / "src").as_posix() for path in paths if path.suffix != ".so"}


def test_wheel_and_sdist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel of the repository is that of its sdist, byte for byte; it works in an empty environment.

    There is no compiler here; `make check-package` builds with one.
    """
    monkeypatch.setenv("CC", str(tmp_path / "no compiler"))
    sdist, wheel = build(copy_source(tmp_path / "source"), tmp_path / "dist", "--sdist", "--wheel")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel], check=True)
    content = read_wheel(wheel)
    check_wheel(content)
    check_sdist(sdist)
    (again,) = build(unpack(sdist, tmp_path / "sdist"), tmp_path / "again", "--wheel")
    assert again.name == wheel.name == f"cfedavg-{cfedavg.__version__}-py3-none-any.whl"
    assert read_wheel(again) == content
    run_wheel(wheel, tmp_path / "empty")


def check_wheel(content: dict[str, bytes]) -> None:
    about = f"cfedavg-{cfedavg.__version__}.dist-info/"
    package = {name for name in content if not name.startswith(about)}
    assert package == source_files()
    assert {name.removeprefix(about) for name in content.keys() - package} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt",
        "licenses/LICENSE", "licenses/src/cfedavg/data/NOTICE.md",
    }  # fmt: skip
    metadata = email.message_from_bytes(content[f"{about}METADATA"])
    assert metadata.get_payload(decode=True).decode().strip() == package_page.describe().strip()
    assert metadata["Description-Content-Type"] == "text/markdown"


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    package = {name for name in names if name.startswith("src/cfedavg/")}
    assert package == {f"src/{name}" for name in source_files()}
    other = {name for name in names - package if not name.startswith(("src/cfedavg.egg-info/", "clients/c/"))}
    assert other == {
        "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml",
        "scripts/package_page.py", "setup.cfg", "setup.py",
    }  # fmt: skip
    clients = ROOT / "clients" / "c"
    assert {name for name in names if name.startswith("clients/")} == {
        path.relative_to(ROOT).as_posix()
        for path in clients.rglob("*")
        if path.is_file() and "build" not in path.parts
    }


def run_wheel(wheel: Path, folder: Path) -> None:
    """Install the wheel alone into an empty environment; the packages that it needs are those of this one."""
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = sys.executable, "-m", "pip", "--python", python, "install", "--quiet"
    subprocess.run([*pip, "--no-index", "--no-deps", "--no-compile", wheel], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "needs.pth").write_text(sysconfig.get_path("purelib"))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["CFEDAVG_KERNELS"] = "python"  # numba would compile for many seconds
    for command, words in (
        ([folder / "bin" / "cfedavg", "--version"], cfedavg.__version__),
        (
            [folder / "bin" / "cfedavg", *["run", "--model", "linear", "--clients", "2", "--rounds", "1"]],
            "written to runs",
        ),
        ([python, "-c", INSTALLED], "10000"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout


class Targets(HTMLParser):
    """Collect where the links and pictures of a page lead, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links, self.pictures, self.words = list[str](), list[str](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {"a": ("href", self.links), "img": ("src", self.pictures)}.get(tag)
        if found:
            found[1].append(dict(attrs).get(found[0]) or "")

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.parametrize("repository", [None, "https://host.example/we/cfedavg"])
def test_the_readme_shows_on_a_package_index(repository: str | None) -> None:
    """No link or picture leads to a file that an index does not have; a cleaned page loses no words."""
    readme = (ROOT / "README.md").read_text()
    page = markdown.markdown(package_page.point_links(readme, repository, "v1"), extensions=["extra"])
    shown, before = Targets(clean(page)), Targets(markdown.markdown(readme, extensions=["extra"]))
    assert all(target.startswith("https://") for target in shown.links + shown.pictures)
    assert "".join(shown.words.split()) == "".join(before.words.split())
    if repository is None:
        assert not shown.pictures
        return
    assert len(shown.pictures) == len(before.pictures) > 0
    for start, targets in (("blob", shown.links), ("raw", shown.pictures)):
        for target in targets:
            path = target.removeprefix(f"{repository}/{start}/v1/").partition("#")[0]
            assert path.startswith("https://") or (ROOT / path).exists(), target


def test_the_pythons_that_are_named_are_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert named == list(check_package.PYTHONS)
    assert project["requires-python"] == f">={named[0]}"


def test_the_citation_is_that_of_this_package_and_of_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert {"message", "title", "abstract", "keywords"} <= citation.keys()
    assert citation["version"] == cfedavg.__version__
    assert citation["license"] == project["license"].partition(" ")[0]
    assert [each["name"] for each in citation["authors"]] == [each["name"] for each in project["authors"]]
    paper = citation["preferred-citation"]
    address = "https://arxiv.org/abs/2106.07155"
    assert (paper["type"], paper["year"], paper["url"]) == ("article", 2021, address)
    names = [f"{each['given-names']} {each['family-names']}" for each in paper["authors"]]
    assert names == ["Haibo Yang", "Jia Liu", "Elizabeth S. Bentley"]
    start, _, end = paper["title"].partition(": ")
    assert start == "CFedAvg"
    assert end == "Achieving Efficient Communication and Fast Convergence in Non-IID Federated Learning"
