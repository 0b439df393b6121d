"""The guard of a federation: it decides as that of a simulation, also after a restart of the server."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

import cfedavg
from cfedavg.core.config import Config
from cfedavg.core.run_files import read_rows
from cfedavg.data.tasks import build_task
from cfedavg.launch.app import client, run_config_of, server
from tests.flower.test_strategy import federated
from tests.grid import LocalGrid, LocalNode, ServerKilled

pytestmark = pytest.mark.usefixtures("without_waiting")
CONFIG = Config(
    clients=3, rounds=10, model="linear", local_steps=2, classes_per_client=2, compressor="rd(0.99)",
    compressor_down="none", guard="adapt", eval_every=10,
)  # fmt: skip


@pytest.fixture(autouse=True)
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cfedavg.guard.LIMIT", 1.0)
    monkeypatch.setattr(client, "build_task", functools.cache(build_task))


def sent(rows: list[dict[str, int]]) -> list[int]:
    return [row["coordinates_sent"] for row in rows]


def test_a_federation_adapts_as_a_simulation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = read_rows(federated(CONFIG, tmp_path) / "metrics.jsonl")
    expected = cfedavg.run(CONFIG.replace(engine="reference"), draw=False).rows
    assert sent(found) == sent(expected)
    assert sent(found)[-1] > 1.5 * sent(found)[0]
    assert [row["left_norm"] for row in found] == [row["left_norm"] for row in expected]
    assert "from round 8 on it is rd(0.98)" in caplog.text


def test_a_restarted_server_adapts_alike(tmp_path: Path) -> None:
    whole = read_rows(federated(CONFIG, tmp_path / "whole") / "metrics.jsonl")
    given = run_config_of(CONFIG) | {"out": str(tmp_path / "out")}
    nodes = [LocalNode(100 + i, client.app, tmp_path / f"n{i}", given, i) for i in range(3)]

    class Dying(LocalGrid):
        """A grid whose server is killed in round 7, after the alarm."""

        def push_messages(self, messages):  # type: ignore[no-untyped-def]
            if (tmp_path / "out" / "metrics.jsonl").exists():
                lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
                if len(lines) == 6 and json.loads(lines[-1])["round"] == 5:
                    raise ServerKilled
            return super().push_messages(messages)

    with pytest.raises(ServerKilled):
        server.main(Dying(nodes), Context(1, 1, {}, RecordDict(), given))
    server.main(LocalGrid(nodes), Context(1, 1, {}, RecordDict(), given | {"resume": True}))
    assert sent(read_rows(tmp_path / "out" / "metrics.jsonl")) == sent(whole)
