"""Loading of a data set of any kind: images, texts or a table, by name or from a folder."""

from __future__ import annotations

from pathlib import Path

from cfedavg.core.errors import InputError
from cfedavg.core.extras import explain_missing
from cfedavg.data.columns import Columns, Owners, choose_kind, find_owners, hold_out
from cfedavg.data.decoder import wait_for_decoder
from cfedavg.data.files import read_tables
from cfedavg.data.images import ImageData, open_parquet
from cfedavg.data.sources import HUB, cached_folder, load, locate
from cfedavg.data.tables import TableData, read_table
from cfedavg.data.text import TextData, read_text

AnyData = ImageData | TextData | TableData


@explain_missing()
def load_any(
    dataset: str, data_dir: str | Path | None = None, columns: Columns | None = None
) -> tuple[AnyData, Owners | None]:
    """Return the data set in `data_dir`, or else the one with this name, and the client of each sample."""
    columns = columns or Columns()
    wait_for_decoder()
    if data_dir is None and dataset in ("embedded", *HUB):
        _check_named(dataset, columns)
        return load(dataset, label=columns.label), _owners_of_images(dataset, None, columns)
    if data_dir is None and columns.client is None and columns.text is None:
        folder = cached_folder(dataset, label=columns.label)
        if folder and folder.exists():  # decoded images: no network is needed
            return load(dataset, label=columns.label), None
    files = locate(dataset, data_dir)
    where = _name_source(dataset, data_dir)
    first = files["train"][0]
    if first.suffix == ".parquet":  # which may hold images: do not read them as a table
        with open_parquet(first, where) as file:
            schema = file.schema_arrow
        if choose_kind(schema, columns, where)[0] == "images":
            return load(dataset, data_dir, label=columns.label), _owners_of_images(dataset, data_dir, columns)
    tables = read_tables(files, where)
    kind, column = choose_kind(tables["train"].schema, columns, where)
    if dataset in HUB:
        raise InputError(
            f"{where} must hold images for {dataset}, got a {kind}; "
            "give another folder, or leave out `dataset`"
        )
    tables, owners = hold_out(tables, find_owners(tables, columns, where), kind)
    name = dataset
    if data_dir is not None and dataset == "embedded":
        name = Path(data_dir).expanduser().resolve().stem
    if kind == "text":
        text = read_text(name, tables, column, owners, columns, where)
        return text, text.owners
    table = read_table(name, tables, column, owners, columns, where)
    return table, table.owners


def _name_source(dataset: str, data_dir: str | Path | None) -> str:
    """Return the field that names the data and its value, with which errors begin."""
    return f"`dataset`: {dataset}" if data_dir is None else f"`data_dir`: {Path(data_dir).expanduser()}"


def _check_named(dataset: str, columns: Columns) -> None:
    """Raise InputError if a column is given that a data set of images with a name does not have."""
    given = {"text_column": columns.text}
    if dataset == "embedded":  # it has no columns at all
        given |= {"label_column": columns.label, "client_column": columns.client}
    for field, value in given.items():
        if value is not None:
            raise InputError(
                f"`{field}`: {dataset} has no column {value!r}; set `data_dir` to data that has it"
            )


def _owners_of_images(dataset: str, data_dir: str | Path | None, columns: Columns) -> Owners | None:
    """Return the client of each image; read the columns that name the client from the files."""
    if columns.client is None:
        return None
    files = locate(dataset, data_dir)
    where = _name_source(dataset, data_dir)
    return find_owners(read_tables(files, where, columns.clients), columns, where)
