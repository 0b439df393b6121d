"""Which extra of this package installs which library, and the error that names the extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# For each library that the core does without: its name in an error, and the extra that installs it.
EXTRAS = {
    "flwr": ("Flower", "flower"),
    "huggingface_hub": ("huggingface_hub", "data"),
    "llvmlite": ("numba", "sim"),
    "matplotlib": ("matplotlib", "report"),
    "numba": ("numba", "sim"),
    "PIL": ("Pillow", "data"),
    "pyarrow": ("pyarrow", "data"),
    "rich": ("rich", "sim"),
    "torch": ("torch", "sim"),
    "typer": ("typer", "sim"),
}


def explain(error: ModuleNotFoundError, extra: str = "") -> str | None:
    """Return the sentence that names the extra to install, or None if none has the missing library.

    `extra` is named instead of the table's if the caller knows better.

    >>> explain(ModuleNotFoundError(name="pyarrow.parquet"))
    'pyarrow is not installed here: pip install "cfedavg[data]"'
    """
    known = EXTRAS.get((error.name or "").split(".")[0])
    return known and f'{known[0]} is not installed here: pip install "cfedavg[{extra or known[1]}]"'


@contextmanager
def explain_missing(extra: str = "") -> Iterator[None]:
    """Make the error of an import in the `with` block say which extra installs the missing library."""
    try:
        yield
    except ModuleNotFoundError as error:
        if sentence := explain(error, extra):
            raise ModuleNotFoundError(sentence, name=error.name) from None
        raise
