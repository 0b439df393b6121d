"""The ledger: bytes of a run are lengths of messages, and the messages are those that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cfedavg import Config, Layout, decode, decompress, run
from cfedavg.core.errors import InputError
from cfedavg.core.payload import Payload
from cfedavg.simulate.engines.traffic import dense_bytes
from cfedavg.wire import read_header
from tests.conftest import blobs


@pytest.mark.parametrize("compressor", ["none", "topk(0.9) >> bf16", "rd(0.9)", "qsgd(16)"])
def test_bytes_are_those_of_the_messages(compressor: str, tmp_path: Path) -> None:
    config = Config(
        rounds=3, compressor=compressor, compressor_down="none", local_steps="2", participation=0.5
    )
    counted = run(config, blobs()).rows
    rows = run(config, blobs(), messages=tmp_path).rows
    for row, other in zip(rows, counted, strict=True):
        files = sorted(tmp_path.glob(f"{row['round']:05}-*.cfa"))
        assert len(files) == row["clients"]
        assert sum(file.stat().st_size for file in files) == row["uplink_bytes"] == other["uplink_bytes"]
    layout = Layout.from_text((tmp_path / "layout.json").read_text())
    whole = 80 + 4 * layout.d
    assert rows[0]["downlink_bytes"] == whole * rows[0]["clients"]


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_what_travels_as_it_is_need_not_move(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred whole models would take longer to fetch from a GPU than to train."""

    def moved(payload: Payload) -> Payload:
        raise AssertionError

    config = Config(rounds=2, compressor="none", compressor_down="none", local_steps="2", engine=engine)
    wanted = run(config, blobs()).rows
    monkeypatch.setattr(Payload, "numpy", moved)
    for room in ("traffic", "reference"):
        monkeypatch.setattr(f"cfedavg.simulate.engines.{room}.dense_bytes", lambda vector, layout: 0)
    found = run(config, blobs()).rows
    assert [row["uplink_bytes"] for row in found] == [row["uplink_bytes"] for row in wanted]


def test_messages_hold_what_was_sent(tmp_path: Path) -> None:
    """Applying them by hand gives the model."""
    task = blobs()
    start = torch.cat([p.detach().reshape(-1) for p in task.model.parameters()])
    config = Config(rounds=1, compressor="topk(0.5)", compressor_down="none", local_steps="2")
    model = run(config, task, messages=tmp_path).model
    layout = Layout.of(model)
    sent = []
    for client, file in enumerate(sorted(tmp_path.glob("*.cfa"))):
        assert read_header(file.read_bytes()).client == client
        payload = decode(file.read_bytes(), layout=layout, client=client, sequence=0)
        sent.append(decompress(payload.map(torch.from_numpy))[0])
    after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(start + torch.stack(sent).mean(0), after)


def test_messages_of_another_run_are_not_touched(tmp_path: Path) -> None:
    """Neither by a run that is refused for another reason, nor by one with another model or seed."""
    kept, out = tmp_path / "messages", tmp_path / "run"
    run(Config(rounds=1), blobs(), messages=kept, out=out, draw=False)
    before = {file.name: file.read_bytes() for file in kept.iterdir()}
    with pytest.raises(InputError, match="`resume`"):
        run(Config(rounds=1), blobs(features=5), messages=kept, out=out, draw=False)
    with pytest.raises(InputError, match="messages of another model"):
        run(Config(rounds=1), blobs(features=5), messages=kept)
    with pytest.raises(InputError, match="messages of another run"):
        run(Config(rounds=1, seed=1), blobs(), messages=kept)
    assert {file.name: file.read_bytes() for file in kept.iterdir()} == before
    run(Config(rounds=2), blobs(), messages=kept, out=out, resume=True, draw=False)
    assert len(list(kept.iterdir())) == 2 * len(before) - 1


def test_nothing_is_no_message() -> None:
    assert dense_bytes(torch.empty(0), Layout.flat(0)) == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="`messages`"):
        run(Config(rounds=1), blobs(), messages=tmp_path / "file" / "deeper")
