"""Adapters: they change nothing at first, train alone, travel alone, and can be merged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cfedavg import Config, InputError, Task, run
from cfedavg.adapters import Adapted, add_adapters, merge_adapters
from cfedavg.core.layout import Layout
from cfedavg.models import GPT


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(12, 30, width=16, layers=2, heads=2)


def text(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(30, (n, 13), generator=torch.Generator().manual_seed(n))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def test_a_new_adapter_changes_nothing() -> None:
    model, x = gpt(), text(3)[0]
    adapted = add_adapters(model, rank=4, alpha=8)
    assert torch.equal(adapted(x), model(x))
    assert all(p.requires_grad for p in model.parameters())
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert names
    assert all(name.endswith((".up", ".down")) for name in names)


def test_only_named_layers_get_adapters() -> None:
    adapted = add_adapters(gpt(), layers="blocks.*.attention.*")
    found = [name for name, module in adapted.named_modules() if isinstance(module, Adapted)]
    assert found == [f"blocks.{i}.attention.{name}" for i in (0, 1) for name in ("qkv", "out")]


@pytest.mark.parametrize("engine", ["reference", "batched"])
def test_adapters_train_and_travel_alone(engine: str) -> None:
    clients = [text(20 + i) for i in range(3)]
    adapted = add_adapters(gpt(), rank=2)
    task = Task(adapted, clients, test=clients[0])
    config = Config(rounds=4, local_steps=5, local_optimiser="adamw", eta_local=0.01, engine=engine)
    result = run(config.replace(compressor="none", compressor_down="none"), task)
    d = Layout.of(adapted).d
    assert result.final["coordinates_sent"] == 3 * d
    assert result.final["test_loss"] < result.rows[0]["test_loss"]
    for name, p in adapted.named_parameters():
        if not p.requires_grad:
            assert torch.equal(result.model.get_parameter(name), p)
    merged, x = merge_adapters(result.model), text(4)[0]
    assert not any(isinstance(module, Adapted) for module in merged.modules())
    torch.testing.assert_close(merged(x), result.model(x), rtol=1e-4, atol=1e-5)
    assert merged.state_dict().keys() == gpt().state_dict().keys()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rank": 0}, "`rank` must be a whole number of 1 or more, got 0"),
        ({"rank": 2.0}, "`rank` must be a whole number of 1 or more, got 2.0"),
        ({"layers": "decoder.*"}, "`layers` must match the name of an nn.Linear, got 'decoder.*'"),
    ],
)
def test_a_mistake_is_a_sentence(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        add_adapters(gpt(), **given)  # type: ignore[arg-type]
    assert sentence in str(error.value)
