"""Norms: what is summed up, and that rows, lists and single vectors come to the same; tensors in files."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import _TYPES, load_file, save

from cfedavg.core.arrays import norm2, norms2
from cfedavg.core.errors import InputError
from cfedavg.core.files import lock_folder
from cfedavg.core.tensors import UNREADABLE, checksum, read_tensors, save_file, save_tensors

NUMBERS = st.floats(-(2.0**60), 2.0**60, width=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(st.lists(NUMBERS, max_size=40))
def test_norm_is_the_sum_of_squares(dtype: torch.dtype, numbers: list[float]) -> None:
    v = torch.tensor(numbers, dtype=dtype)
    exact = math.fsum(x * x for x in v.double().tolist())
    assert norm2(v) == pytest.approx(exact, rel=1e-14)


@given(st.integers(1, 4), st.integers(0, 30), st.integers(0, 99))
def test_rows_and_lists_have_the_norms_of_their_vectors(n: int, d: int, seed: int) -> None:
    """Norms are equal to the bit, so that engines agree, also for strided arrays."""
    block = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    alone = [norm2(row.clone()) for row in block]
    assert norms2(block) == norms2(list(block)) == alone
    assert norms2(block.T.contiguous().T) == alone


def test_norms_of_nothing_of_parameters_and_of_what_is_not_finite() -> None:
    assert norms2([]) == []
    assert norm2(torch.full((9,), 2.0, requires_grad=True)) == 36.0
    assert norm2(torch.tensor([1.0, math.inf])) == math.inf
    assert math.isnan(norm2(torch.tensor([1.0, math.nan])))
    assert norm2(torch.full((2,), 3e38)) == pytest.approx(1.8e77, rel=1e-6)


def test_many_numbers_lose_no_digits_to_speak_of() -> None:
    v = torch.randn(200_003, generator=torch.Generator().manual_seed(0))
    assert norm2(v) == pytest.approx(math.fsum(x * x for x in v.double().tolist()), rel=1e-12)


# Files

EIGHT = torch.arange(8, dtype=torch.uint8)
TENSORS = {f"t{n}": EIGHT.view(dtype).clone() for n, dtype in enumerate(_TYPES.values())} | {
    "a number": torch.tensor(3.0),
    "nothing": torch.zeros(0, 3),
    "é\t\x07/\\\u2028": torch.ones(3, 2, requires_grad=True),
}


@pytest.mark.parametrize("metadata", [None, {"cfedavg": '{"t": 1, "é": "[\\"x\\"]"}'}])
def test_a_file_is_what_safetensors_writes(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    """Files equal those of safetensors byte for byte, for every dtype."""
    save_file(TENSORS, tmp_path / "ours", metadata)
    assert (tmp_path / "ours").read_bytes() == save(TENSORS, metadata)
    again = load_file(tmp_path / "ours")
    assert again.keys() == TENSORS.keys()
    assert all(torch.equal(again[name].view(-1), TENSORS[name].view(-1)) for name in ("t0", "t3", "nothing"))


def test_tensors_with_gaps_and_what_no_file_can_hold(tmp_path: Path) -> None:
    block = torch.arange(6.0).reshape(2, 3)
    save_file({"t": block.T}, tmp_path / "file")
    assert torch.equal(load_file(tmp_path / "file")["t"], block.T)
    with pytest.raises(InputError, match=r"cannot hold 'z' of dtype complex128"):
        save_tensors({"z": torch.zeros(1, dtype=torch.complex128)}, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


KILLED = """
import resource, signal, sys, torch
from pathlib import Path
from cfedavg.core.tensors import save_tensors
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills whoever writes more than so many bytes
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
save_tensors({"x": torch.ones(2**16)}, Path(sys.argv[1]), {"t": 1})
"""


def test_a_kill_in_the_midst_of_a_save_leaves_only_what_is_swept(tmp_path: Path) -> None:
    """A temporary file of the library's own would stay for ever, as large as a checkpoint."""
    save_tensors({"x": torch.ones(3)}, tmp_path / "file", {"t": 0})
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "file")])
    assert killed.returncode == -signal.SIGXFSZ
    assert len(list(tmp_path.iterdir())) == 2
    with lock_folder(tmp_path, "busy"):
        assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert read_tensors(tmp_path / "file")[1] == {"t": 0}


def test_checksum_of_a_single_number() -> None:
    """A forged file may hold a scalar where a vector belongs."""
    assert checksum({"t": torch.tensor(1.0)}, {}) != checksum({"t": torch.tensor(2.0)}, {})


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:end])
    change(table)
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


@pytest.mark.parametrize("library", ["np", "pt"])
def test_what_was_written_is_read(tmp_path: Path, library: str) -> None:
    tensors = {name: tensor.detach() for name, tensor in TENSORS.items()}
    if library == "np":  # NumPy lacks bf16 and numbers of 8 bits
        names = {f"t{n}" for n, dtype in enumerate(_TYPES.values()) if not hasattr(np, str(dtype)[6:])}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in names}
    save_tensors(tensors, tmp_path / "file", {"t": 1})
    found, about = read_tensors(tmp_path / "file", library)
    assert about == {"t": 1}
    assert found.keys() == tensors.keys()
    assert checksum(found, about) == checksum(tensors, about)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table["y"].update(data_offsets=[0, 12]),
        lambda table: table["y"].update(data_offsets=[12, 24], shape=[2]),
        lambda table: table["y"].update(data_offsets=[12, 28], shape=[4]),
        lambda table: table["y"].update(shape=[-1, -3]),
        lambda table: table["y"].update(shape=[True, 3]),
        lambda table: table["y"].update(dtype="F128"),
        lambda table: table["y"].pop("shape"),
        lambda table: table.pop("y"),
        lambda table: table.pop("x"),
        lambda table: table.pop("__metadata__"),
        lambda table: table.update(y=3),
        lambda table: table["y"].update(shape=[0, 2**62, 2**62], data_offsets=[12, 12]),
    ],
)
def test_a_damaged_header_is_unreadable(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    save_tensors({"x": torch.ones(3), "y": torch.ones(3)}, tmp_path / "file", {"t": 1})
    edit_header(tmp_path / "file", lambda table: None)
    assert read_tensors(tmp_path / "file")[1] == {"t": 1}
    edit_header(tmp_path / "file", change)
    for library in ("np", "pt"):
        with pytest.raises(UNREADABLE):
            read_tensors(tmp_path / "file", library)


@pytest.mark.parametrize("length", [0, 3, 8, 20, -1])
def test_a_file_that_was_cut_is_unreadable(tmp_path: Path, length: int) -> None:
    save_tensors({"x": torch.ones(3)}, tmp_path / "file", {"t": 1})
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:length])
    with pytest.raises(UNREADABLE):
        read_tensors(tmp_path / "file")
