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


def explain(error: ModuleNotFoundError, **extras: str) -> str | None:
    """Return the sentence that names the extra to install, or None if no extra has the missing library.

    `extras` replaces the table's extra of a library, where the caller knows better.

    >>> explain(ModuleNotFoundError(name="pyarrow.parquet"))
    'pyarrow is not installed here: pip install "cfedavg[data]"'
    """
    library = (error.name or "").split(".")[0]
    if library not in EXTRAS:
        return None
    name, extra = EXTRAS[library]
    return f'{name} is not installed here: pip install "cfedavg[{extras.get(library, extra)}]"'


@contextmanager
def explain_missing(**extras: str) -> Iterator[None]:
    """Make the error of an import in the `with` block say which extra installs the missing library.

    `extras` is that of `explain`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if sentence := explain(error, **extras):
            raise ModuleNotFoundError(sentence, name=error.name) from None
        raise
