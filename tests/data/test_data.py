"""Data: the laws of partitions, decoding, damaged caches, downloads and errors."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from cfedavg.core.errors import InputError
from cfedavg.data import (
    HUB,
    ImageData,
    Partition,
    by_classes,
    by_dirichlet,
    cache_folder,
    decoder,
    iid,
    load,
    sources,
)
from cfedavg.data import images as decoding
from cfedavg.data.images import histogram, mean_std
from cfedavg.data.partition import _log_gamma_draws, log_dirichlet

REAL = Path(os.environ.get("CFEDAVG_DATA") or Path(__file__).parents[3] / "shared" / "data")
MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]

seeds = st.integers(0, 2**63 - 1)
class_sizes = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def labels_of(sizes: list[int]) -> np.ndarray:
    """Labels with these class sizes, not sorted."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return np.roll(labels[::-1], 7)


def check_disjoint(parts: tuple[np.ndarray, ...], n: int) -> np.ndarray:
    together = np.concatenate(parts)
    assert together.dtype == np.int64
    assert len(np.unique(together)) == len(together)
    assert len(together) == 0 or (together.min() >= 0 and together.max() < n)
    assert all(np.all(np.diff(part) > 0) for part in parts)
    return together


def same(a: Partition, b: Partition) -> bool:
    pairs = zip(a.train + a.test, b.train + b.test, strict=True)
    return a.unused == b.unused and all(np.array_equal(x, y) for x, y in pairs)


# --- p classes per client


@settings(max_examples=150)
@given(class_sizes, class_sizes, st.integers(0, 400), st.integers(0, 7), seeds)
def test_by_classes_keeps_its_laws(
    sizes: list[int], test_sizes: list[int], m: int, p: int, seed: int
) -> None:
    classes = len(sizes)
    test_sizes = (test_sizes + [0] * classes)[:classes]
    train, test = labels_of(sizes), labels_of(test_sizes)
    present = [size for size in sizes if size]
    assume(present)
    p = 1 + p % len(present)
    m = 1 + m % (min(present) * len(present) // p)
    parts = by_classes(train, test, classes, m, p, seed)
    counts = parts.counts(train, classes)
    holders = (counts > 0).sum(axis=0)[np.array(sizes) > 0]
    share = min(size // h for size, h in zip(present, holders.tolist(), strict=True) if h)

    assert counts.shape == (m, classes)
    assert set(counts.ravel().tolist()) <= {0, share}
    assert np.all((counts > 0).sum(axis=1) == p)
    assert holders.max() - holders.min() <= 1
    assert len(check_disjoint(parts.train, len(train))) == m * p * share
    assert parts.unused == len(train) - m * p * share

    check_disjoint(parts.test, len(test))
    assert len({len(part) for part in parts.test}) == 1
    for row, part in zip(counts, parts.test, strict=True):
        assert set(test[part].tolist()) <= set(np.flatnonzero(row).tolist())


@settings(max_examples=20)
@given(st.integers(1, 200), st.integers(1, 10), seeds)
def test_mnist_sizes_follow_the_formula(m: int, p: int, seed: int) -> None:
    train, test = labels_of(MNIST), labels_of(MNIST_TEST)
    parts = by_classes(train, test, 10, m, p, seed)
    counts = parts.counts(train, 10)
    holders = (counts > 0).sum(axis=0)
    held = holders > 0
    n = p * int((np.array(MNIST)[held] // holders[held]).min())
    assert {len(part) for part in parts.train} == {n}
    test_n = p * int((np.array(MNIST_TEST)[held] // holders[held]).min())
    assert {len(part) for part in parts.test} == {test_n}


@pytest.mark.parametrize(("p", "n"), [(1, 542), (2, 542), (5, 540), (10, 540)])
def test_mnist_with_a_hundred_clients(p: int, n: int) -> None:
    parts = by_classes(labels_of(MNIST), labels_of(MNIST_TEST), 10, 100, p, seed=0)
    assert len(parts.train[0]) == n
    assert parts.unused == 60_000 - 100 * n


def test_class_assignment_is_random() -> None:
    labels = labels_of([40] * 10)
    groups = {
        tuple(np.flatnonzero(row).tolist())
        for seed in range(20)
        for row in by_classes(labels, labels, 10, 10, 2, seed).counts(labels, 10)
    }
    assert len(groups) == 45  # every pair of ten classes turns up


def test_fewer_places_than_classes_leaves_classes_without_a_holder() -> None:
    labels = labels_of([5] * 10)
    parts = by_classes(labels, labels, 10, 3, 2, seed=1)
    assert sorted(parts.counts(labels, 10).sum(axis=0).tolist()) == [0] * 4 + [5] * 6
    assert parts.unused == 20


def test_a_class_without_samples_has_no_holder() -> None:
    labels = labels_of([0, 9, 9, 9])
    counts = by_classes(labels, labels, 4, 3, 2, seed=0).counts(labels, 4)
    assert counts.sum(axis=0).tolist() == [0, 8, 8, 8]


def test_a_small_test_split_is_no_error() -> None:
    parts = by_classes(labels_of([50] * 2), labels_of([3, 1]), 2, 8, 1, seed=0)
    assert all(len(part) == 0 for part in parts.test)


def test_by_classes_says_what_to_change() -> None:
    labels = labels_of([12, 5, 9])
    with pytest.raises(InputError, match=r"`classes_per_client` must be from 1 to 3, .*, got 4"):
        by_classes(labels, labels, 3, 2, 4, seed=0)
    with pytest.raises(InputError, match=r"`clients` must be at most 7 with `classes_per_client` 2, got 20"):
        by_classes(labels, labels, 3, 20, 2, seed=0)
    for seed in range(20):
        by_classes(labels, labels, 3, 7, 2, seed)


# --- Dirichlet and random shares


@settings(max_examples=150)
@given(
    class_sizes,
    st.integers(0, 400),
    st.floats(min_value=5e-324, max_value=1e9),
    seeds,
)
def test_by_dirichlet_uses_every_sample_once(sizes: list[int], m: int, alpha: float, seed: int) -> None:
    train, test = labels_of(sizes), labels_of([size // 2 for size in sizes])
    assume(len(train))
    m = 1 + m % len(train)
    parts = by_dirichlet(train, test, len(sizes), m, alpha, seed)
    assert len(parts.train) == len(parts.test) == m
    assert len(check_disjoint(parts.train, len(train))) == len(train)
    assert len(check_disjoint(parts.test, len(test))) == len(test)
    assert min(map(len, parts.train)) >= 1
    assert parts.unused == 0


@pytest.mark.parametrize("alpha", [0.01, 0.5, 1.0, 7.0])
def test_dirichlet_draws_have_the_right_moments(alpha: float) -> None:
    draws = np.exp(log_dirichlet(5, 20_000, alpha, seed=3))
    assert np.allclose(draws.sum(axis=1), 1)
    assert np.allclose(draws.mean(axis=0), 0.2, atol=0.012)
    assert np.allclose(draws.var(axis=0), 0.16 / (5 * alpha + 1), rtol=0.06)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 30.0])
def test_gamma_draws_have_the_right_moments(alpha: float) -> None:
    draws = np.exp(_log_gamma_draws(4, 25_000, alpha, seed=4)).ravel()
    assert draws.mean() == pytest.approx(alpha, rel=0.02)
    assert draws.var() == pytest.approx(alpha, rel=0.04)
    third = ((draws - draws.mean()) ** 3).mean() / draws.std() ** 3
    assert third == pytest.approx(2 / alpha**0.5, rel=0.12)


def test_alpha_decides_how_uneven_the_clients_are() -> None:
    labels = labels_of([200] * 10)
    largest = [
        (parts.counts(labels, 10).max(axis=1) / parts.counts(labels, 10).sum(axis=1)).mean()
        for alpha in (1e-300, 0.1, 1.0, 1e6)
        for parts in [by_dirichlet(labels, labels, 10, 20, alpha, seed=0)]
    ]
    assert largest[0] > 0.7 > largest[1] > largest[2] > largest[3]
    assert largest[3] == pytest.approx(0.1)


def test_the_test_set_has_the_shares_of_the_train_set() -> None:
    train, test = labels_of([500] * 4), labels_of([100] * 4)
    parts = by_dirichlet(train, test, 4, 6, 1.0, seed=5)
    counts = np.stack([np.bincount(test[part], minlength=4) for part in parts.test])
    assert np.abs(parts.counts(train, 4) / 5 - counts).max() <= 1.2


@settings(max_examples=80)
@given(st.integers(1, 300), st.integers(0, 100), st.integers(0, 400), seeds)
def test_iid_deals_everything_evenly(n: int, n_test: int, m: int, seed: int) -> None:
    m = 1 + m % n
    parts = iid(np.zeros(n, np.int64), np.zeros(n_test, np.int64), m, seed)
    for side, size in ((parts.train, n), (parts.test, n_test)):
        assert len(check_disjoint(side, size)) == size
        lengths = [len(part) for part in side]
        assert max(lengths) - min(lengths) <= 1
    assert parts.unused == 0


_LABELS = labels_of([30] * 6)
PARTITIONS: dict[str, Callable[[int, int], Partition]] = {
    "classes": lambda m, seed: by_classes(_LABELS, _LABELS, 6, m, 2, seed),
    "dirichlet": lambda m, seed: by_dirichlet(_LABELS, _LABELS, 6, m, 0.3, seed),
    "iid": lambda m, seed: iid(_LABELS, _LABELS, m, seed),
}


@pytest.mark.parametrize("kind", PARTITIONS)
def test_the_seed_decides(kind: str) -> None:
    make = PARTITIONS[kind]
    assert same(make(7, 11), make(7, 11))
    assert not same(make(7, 11), make(7, 12))


@pytest.mark.parametrize("kind", PARTITIONS)
def test_more_clients_than_samples_is_refused(kind: str) -> None:
    with pytest.raises(InputError, match=r"`clients` must be from 1 to 180, .*, got 181"):
        PARTITIONS[kind](181, 0)
    with pytest.raises(InputError, match=r"`clients` must be from 1 to .*, got 0"):
        PARTITIONS[kind](0, 0)


# --- the embedded subset


def test_embedded_is_balanced_mnist() -> None:
    data = load("embedded")
    assert data.train.pixels.dtype == np.uint8
    assert data.train.labels.dtype == np.int64
    assert data.test.pixels.shape == (2000, 1, 28, 28)
    assert np.bincount(data.train.labels).tolist() == [1000] * 10
    assert np.bincount(data.test.labels).tolist() == [200] * 10
    assert data.train.labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]  # as in the official file
    assert data.mean[0] == pytest.approx(0.131, abs=0.003)
    assert data.std[0] == pytest.approx(0.308, abs=0.003)
    assert not data.train.pixels.flags.writeable


def test_the_embedded_file_is_small() -> None:
    assert Path(decoding.__file__).with_name("mnist_subset.npz").stat().st_size < 2_100_000


def test_mean_and_std_are_those_of_numpy() -> None:
    pixels = (np.arange(5 * 3 * 4 * 4) * 97 % 251).astype(np.uint8).reshape(5, 3, 4, 4)
    mean, std = mean_std(histogram(pixels[:2]) + histogram(pixels[2:]))
    assert np.allclose(mean, (pixels / 255).mean(axis=(0, 2, 3)), rtol=1e-12)
    assert np.allclose(std, (pixels / 255).std(axis=(0, 2, 3)), rtol=1e-12)
    assert mean_std(histogram(np.full((2, 1, 3, 3), 9, np.uint8)))[1] == (1.0,)


# --- folders of parquet files


def drawn(n: int, mode: str, size: tuple[int, int] = (7, 5), shift: int = 0) -> list[np.ndarray]:
    """n made-up images of a height and a width."""
    shape = (n, *size) if mode == "L" else (n, *size, 3)
    pixels = ((np.arange(np.prod(shape)) + shift) * 37 % 256).astype(np.uint8).reshape(shape)
    return list(pixels)


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def write(path: Path, images: list[np.ndarray], labels: list[int] | None = None, **more: Any) -> None:
    """A parquet file as the hub has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = labels if labels is not None else [i % 3 for i in range(len(images))]
    struct = [{"bytes": png(image), "path": f"{i}.png"} for i, image in enumerate(images)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = {"image": pa.array(struct, kind), "label": pa.array(labels, pa.int64())}
    pq.write_table(
        pa.table({name: column for name, column in (table | more).items() if column is not None}), path
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", drawn(150, "L"))
    write(tmp_path / "data" / "train-00001-of-00002.parquet", drawn(10, "L", shift=5))
    write(tmp_path / "data" / "test-00000-of-00001.parquet", drawn(9, "L", shift=3))
    return tmp_path / "data"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_grey_images_come_back(folder: Path, cache: Path) -> None:
    data = load("mine", folder, cache)
    expected = np.stack(drawn(150, "L") + drawn(10, "L", shift=5))[:, None]
    assert np.array_equal(data.train.pixels, expected)
    assert np.array_equal(data.test.pixels[:, 0], np.stack(drawn(9, "L", shift=3)))
    assert data.train.labels.tolist() == [i % 3 for i in range(150)] + [i % 3 for i in range(10)]
    assert (data.name, data.classes, len(data.train)) == ("mine", 3, 160)
    assert data.mean == pytest.approx(((expected / 255).mean(),))
    assert data.std == pytest.approx(((expected / 255).std(),))


def test_colour_images_come_back(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "train-0.parquet", drawn(12, "RGB"))
    write(tmp_path / "validation-0.parquet", drawn(4, "RGB", shift=2))
    data = load("mine", tmp_path, cache)
    assert np.array_equal(data.train.pixels, np.stack(drawn(12, "RGB")).transpose(0, 3, 1, 2))
    assert data.test.pixels.shape == (4, 3, 7, 5)
    assert len(data.mean) == len(data.std) == 3


def test_one_colour_image_makes_all_of_them_colour(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "train-0.parquet", drawn(5, "L"))
    write(tmp_path / "test-0.parquet", drawn(5, "L") + drawn(1, "RGB"))
    data = load("mine", tmp_path, cache)
    assert data.train.pixels.shape == (5, 3, 7, 5)
    assert np.array_equal(data.train.pixels[:, 2], np.stack(drawn(5, "L")))


@pytest.mark.parametrize("name", ["data", "owner/data"])
def test_a_subfolder_with_the_name_of_the_data_set(folder: Path, cache: Path, name: str) -> None:
    assert load(name, str(folder.parent), cache).train.pixels.shape == (160, 1, 7, 5)


def test_the_label_column_is_found(tmp_path: Path, cache: Path) -> None:
    kinds = {"digit": pa.array([0, 1, 2], pa.uint8()), "label": None}
    for name in ("train-0", "test-0"):
        write(tmp_path / "a" / f"{name}.parquet", drawn(3, "L"), **kinds)
    assert load("a", tmp_path / "a", cache).train.labels.tolist() == [0, 1, 2]

    more = {"fine_label": pa.array([7, 8, 9]), "coarse_label": pa.array([1, 1, 0]), "label": None}
    for name in ("train-0", "test-0"):
        write(tmp_path / "b" / f"{name}.parquet", drawn(3, "L"), **more)
    assert load("b", tmp_path / "b", cache).classes == 10


# --- the cache


def test_the_second_time_is_memory_mapped(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("mine", folder, cache)
    monkeypatch.setattr("cfedavg.data.sources.decode", None)  # calling it would fail
    second = load("mine", folder, cache)
    assert isinstance(second.train.pixels, np.memmap)
    assert not second.train.pixels.flags.writeable
    assert np.array_equal(first.train.pixels, second.train.pixels)
    assert (first.mean, first.std, first.classes) == (second.mean, second.std, second.classes)
    assert len(list(cache.iterdir())) == 1


def test_a_changed_file_is_decoded_again(folder: Path, cache: Path) -> None:
    load("mine", folder, cache)
    write(folder / "test-00000-of-00001.parquet", drawn(4, "L"))
    assert len(load("mine", folder, cache).test) == 4


def test_the_environment_names_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CFEDAVG_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("CFEDAVG_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "cfedavg"


def test_another_process_decodes_while_this_one_imports(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CFEDAVG_CACHE", str(cache))
    monkeypatch.setattr(decoder, "_started", [])
    decoder.start_decoder("mine", folder)
    decoder.start_decoder("mine", folder)  # it runs already
    (process,) = decoder._started
    monkeypatch.setattr(sources, "decode", None)  # this process need not decode
    assert len(load("mine", folder).train) > 0
    assert process.returncode == 0
    assert not decoder._started
    decoder.start_decoder("mine", folder)  # it is in the cache
    decoder.start_decoder("embedded", None)
    assert not decoder._started


def test_a_process_that_cannot_decode_says_nothing(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`load` says what is wrong, in this process."""
    monkeypatch.setenv("CFEDAVG_CACHE", str(cache))
    monkeypatch.setattr(decoder, "_started", [])
    cut(folder / "train-00000-of-00002.parquet")
    decoder.start_decoder("mine", folder)
    assert decoder._started
    with pytest.raises(InputError, match=r"cannot read train-00000-of-00002\.parquet as a parquet file"):
        load("mine", folder)
    assert capfd.readouterr() == ("", "")
    decoder.start_decoder("mine", folder / "nowhere")
    assert not decoder._started


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def pipe(path: Path) -> None:
    """Opening a pipe would wait for ever."""
    path.unlink()
    os.mkfifo(path)


def says(**changes: Any) -> Callable[[Path], Any]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def other_version(path: Path) -> None:
    path.write_text(path.read_text().replace('"version": 1', '"version": 0'))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("train_pixels.npy", cut),
        ("test_labels.npy", cut),
        ("test_pixels.npy", Path.unlink),
        ("train_labels.npy", lambda path: path.write_bytes(b"")),
        ("train_labels.npy", lambda path: np.save(path, np.full(160, 99))),
        ("meta.json", cut),
        ("meta.json", other_version),
        ("meta.json", lambda path: path.write_text("[]")),
        ("meta.json", lambda path: path.write_text("[" * 200_000)),
        ("meta.json", pipe),
        ("meta.json", says(classes=10**9)),
        ("meta.json", says(mean=["0.5"])),
        ("meta.json", says(mean=[0.5, 0.5])),
        ("meta.json", says(std=[0.0])),
        ("train_pixels.npy", pipe),
        ("train_labels.npy", lambda path: path.write_bytes(b"PK\3\4")),
        (".", lambda path: [inner.unlink() for inner in path.iterdir()]),
    ],
)
def test_a_damaged_cache_is_mended(folder: Path, cache: Path, name: str, harm: Callable[[Path], Any]) -> None:
    pixels = load("mine", folder, cache).train.pixels.copy()
    (stored,) = cache.iterdir()
    harm(stored / name)
    data = load("mine", folder, cache)
    assert np.array_equal(data.train.pixels, pixels)
    assert list(cache.iterdir()) == [stored]


def test_a_killed_decode_leaves_nothing(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(decoding, "_save_labels", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load("mine", folder, cache)
    assert list(cache.iterdir()) == []


def test_old_drafts_are_swept(folder: Path, cache: Path) -> None:
    load("mine", folder, cache)
    (stored,) = cache.iterdir()
    cut(stored / "meta.json")
    old, new = (cache / f".{stored.name}-{word}" for word in ("old", "new"))
    old.mkdir()
    new.mkdir()
    os.utime(old, (0, 0))
    load("mine", folder, cache)
    assert {path.name for path in cache.iterdir()} == {stored.name, new.name}


@pytest.mark.parametrize("damaged", [False, True])
def test_decodes_at_once_do_not_disturb_each_other(folder: Path, cache: Path, damaged: bool) -> None:
    if damaged:
        load("mine", folder, cache)
        cut(next(cache.iterdir()) / "train_pixels.npy")
    with ThreadPoolExecutor(6) as pool:
        results: list[ImageData] = list(pool.map(lambda _: load("mine", folder, cache), range(12)))
    expected = np.stack(drawn(150, "L") + drawn(10, "L", shift=5))[:, None]
    assert all(np.array_equal(data.train.pixels, expected) for data in results)
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write the data cache .* set CFEDAVG_CACHE"):
        load("mine", folder, tmp_path / "file")


def test_progress_is_shown_on_a_terminal_only(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load("mine", folder, cache / "a")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load("mine", folder, cache / "b")
    assert "decoding" in capsys.readouterr().err


# --- errors of folders


def refused(pattern: str, name: str, path: Path, cache: Path) -> None:
    with pytest.raises(InputError, match=pattern) as caught:
        load(name, path, cache)
    assert "\n" not in str(caught.value)
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path, cache: Path) -> None:
    refused(r"`data_dir`: .*nowhere is not a folder", "mine", tmp_path / "nowhere", cache)


def test_a_folder_without_both_splits_is_named(tmp_path: Path, cache: Path) -> None:
    refused(r"`data_dir`: .* must hold train-\*.parquet and test-\*.parquet", "mine", tmp_path, cache)
    write(tmp_path / "train-0.parquet", drawn(3, "L"))
    refused(r"`data_dir`: .* must hold train-\*.parquet and test-\*.parquet", "mine", tmp_path, cache)


def test_folders_of_data_sets_in_a_folder_are_named(folder: Path, cache: Path) -> None:
    refused(rf"are missing; set `dataset` to a subfolder: {folder.name}", "mine", folder.parent, cache)


def test_images_of_another_data_set_are_refused(folder: Path, cache: Path) -> None:
    words = r"`data_dir`: .* must hold images of 3×32×32 for cifar10, got 1×\d+×\d+"
    with pytest.raises(InputError, match=words):
        load("cifar10", folder, cache)


def test_a_folder_alone_has_its_own_name(folder: Path, cache: Path) -> None:
    assert load("embedded", folder, cache).name == folder.name


def test_an_unreadable_file_is_named(folder: Path, cache: Path) -> None:
    path = folder / "test-00000-of-00001.parquet"
    path.write_bytes(b"PAR1 and so on")
    refused(r"`data_dir`: .*: cannot read test-00000-of-00001.parquet as a parquet file", "m", folder, cache)


def test_a_file_damaged_inside_is_named(folder: Path, cache: Path) -> None:
    path = folder / "train-00000-of-00002.parquet"
    data = bytearray(path.read_bytes())
    data[4:2000] = bytes(1996)
    path.write_bytes(data)
    refused(r"`data_dir`: .*: cannot read train-00000-of-00002.parquet", "mine", folder, cache)


def test_images_of_different_sizes_are_refused(folder: Path, cache: Path) -> None:
    write(folder / "test-00000-of-00001.parquet", drawn(3, "L", size=(9, 6)))
    refused(r"`data_dir`: .*: all images must have the same size, got 5x7 and 6x9", "mine", folder, cache)


def test_images_that_cannot_be_decoded_are_refused(folder: Path, cache: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    path = folder / "test-00000-of-00001.parquet"
    write(path, drawn(1, "L"), image=pa.array([{"bytes": b"no image", "path": ""}], kind))
    refused(r"`data_dir`: .* holds an image that cannot be decoded", "mine", folder, cache)
    write(path, drawn(1, "L"), image=pa.array([{"bytes": None, "path": "1.png"}], kind))
    refused(r"`data_dir`: .* holds paths of images but not the images", "mine", folder, cache)


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"image": None}, "has no image columns"),
        ({"label": None}, "has no label columns"),
        (
            {"label": None, "size": pa.array([0, 1, 2]), "kind": pa.array([0, 1, 2])},
            "has several possible label columns .*: size, kind; set `label_column` to the one to use",
        ),
        ({"label": pa.array([0, -1, 2])}, "labels of the .* split must be 0 or more, got -1"),
        ({"label": pa.array([0, None, 2])}, "has samples without a label"),
        ({"label": pa.array([0, 10**12, 2])}, r"labels must be below 100000, got 1000000000000"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    folder: Path, cache: Path, more: dict[str, Any], pattern: str
) -> None:
    write(folder / "test-00000-of-00001.parquet", drawn(3, "L"), **more)
    refused(f"`data_dir`: .*{pattern}", "mine", folder, cache)


def test_an_empty_split_is_refused(folder: Path, cache: Path) -> None:
    write(folder / "test-00000-of-00001.parquet", [])
    refused(r"`data_dir`: .*: the test split is empty", "mine", folder, cache)


# --- the hub


class Hub:
    """Stands in for the hub: the branches of one repository, whose files lie in a folder."""

    def __init__(self, folder: Path, branches: dict[str | None, list[str]]) -> None:
        self.folder, self.branches, self.asked = folder, branches, 0
        self.revisions: list[str | None] = []

    def dataset_info(self, repo: str, *, revision: str | None, timeout: float) -> Any:
        self.asked += 1
        self.revisions.append(revision)
        if revision not in self.branches:
            raise RevisionNotFoundError.__new__(RevisionNotFoundError)
        siblings = [SimpleNamespace(rfilename=name) for name in self.branches[revision]]
        return SimpleNamespace(siblings=siblings, sha=f"commit of {revision}")

    def hf_hub_download(self, repo: str, name: str, *, repo_type: str, revision: str) -> str:
        assert repo_type == "dataset"
        (branch,) = {branch for branch in self.branches if revision == f"commit of {branch}"}
        assert name in self.branches[branch]
        return str(self.folder / ("train" if "train" in name else "test"))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(huggingface_hub, "HfApi", lambda: self)
        patch.setattr(huggingface_hub, "hf_hub_download", self.hf_hub_download)


PARQUET = "refs/convert/parquet"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write(tmp_path / "train", drawn(6, "L"))
    write(tmp_path / "test", drawn(4, "L"))
    return tmp_path


@pytest.mark.parametrize(
    "branches",
    [
        {None: ["README.md", "mnist/train-00000-of-00001.parquet", "mnist/test-00000-of-00001.parquet"]},
        {None: ["data/train/0.parquet", "data/valid/0.parquet", "train.csv"]},
        {None: ["pictures.zip"], PARQUET: ["default/train/0000.parquet", "default/test/0000.parquet"]},
    ],
)
def test_the_hub_is_asked_once(
    files: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, branches: dict[str | None, list[str]]
) -> None:
    name = "someone/pictures"
    hub = Hub(files, branches)
    hub.install(monkeypatch)
    data = load(name, cache=cache)
    assert (data.name, len(data.train), len(data.test)) == (name, 6, 4)
    asked = hub.asked
    assert isinstance(load(name, cache=cache).train.pixels, np.memmap)
    assert hub.asked == asked


@pytest.mark.parametrize("name", HUB)
def test_known_data_sets_are_one_commit(
    files: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    revision = HUB[name].partition("@")[2]
    assert re.fullmatch("[0-9a-f]{40}", revision)
    hub = Hub(files, {None: [], revision: ["train-0.parquet", "test-0.parquet"]})
    hub.install(monkeypatch)
    assert len(load(name, cache=cache).train) == 6
    assert hub.revisions == [revision]


def test_revisions_of_a_data_set_are_kept_apart(
    files: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ["train-0.parquet", "test-0.parquet"]
    Hub(files, {"v1": both}).install(monkeypatch)
    load("my/set@v1", cache=cache)
    with pytest.raises(InputError, match=r"`dataset`: my/set@v2: the .* hub has no revision v2 of my/set"):
        load("my/set@v2", cache=cache)


def test_a_repository_that_does_not_fit_is_refused(
    files: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = ["a/train-0.parquet", "a/test-0.parquet", "b/train-0.parquet", "b/test-0.parquet"]
    Hub(files, {None: several}).install(monkeypatch)
    with pytest.raises(InputError, match=r"`dataset`: my/set holds several data sets \(a, b\).* `data_dir`"):
        load("my/set", cache=cache)
    Hub(files, {None: ["train-0.parquet"], PARQUET: []}).install(monkeypatch)
    with pytest.raises(InputError, match=r"`dataset`: my/set has no parquet files of a train and a test"):
        load("my/set", cache=cache)


def test_a_repository_that_is_not_there_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", missing)
    with pytest.raises(InputError, match=r"`dataset`: my/set is not on the Hugging Face hub"):
        load("my/set", cache=cache)


@pytest.mark.parametrize("name", ["minst", "a/b/c", "./here", "", "../up"])
def test_an_unknown_name_does_not_reach_the_hub(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    with pytest.raises(
        InputError, match=r"`dataset` must be one of embedded, mnist, .* owner/name"
    ) as caught:
        load(name, cache=cache)
    assert repr(name) in str(caught.value)


def test_without_network_the_answer_is_quick_and_useful(tmp_path: Path) -> None:
    """The real client of the hub, with nothing listening at the hub's address."""
    program = "from cfedavg.data import load\ntry: load('cifar10')\nexcept ValueError as e: print(e)"
    here = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "CFEDAVG_CACHE": str(tmp_path / "c"),
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | here | {"NO_PROXY": "*"},
        timeout=60,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    for words in (
        "`dataset`: cifar10",
        "could not be downloaded",
        "set `data_dir` to a folder",
        "embedded",
    ):
        assert words in line


def test_importing_the_room_is_light() -> None:
    program = (
        "import sys, cfedavg.data; print({'pyarrow', 'PIL', 'huggingface_hub'} & set(sys.modules) or 'light')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "light"


# --- the real data sets

needs_data = pytest.mark.skipif(
    not (REAL / "mnist").is_dir(), reason="no data sets in $CFEDAVG_DATA or ../shared/data"
)


@needs_data
def test_real_mnist_labels_and_embedded_test_images(tmp_path: Path, cache: Path) -> None:
    (train,) = (REAL / "mnist").glob("train-*.parquet")
    (test,) = (REAL / "mnist").glob("test-*.parquet")
    labels = pq.read_table(train, columns=["label"])["label"].to_numpy()
    assert np.bincount(labels).tolist() == MNIST
    parts = by_classes(labels, labels, 10, 100, 1, seed=0)
    assert {len(part) for part in parts.train} == {542}

    for split in ("train", "test"):  # the small file twice: the large one takes ten seconds
        (tmp_path / f"{split}-0.parquet").symlink_to(test)
    data, embedded = load("mnist", tmp_path, cache), load("embedded")
    assert np.bincount(data.test.labels).tolist() == MNIST_TEST
    first = np.sort(np.concatenate([np.flatnonzero(data.test.labels == c)[:200] for c in range(10)]))
    assert np.array_equal(data.test.pixels[first], embedded.test.pixels)
    assert np.array_equal(data.test.labels[first], embedded.test.labels)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "mean"),
    [
        ("mnist", (60_000, 1, 28, 28), [0.1307]),
        ("fashion_mnist", (59_947, 1, 28, 28), [0.286]),
        ("cifar10", (50_000, 3, 32, 32), [0.4914, 0.4822, 0.4465]),
    ],
)
def test_real_folders(name: str, shape: tuple[int, ...], mean: list[float], cache: Path) -> None:
    data = load(name, REAL, cache)
    assert data.train.pixels.shape == shape
    assert (len(data.test), data.classes) == (10_000, 10)
    assert data.mean == pytest.approx(mean, abs=1e-3)
    if name == "mnist":
        embedded = load("embedded")
        labels = data.train.labels
        first = np.sort(np.concatenate([np.flatnonzero(labels == c)[:1000] for c in range(10)]))
        assert np.array_equal(data.train.pixels[first], embedded.train.pixels)
