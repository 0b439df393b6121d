"""Files of a data set: which file belongs to which split, and their rows as Arrow tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.files import check_regular, exists, read_file

SPLITS = ("train", "test")
FORMATS = (".parquet", ".csv", ".jsonl", ".txt")  # if a folder has several, the first one counts
Files = Mapping[str, Sequence[Path]]


def find_files(dataset: str, folder: Path, where: str) -> dict[str, list[Path]]:
    """Return each split's files. Look in `folder`, then in its subfolder named after the data set.

    If no file is named after a test split, all files belong to the train split. `folder` may also be a file.
    """
    if exists(folder) and not folder.is_dir() and folder.suffix in FORMATS:
        return {"train": [folder], "test": []}
    if not (exists(folder) and folder.is_dir()):
        raise InputError(
            f"{where} is not a folder, nor a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file; "
            "give a folder with train-*.parquet and test-*.parquet files, for example"
        )
    places = [folder, folder / dataset, folder / Path(dataset).name]
    for place in places:
        found = find_splits([path.name for path in place.glob("*")], where)
        if found:
            return {split: [place / name for name in names] for split, names in found.items()}
    for place in dict.fromkeys(places):
        if names := find_train([path.name for path in place.glob("*")]):
            return {"train": [place / name for name in names], "test": []}
    inside = sorted({path.parent.name for path in folder.glob("*/*") if path.suffix in FORMATS})
    hint = f"; set `dataset` to a subfolder: {', '.join(inside)}" if inside else ""
    raise InputError(
        f"{where} must hold train-*.parquet and test-*.parquet files (or .csv, .jsonl, .txt), "
        f"but some are missing{hint}"
    )


_SPLIT = re.compile(r"(?:^|/)(train|test|validation|valid)(?:[-.][^/]*|/.*)$")


def find_splits(names: Iterable[str], where: str) -> dict[str, list[str]] | None:
    """Return which file names are data files of the train and the test split; None if a split is missing.

    >>> find_splits(["README.md", "all/test-0.parquet", "all/train-0.parquet"], "")
    {'train': ['all/train-0.parquet'], 'test': ['all/test-0.parquet']}
    >>> find_splits(["train/0.parquet", "validation/0.parquet"], "")["test"]
    ['validation/0.parquet']
    """
    places: dict[str, dict[str, list[str]]] = {}
    names = sorted(names)
    for form in FORMATS:
        for name in names:
            if name.endswith(form) and (match := _SPLIT.search(name)):
                places.setdefault(name[: match.start()], {}).setdefault(match[1], []).append(name)
        found = {}
        for place, splits in places.items():
            test = splits.get("test") or splits.get("validation") or splits.get("valid")
            if test and "train" in splits:
                found[place] = {"train": splits["train"], "test": test}
        if len(found) > 1:
            raise InputError(
                f"{where} holds several data sets ({', '.join(found)}); "
                "download one and give its folder as `data_dir`"
            )
        if found:
            return next(iter(found.values()))
        places.clear()
    return None


def find_train(names: Iterable[str]) -> list[str]:
    """Return the names of the data files if none belongs to a test split, else [].

    >>> find_train(["b.csv", "a.csv", "README.md", "notes.txt"]), find_train(["test-0.parquet"])
    (['a.csv', 'b.csv'], [])
    """
    names = sorted(names)
    for form in FORMATS:
        found = [name for name in names if name.endswith(form)]
        splits = {match[1] for name in found if (match := _SPLIT.search(name))}
        if found and splits <= {"train"}:
            return [name for name in found if not splits or _SPLIT.search(name)]
        if found:
            return []
    return []


def read_tables(files: Files, where: str, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the rows of each split as an Arrow table; the test table is empty if there are no test files.

    `only` names the columns to read of parquet files; names that are missing are ignored.
    """
    import pyarrow as pa

    found: dict[str, Any] = {}
    for split in SPLITS:
        parts = [_read_table(path, where, only) for path in files[split]]
        for path, part in zip(files[split], parts, strict=True):
            if twice := [name for name, n in Counter(part.column_names).items() if n > 1]:
                raise InputError(f"{where}: {path.name} has several columns named {twice[0]!r}")
            if part.column_names != parts[0].column_names:
                raise InputError(f"{where}: {path.name} has other columns than {files[split][0].name}")
        try:
            found[split] = pa.concat_tables(parts, promote_options="permissive") if parts else None
        except pa.ArrowException as error:
            raise InputError(
                f"{where}: the files of the {split} split do not fit together ({summarise_error(error)})"
            ) from None
    train, test = found["train"], found["test"]
    found["test"] = train.schema.empty_table() if test is None else test
    for split in SPLITS:
        if files[split] and not found[split].num_rows:
            raise InputError(f"{where}: the {split} split is empty")
    if missing := sorted({*train.column_names} - {*found["test"].column_names}):
        raise InputError(f"{where}: the test split lacks the column {missing[0]!r} of the train split")
    return found


def _clean(table: Any, path: Path, where: str) -> Any:
    """Return a table of a CSV file whose empty texts are missing values, as empty numbers are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for i, column in enumerate(table.schema):
        if pa.types.is_binary(column.type):
            raise InputError(
                f"{where}: the column {column.name!r} of {path.name} is not in UTF-8; convert the file"
            )
        if pa.types.is_string(column.type):
            texts = table.column(i)
            table = table.set_column(i, column, pc.if_else(pc.equal(texts, ""), None, texts))
    return table


def _read_table(path: Path, where: str, only: Sequence[str] | None) -> Any:
    """Return a file's rows as an Arrow table. A .txt file has a row per line, with columns file and text."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet

    try:
        check_regular(path)
        if path.suffix == ".parquet":
            return pa.parquet.read_table(path, columns=only)
        if path.suffix == ".csv":
            return _clean(pa.csv.read_csv(path), path, where)
        if path.suffix == ".jsonl":
            return pa.json.read_json(path)
        lines = read_file(path).decode().splitlines()
        return pa.table({"file": pa.array([path.stem] * len(lines), pa.string()), "text": lines})
    except (OSError, ValueError, pa.ArrowException) as error:
        kind = f"a {path.suffix[1:]} file"
        raise InputError(f"{where}: cannot read {path.name} as {kind} ({summarise_error(error)})") from None
