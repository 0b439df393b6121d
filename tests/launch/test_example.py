"""The example is an app as Flower's hub takes it, and CFedAvg costs it two lines in each of two files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from cfedavg.launch.local_federation import make_environment

EXAMPLE = Path(__file__).parents[2] / "examples/quickstart"


@pytest.mark.parametrize("name", ["client_app.py", "server_app.py"])
def test_the_quickstart_changes_by_two_lines(name: str, tmp_path: Path) -> None:
    """In each file: an import and its use."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    after = (tmp_path / "quickstart" / name).read_text().splitlines()
    subprocess.run(
        ["patch", "-R", "-p1", "-i", "compress.diff"], cwd=tmp_path, check=True, capture_output=True
    )
    before = (tmp_path / "quickstart" / name).read_text().splitlines()
    new = [line for line in after if line not in before]
    assert len(new) == 2
    assert new[0].startswith("from cfedavg.flower import ")
    assert len(after) == len(before) + 1
    assert not any("compressed" in line or "CFedAvg" in line for line in before)


@pytest.mark.slow  # a `flwr` command takes seconds on a busy machine
def test_flower_packs_the_example(tmp_path: Path) -> None:
    """`flwr build` checks the fields that the hub needs; the bundle has all that the app runs."""
    environment = make_environment({"FLWR_HOME": str(tmp_path / "home")})
    command = [Path(sys.executable).parent / "flwr", "build", "--app", EXAMPLE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missing" not in done.stdout
    (bundle,) = tmp_path.glob("cfedavg.quickstart.1-0-0.*.fab")
    with zipfile.ZipFile(bundle) as packed:
        names = set(packed.namelist())
        project = tomllib.loads(packed.read("pyproject.toml").decode())
    code = {f"quickstart/{name}.py" for name in ("__init__", "task", "client_app", "server_app")}
    assert code | {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert 0 < len(project["project"]["description"]) <= 200
    for component in project["tool"]["flwr"]["app"]["components"].values():
        module, _, attribute = component.partition(":")
        path = f"{module.replace('.', '/')}.py"
        assert path in names
        assert f"{attribute} = " in (EXAMPLE / path).read_text()
