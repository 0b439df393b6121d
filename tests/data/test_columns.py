"""Texts and tables: what becomes a sample, who owns it, what is refused, and that engines agree on them."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from cfedavg.cli.commands import app
from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.core.run_files import read_rows
from cfedavg.data.columns import Columns
from cfedavg.data.loading import load_any
from cfedavg.data.splits import SPLITTERS
from cfedavg.data.tables import TableData
from cfedavg.data.tasks import DataSet, build_task
from cfedavg.data.text import TextData, _cut, _encode
from cfedavg.simulate.run import run
from cfedavg.simulate.vectorised.recorder import Recorder
from tests.data.test_data import REAL, Hub, drawn, write
from tests.simulate.test_engines import agree

TRAIN = {
    "role": ["b", "a", "b", "a", "c"],
    "text": ["to be or", "abcdefgh", "not to be", "ijklm", "no"],
    "speech": [0, 0, 1, 1, 0],
}
TEST = {"role": ["a", "z", "b"], "text": ["abc?efghi", "hello you", "be or not"], "speech": [2, 0, 2]}


def make_parquet(folder: Path, train: dict[str, Any], test: dict[str, Any] | None) -> Path:
    folder.mkdir(exist_ok=True)
    for split, columns in (("train", train), ("test", test)):
        if columns is not None:
            pq.write_table(pa.table(columns), folder / f"{split}-0.parquet")
    return folder


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    return make_parquet(tmp_path / "plays", TRAIN, TEST)


def text_of(folder: Path, **columns: Any) -> TextData:
    data, _ = load_any("embedded", folder, Columns(**columns))
    assert isinstance(data, TextData)
    return data


def table_of(folder: Path, **columns: Any) -> TableData:
    data, _ = load_any("embedded", folder, Columns(**columns))
    assert isinstance(data, TableData)
    return data


# --- texts


def test_sequences_of_each_client(plays: Path) -> None:
    data = text_of(plays, client="role", length=5)
    assert data.owners is not None
    assert data.owners.names == ["a", "b"]  # c has no whole sequence
    assert "1 values of role left out" in data.note
    known = "".join(sorted(set("to be or\nnot to beabcdefgh\nijklmno")))
    assert data.vocabulary == known

    def words(split: str) -> list[str]:
        sequences = getattr(data, split)
        table = known + "~"  # any other character
        return ["".join(table[i] for i in row) for row in sequences.at(np.arange(len(sequences)))]

    assert words("train") == ["abcdef", "fgh\nij", "to be ", " or\nno", "not to"[1:] + " "]
    assert data.owners.train.tolist() == [0, 0, 1, 1, 1]
    # z is no client, but its text counts in the test of the whole model.
    assert words("test") == ["hello ", "abc~ef", "be or "]
    assert data.owners.test.tolist() == [-1, 0, 1]
    batch = DataSet("embedded", str(plays), Columns(client="role", length=5)).train.batch(np.array([1]))
    assert [each.shape for each in batch] == [(1, 5), (1, 5)]
    assert batch[0][0, 1:].tolist() == batch[1][0, :-1].tolist()


def test_bytes_need_no_vocabulary(plays: Path) -> None:
    data = text_of(plays, client="role", length=5, tokens="bytes")
    assert (data.outputs, data.vocabulary) == (256, "")
    assert bytes(data.train.at(np.array([0]))[0].tolist()) == b"abcdef"


@settings(max_examples=30)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=5), st.integers(1, 5))
def test_every_character_is_predicted_at_most_once(texts: list[str], length: int) -> None:
    """What is decoded is the text; only less than a sequence at its end is missing."""
    vocabulary = "".join(sorted(set().union(*texts))) or "a"
    encoded = [(i, _encode(text, vocabulary)) for i, text in enumerate(texts)]
    sequences, owner = _cut(encoded, length)
    found = sequences.at(np.arange(len(sequences)))
    assert found.shape == (len(owner), length + 1)
    for i, text in enumerate(texts):
        targets = "".join(vocabulary[c] for c in found[owner == i][:, 1:].ravel())
        assert targets == text[1 : 1 + len(targets)]
        assert len(text) - 1 - length < len(targets) <= max(0, len(text) - 1)


def test_a_folder_of_txt_files_has_a_client_per_file(tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} line {i}" for i in range(20)))
    data = text_of(tmp_path, client="file", length=8)
    assert data.owners is not None
    assert data.owners.names == ["ann", "bob"]
    last = data.test.at(np.array([0]))[0]  # of each file, the last fifth of its lines is the test split
    assert "".join(data.vocabulary[i] for i in last) == "ann line "
    assert len(data.train) == 2 * ((16 * 11 + 6 - 1 - 1) // 8)


def test_other_characters_change_the_fingerprint(tmp_path: Path) -> None:
    prints = []
    for word in ("abcdefghij", "abcdefghix"):
        folder = make_parquet(tmp_path / "same", {"text": [word] * 9}, {"text": [word] * 2})
        config = Config(data_dir=str(folder), sequence_length=4, iid=True, clients=2, model="gpt_small")
        prints.append(build_task(config).fingerprint)
    assert prints[0] != prints[1]


# --- tables

PEOPLE = {
    "age": [20, 40, None, 60],
    "city": ["Oslo", "Bern", "Oslo", None],
    "member": [True, False, True, True],
    "target": ["low", "high", "low", "high"],
}


def test_columns_are_encoded_from_the_train_split(tmp_path: Path) -> None:
    test = {"age": [40, 60], "city": ["Rome", "Bern"], "member": [True, None], "target": ["low", "high"]}
    data = table_of(make_parquet(tmp_path, PEOPLE, test))
    std = np.std([20, 40, 60])
    ages = [-20 / std, 0, 0, 20 / std]
    cities, members = [[0, 1], [1, 0], [0, 1], [0, 0]], [[0, 1], [1, 0], [0, 1], [0, 1]]
    expected = np.column_stack([ages, cities, members])
    assert data.train.inputs == pytest.approx(expected.astype(np.float32))
    assert data.test.inputs == pytest.approx(np.array([[0, 0, 0, 0, 1], [20 / std, 1, 0, 0, 0]], np.float32))
    assert data.train.labels.tolist() == [1, 0, 1, 0]
    assert (data.class_names, data.test.labels.tolist()) == (("high", "low"), [1, 0])


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_other_formats_give_the_same(tmp_path: Path, form: str) -> None:
    columns = {"x": [1.5, 2.5, 4.0], "word": ["a", "b", "a"], "y": [3, 7, 3]}
    parquet = table_of(make_parquet(tmp_path / "parquet", columns, columns))
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    text = pa.table(columns).to_pandas().to_csv(index=False) if form == "csv" else ""
    if form == "jsonl":
        import json

        text = "\n".join(map(json.dumps, rows))
    for split in ("train", "test"):
        (tmp_path / f"{split}.{form}").write_text(text)
    found = table_of(tmp_path)
    for split in ("train", "test"):
        mine, theirs = getattr(found, split), getattr(parquet, split)
        assert np.array_equal(mine.inputs, theirs.inputs)
        assert np.array_equal(mine.labels, theirs.labels)


def test_one_file_without_a_test_split(tmp_path: Path) -> None:
    rows = [f"{i},{i % 3},{'even' if i % 2 == 0 else 'odd'}" for i in range(100)]
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(["x,group,label", *rows]))
    data = table_of(file, client="group")
    assert (len(data.train), len(data.test), data.name) == (80, 20, "rows")
    assert data.owners is not None
    assert data.owners.names == ["0", "1", "2"]
    assert data.train.inputs.shape[1] == 1  # neither the label nor the client's column is an input
    assert data.owners.train.tolist().count(0) + data.owners.test.tolist().count(0) == 34


def regression(folder: Path) -> Path:
    x = np.linspace(-1, 1, 120)
    return make_parquet(folder, {"x": x, "label": 3 * x + 7, "who": np.arange(120) % 4}, None)


def test_a_number_is_predicted_by_regression(tmp_path: Path) -> None:
    config = Config(data_dir=str(regression(tmp_path / "line")), client_column="who", model="linear")
    result = run(config.replace(rounds=9, eta_local=0.05, engine="sequential"))
    assert result.config.clients == 4
    assert result.final["test_absolute_error"] < 0.02 < result.rows[0]["test_absolute_error"]
    with pytest.raises(InputError, match="`classes_per_client` needs classes, and the label is a number"):
        build_task(config.replace(classes_per_client=2))


# --- clients by column


def test_clients_of_a_column_and_their_tests(plays: Path) -> None:
    config = Config(data_dir=str(plays), client_column="role", sequence_length=5, model="char_lstm_small")
    task = build_task(config)
    assert [len(each) for each in task.clients] == [2, 3]
    assert task.test_parts is not None
    assert [part.tolist() for part in task.test_parts] == [[1], [2]]
    with pytest.raises(InputError, match=r"`clients` must be left out with `client_column`, which gives 2"):
        build_task(config.replace(clients=3))
    assert len(build_task(config.replace(clients=2)).clients) == 2


def test_two_columns_name_a_client(plays: Path) -> None:
    data = text_of(plays, client="role, speech", length=3)
    assert data.owners is not None
    assert data.owners.names == ["a/0", "a/1", "b/0", "b/1"]


def test_images_have_clients_by_column_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFEDAVG_CACHE", str(tmp_path / "cache"))
    for split, n in (("train", 7), ("test", 3)):
        write(
            tmp_path / f"{split}-0.parquet", drawn(n, "L"), writer=pa.array([f"w{i % 2}" for i in range(n)])
        )
    task = build_task(Config(data_dir=str(tmp_path), client_column="writer", model="linear"))
    assert [len(each) for each in task.clients] == [4, 3]
    assert task.test_parts is not None
    assert [part.tolist() for part in task.test_parts] == [[0, 2], [1]]


# --- training


@pytest.mark.parametrize(("engine", "lists"), [
    ("batched", False), pytest.param("batched", True, marks=pytest.mark.slow), ("sequential", False)
])  # fmt: skip
@pytest.mark.parametrize("model", ["char_lstm_small", "gpt_small"])
def test_engines_agree_on_texts(
    plays: Path, model: str, engine: str, lists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of unequal size: short batches are filled up with rows that do not count."""
    if not lists:  # listing a step takes seconds
        monkeypatch.setattr(Recorder, "_list", Recorder._flat)
    config = Config(data_dir=str(plays), client_column="role", sequence_length=3, model=model)
    task = build_task(config)
    task.model.double()
    how = {"batch_size": 2, "local_epochs": 1, "compressor": "topk(0.5) >> bf16", "eta_local": 0.5}
    agree(task, engine, "cpu", **how)


def test_a_run_of_texts_resumes_to_the_bit(plays: Path, tmp_path: Path) -> None:
    base = Config(data_dir=str(plays), client_column="role", sequence_length=5, model="gpt_small", workers=1)
    base = base.replace(local_steps="2", batch_size=2, participation=0.5)
    whole = run(base.replace(rounds=3), out=tmp_path / "whole", draw=False)
    run(base.replace(rounds=2), out=tmp_path / "parts", draw=False)
    run(base.replace(rounds=3), out=tmp_path / "parts", resume=True, draw=False)
    first, second = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    for rows in (first, second):
        for row in rows:
            row.pop("seconds")
    assert first == second
    assert whole.final["client_accuracy_min"] >= 0
    assert "clients = 2" in (tmp_path / "whole" / "config.toml").read_text()


def test_defaults_of_a_task_take_sequences() -> None:
    torch.manual_seed(0)
    from cfedavg.task import accuracy, cross_entropy

    labels = torch.randint(5, (3, 4))
    output = torch.randn(3, 4, 5)
    model: Any = lambda _: output  # noqa: E731
    flat = torch.nn.functional.cross_entropy(output.reshape(12, 5), labels.reshape(12))
    torch.testing.assert_close(cross_entropy(model, (None, labels)), flat)
    right = (output.argmax(-1) == labels).double().mean(1)
    torch.testing.assert_close(accuracy(model, (None, labels)).double(), right)


# --- what is refused

BAD: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any], str]] = {
    "no such text": (TRAIN, TEST, {"text_column": "txt"}, r"`text_column`: .* has no column 'txt'; it has"),
    "no text in it": (TRAIN, TEST, {"text_column": "speech"}, "'speech' must hold texts, got int64"),
    "no such label": (TRAIN, TEST, {"label_column": "z"}, "`label_column`: .* has no column 'z'"),
    "no such client": (TRAIN, TEST, {"client_column": "z"}, "`client_column`: .* has no column 'z'"),
    "nothing named": ({"a": [1], "b": ["x"]}, {"a": [1], "b": ["x"]}, {}, "set `text_column` .* it has a, b"),
    "two ways": ({"text": ["x"], "label": [1]}, None, {}, "several columns that may be meant: set `text_"),
    "both": (TRAIN, TEST, {"text_column": "text", "label_column": "role"}, "exclude each other"),
    "empty client": ({**TRAIN, "role": ["a", None, "b", "b", "c"]}, TEST, {"client_column": "role"},
                     "`client_column`: .* has 1 rows without a value of role"),
    "too long": (TRAIN, TEST, {"sequence_length": 99}, "`sequence_length`: .* no train text of 100 char"),
    "classes of a text": (TRAIN, TEST, {"sequence_length": 3}, "`classes_per_client` needs classes, and a t"),
    "classes of a split": (TRAIN, TEST, {"sequence_length": 3, "partition": "niid_classes(1)"},
                           "`partition` needs classes, and a text has none"),
    "cnn": (TRAIN, TEST, {"sequence_length": 3, "iid": True, "clients": 2}, "`model` for a text must be ch"),
    "other columns": (TRAIN, {"role": ["a"], "text": ["abc"]}, {}, "test split lacks the column 'speech'"),
    "new class": ({"x": [1, 2], "y": ["a", "b"]}, {"x": [1], "y": ["c"]}, {}, "train split has no y 'c'"),
    "one class": ({"x": [1, 2], "y": [1, 1]}, {"x": [1], "y": [1]}, {}, "from 2 to 1,000 classes, got 1"),
    "no label": ({"x": [1, 2], "y": [1, None]}, {"x": [1], "y": [1]}, {}, "rows without a value of 'y'"),
    "no label, float": ({"x": [1, 2], "y": [1.5, None]}, {"x": [1], "y": [1.5]}, {}, "a value of 'y'"),
    "a list": ({"x": [[1], [2]], "y": [0, 1]}, {"x": [[1]], "y": [0]}, {}, "'x' must hold numbers, texts or"),
    "infinite": ({"x": [1, np.inf], "y": [0, 1]}, {"x": [1.0], "y": [0]}, {}, "'x' must hold finite numbers"),
    "many texts": ({"x": [f"{i}" for i in range(1001)], "y": [0, 1] * 500 + [0]}, None, {}, "1,001 diff"),
    "label alone": ({"y": [0, 1]}, {"y": [0]}, {}, "must have other columns than 'y'"),
    "few rows": ({"x": [0.5, 1.0], "y": [0, 1]}, None, {}, "without a test split, a data set needs at l"),
    "empty": ({"x": pa.array([], pa.int64()), "y": pa.array([], pa.int64())}, None, {}, "split is empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_one_sentence_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    train, test, options, words = BAD[name]
    folder = make_parquet(tmp_path / "data", train, test)
    if name == "many texts":  # each split has more than the limit
        folder = make_parquet(tmp_path / "data", train, train)
    with pytest.raises(InputError, match=words) as found:
        build_task(Config(data_dir=str(folder), **options))
    assert "\n" not in str(found.value)


ROW = "1,b,yes\n2,a,no\n" * 4
BAD_CSV: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "a label is missing": (f"x,who,label\n{ROW}3,b,\n".encode(), {}, "rows without a value of 'label'"),
    "a client is missing": (
        f"x,who,label\n{ROW}3,,yes\n".encode(), {"client_column": "who"}, "has 1 rows without a value of who",
    ),
    "other encoding": (f"x,who,label\n{ROW}3,Zürich,yes\n".encode("latin-1"), {}, "'who' of .* not in UTF-8"),
    "a name twice": (f"x,x,label\n{ROW}".encode(), {}, "several columns named 'x'"),
    "many columns": (
        ",".join([*(f"x{i}" for i in range(300)), "z\n"]).encode() * 2,
        {}, "it has x0, x1, .* and 289 more$",
    ),
    "another name": (f"x,who,label\n{ROW}".encode(), {"dataset": "mnist"}, "images for mnist, got a t"),
    "a text's option": (f"x,who,label\n{ROW}".encode(), {"tokens": "bytes"}, "`tokens` is for texts"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CSV)
def test_one_sentence_says_what_is_wrong_in_a_csv_file(name: str, tmp_path: Path) -> None:
    data, options, words = BAD_CSV[name]
    (tmp_path / "rows.csv").write_bytes(data)
    iid = "client_column" not in options
    with pytest.raises(InputError, match=words) as found:
        build_task(Config(data_dir=tmp_path / "rows.csv", iid=iid, **options))
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 300 + len(str(tmp_path))


def test_an_empty_text_of_a_csv_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("word,label\na,0\n,1\nb,1\n")
    (tmp_path / "test.csv").write_text("word,label\n,0\n")
    data = table_of(tmp_path)
    assert data.train.inputs.tolist() == [[1, 0], [0, 0], [0, 1]]
    assert data.test.inputs.tolist() == [[0, 0]]


def test_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('a,b\n"1,2\n3\n')
    (tmp_path / "test.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"cannot read train.csv as a csv file"):
        build_task(Config(data_dir=str(tmp_path), label_column="b"))


# --- the real texts


@pytest.mark.skipif(not (REAL / "shakespeare").exists(), reason="needs the folder of shared data sets")
def test_shakespeare_by_role() -> None:
    data = text_of(REAL / "shakespeare", client="play,role")
    assert data.owners is not None
    assert (len(data.owners.names), len(data.vocabulary)) == (975, 75)
    assert len(data.train) + len(data.test) > 50_000


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "pycode").exists(), reason="needs the folder of shared data sets")
def test_pycode_by_package() -> None:
    data = text_of(REAL / "pycode", client="package", length=128, tokens="bytes")
    assert data.owners is not None
    assert len(data.owners.names) == 34
    assert data.train.tokens.dtype == np.uint8


# --- the hub


def test_texts_of_the_hub_are_downloaded_once(
    plays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CFEDAVG_CACHE", str(tmp_path / "cache"))
    hub = Hub(plays, {None: ["README.md", "train-0.parquet", "test-0.parquet"]})
    hub.install(monkeypatch)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name, **how: str(plays / name))
    found = []
    for _ in range(2):
        data, owners = load_any("my/plays", None, Columns(client="role", length=5))
        assert owners is not None
        found.append((data.name, owners.names, len(data.train)))
    assert found == [("my/plays", ["a", "b"], 5)] * 2
    assert hub.asked == 1
    (plays / "test-0.parquet").unlink()
    with pytest.raises(InputError):  # the file is gone: the hub is asked again
        load_any("my/plays", None, Columns(length=5))
    assert hub.asked == 2


def test_reports_name_the_folder() -> None:
    assert Config(data_dir="data/plays").data_name == "plays"
    assert Config(data_dir="rows.csv").data_name == "rows"
    assert Config(dataset="mnist", data_dir="data").data_name == "mnist"
    assert Config().data_name == "embedded"


def test_commands_of_the_page_are_options_of_the_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    blocks = re.findall(r"```\n(cfedavg .*?)```", page, re.DOTALL)
    group: Any = typer.main.get_command(app)
    for block in blocks:
        _, name, *arguments = shlex.split(block.replace("\\\n", " "))
        given = group.commands[name].make_context(name, arguments).params
        known = {field.name for field in dataclasses.fields(Config)}
        config = Config(**{key: value for key, value in given.items() if key in known and value is not None})
        if config.partition:
            SPLITTERS.parse(config.partition)
    assert len(blocks) == 4
