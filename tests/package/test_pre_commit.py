"""The hooks of pre-commit are the checks of `make lint`, and need no network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]


def test_hooks_are_those_of_make_lint() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    hooks = repository["hooks"]
    lint = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]
    commands = lint.replace("\t", "").replace("$(BIN)", ".venv/bin").splitlines()
    assert [hook["entry"] for hook in hooks] == commands
    assert all((hook["language"], hook["pass_filenames"]) == ("system", False) for hook in hooks)
