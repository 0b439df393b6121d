"""Who speaks: of several ranks the first alone, and an error in one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console

PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}


def fail(sentence: str) -> int:
    """Says what is wrong; the exit code."""
    if not _silent():
        Console(stderr=True).print(f"error: {sentence}", style="red", **PLAIN)
    return 2


@contextmanager
def first_rank_only() -> Iterator[None]:
    """Within it, what other ranks print goes nowhere."""
    if not _silent():
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def ranks() -> int:
    """How many processes torchrun has started, this one among them."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _silent() -> bool:
    """Whether this is one of several ranks, and not the first, which speaks for all."""
    return ranks() > 1 and os.environ["RANK"] != "0"
