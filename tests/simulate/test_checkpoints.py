"""Checkpoints that a thread writes while the next rounds run, as beside a GPU."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cfedavg import InputError
from cfedavg.simulate import folder, host_copies
from cfedavg.simulate.engines import BlockEngine
from cfedavg.simulate.host_copies import Copy, HostCopies
from cfedavg.simulate.state import State, save
from tests.conftest import blobs
from tests.disk import Killed
from tests.simulate.test_run import BASE, Stop, assert_same_run, run


def write_rows_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines write a row when the next round is done, as engines on a GPU do."""
    start = BlockEngine.__init__

    def init(self: BlockEngine, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self.behind = 1

    monkeypatch.setattr(BlockEngine, "__init__", init)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds t of the checkpoints that threads have written."""
    found: list[int] = []

    def noted(state: State, path: Path, about: dict[str, Any], copy: Copy) -> None:
        assert threading.current_thread() is not threading.main_thread()
        save(state, path, about, copy)
        found.append(state.t)

    monkeypatch.setattr(folder, "save", noted)
    return found


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_run_is_the_same(
    every: int, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BASE.replace(checkpoint_every=every)
    run(config, blobs(), out=tmp_path / "plain")
    expected = list(saved)
    saved.clear()
    write_rows_later(monkeypatch)
    run(config, blobs(), out=tmp_path / "beside")
    assert expected == [t for t in range(1, 8) if t % every == 0 or t == 7]
    assert saved == [t for t in expected if t != 6]  # the last round follows at once
    assert_same_run(tmp_path / "plain", tmp_path / "beside")


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("how", [KeyboardInterrupt, Killed])
def test_resume_is_bitwise(
    at: int, how: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BASE.replace(checkpoint_every=2)
    run(config, blobs(), out=tmp_path / "whole")
    write_rows_later(monkeypatch)
    with pytest.raises(how):
        run(config, blobs(), out=tmp_path / "broken", callbacks=[Stop(at, how)])
    run(config, blobs(), out=tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize(
    ("up", "down"),
    [("lowrank(2) >> bf16", "eden(2, unbiased=false)"), ("topk(0.9, warmup=6) >> int2", "lowrank(2)")],
)
def test_resume_is_bitwise_in_another_basis(up: str, down: str, tmp_path: Path) -> None:
    config = BASE.replace(checkpoint_every=2, compressor=up, compressor_down=down)
    run(config, blobs(), out=tmp_path / "whole")
    with pytest.raises(Killed):
        run(config, blobs(), out=tmp_path / "broken", callbacks=[Stop(3, Killed)])
    run(config, blobs(), out=tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_residuals_on_disk_are_saved_between_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BASE.replace(residuals="disk")
    run(config, blobs(), out=tmp_path / "whole")
    write_rows_later(monkeypatch)
    run(config, blobs(), out=tmp_path / "later")
    assert_same_run(tmp_path / "whole", tmp_path / "later")


def test_an_error_of_the_thread_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last good checkpoint stays, and the run can go on from it."""
    config, fails = BASE.replace(checkpoint_every=2), True

    def full(state: State, path: Path, about: dict[str, Any], copy: Copy) -> None:
        if state.t == 4 and fails:
            raise InputError("`out`: the disk is full")
        save(state, path, about, copy)

    run(config, blobs(), out=tmp_path / "whole")
    write_rows_later(monkeypatch)
    monkeypatch.setattr(folder, "save", full)
    with pytest.raises(InputError, match="the disk is full"):
        run(config, blobs(), out=tmp_path / "broken")
    fails = False
    run(config, blobs(), out=tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_tensors_of_the_host_are_copied_only_if_they_must() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    copied = HostCopies().begin(torch.device("cpu"))({"here": matrix, "turned": matrix.T})
    assert copied["here"] is matrix
    assert copied["turned"].is_contiguous()
    assert torch.equal(copied["turned"], matrix.T)


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [8, 1 << 23])
def test_tensors_of_a_gpu_are_copied_as_the_queued_work_leaves_them(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "_PIECE", piece)
    device = torch.device("cuda")
    big = torch.randn(4000, 4000, device=device)
    slow = torch.linalg.matrix_power(big / 100, 64)  # still being computed when `begin` returns
    given = {
        "slow": slow[:3, :3], "bf16": torch.randn(5, device=device).bfloat16(),
        "one": torch.tensor(3.0).cuda(), "none": torch.empty(0, device=device),
        "bools": torch.tensor([True, False]).cuda(), "here": torch.ones(3),
    }  # fmt: skip
    copies = HostCopies()
    for _ in range(2):
        copy = copies.begin(device)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(copy, given).result()
        for name, tensor in given.items():
            assert not found[name].is_cuda
            assert found[name].is_contiguous()
            assert torch.equal(found[name], tensor.cpu())
