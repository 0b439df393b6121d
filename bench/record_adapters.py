"""Record messages of a short federation of adapters on a CPU, for the comparison of coders.

    python -m bench.record_adapters --data pycode --out results/wire/adapters

A GPT of 4 blocks of width 128 is trained on the bytes of 14 packages for some hundred steps, then frozen.
Adapters (LoRA) of rank 8 in all its blocks are trained by 4 clients, one for each of the packages with the
longest texts among the others, with AdamW and error feedback, both directions compressed. The messages of
client 0 in rounds 2, 5 and 10 are kept. bench/adapters.py has the federation on a GPU.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from bench.adapters import BASE, read_bytes, sequences
from torch.nn import functional as F

from cfedavg import Config, Task
from cfedavg.adapters import add_adapters
from cfedavg.core.files import write_atomic
from cfedavg.models import GPT
from cfedavg.simulate.engines import ReferenceEngine
from cfedavg.simulate.plan import Plan

ROUNDS = (2, 5, 10)
CLIENTS, LENGTH, BATCH = 4, 256, 8
COMPRESSOR = "topk(0.9) >> int3(256)"  # as in bench/adapters.py


def pretrain(texts: dict[str, np.ndarray], steps: int) -> GPT:
    """Return a GPT after some steps on the texts of the packages in BASE."""
    torch.manual_seed(0)
    model = GPT(LENGTH, 256, 128, 4, 4)
    text = torch.from_numpy(np.concatenate([texts[name] for name in BASE]).astype(np.int64))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(steps):
        at = torch.randint(len(text) - LENGTH - 1, (BATCH, 1)) + torch.arange(LENGTH + 1)
        loss = F.cross_entropy(model(text[at][:, :-1]).flatten(0, 1), text[at][:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {float(loss):.3f}", flush=True)
    return model


def record(model: GPT, texts: dict[str, np.ndarray], out: Path) -> None:
    """Train adapters and keep the messages of client 0."""
    names = sorted((name for name in texts if name not in BASE), key=lambda name: -len(texts[name]))
    task = Task(
        add_adapters(model, rank=8, layers="blocks.*"),
        [sequences(texts[name], 400) for name in names[:CLIENTS]],
        name="adapters",
    )
    config = Config(
        rounds=max(ROUNDS), clients=CLIENTS, local_steps="15", batch_size=BATCH, local_optimiser="adamw",
        eta_local=1e-3, compressor=COMPRESSOR, compressor_down=COMPRESSOR,
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        engine = ReferenceEngine(Plan(config, task), task, torch.device("cpu"), Path(folder))
        write_atomic(out / "layout.json", engine.layout.text.encode())
        state = engine.start()
        for t in range(1, max(ROUNDS) + 1):
            state, finish = engine.round(state)
            print(f"round {t}: {finish()['uplink_bytes']:,} bytes up", flush=True)
            if t in ROUNDS:
                last = sorted(Path(folder).glob("*-00000.cfa"))[-1]
                shutil.copyfile(last, out / f"{t:05}-00000.cfa")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="parquet files with package and text")
    parser.add_argument("--out", type=Path, default=Path("results/wire/adapters"))
    parser.add_argument("--steps", type=int, default=400, help="of the pre-training")
    given = parser.parse_args()
    torch.set_num_threads(1)
    texts = read_bytes(given.data, "train")
    record(pretrain(texts, given.steps), texts, given.out)


if __name__ == "__main__":
    main()
