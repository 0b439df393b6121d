"""What a client app replies after training: the facts that travel, and what is wrong with its reply."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import Message

from cfedavg.flower.array_layout import Form
from cfedavg.flower.client_message import MOST_METRICS, number

STEPS = "local-steps"  # the metric by which a client reports K_i


def read_facts(trained: Message) -> dict[str, Any]:
    """Return the metrics that the app reports, and those of them that have a meaning here."""
    records = {name: dict(record) for name, record in trained.content.metric_records.items()}
    merged: dict[str, Any] = {key: value for record in records.values() for key, value in record.items()}
    loss = next((merged[key] for key in ("train_loss", "train-loss", "loss") if key in merged), None)
    return {"metrics": records, "K": number(merged.get(STEPS)), "loss": number(loss)}


def object_to_model(trained: Message, form: Form) -> str:
    """Return why the model in a reply cannot be compressed; empty if it can."""
    records = list(trained.content.array_records.values())
    if len(records) != 1:
        return f"the client app replied with {len(records)} ArrayRecords: exactly one is needed"
    arrays = {name: array.numpy() for name, array in records[0].items()}
    if found := form.difference(arrays):
        return f"the client app replied with another model: {found}"
    return ""


def object_to_metrics(facts: Mapping[str, Any], update: str) -> str:
    """Return what is wrong with the metrics of a reply; empty if nothing is."""
    if update == "mean" and not (facts["K"] or 0) > 0:
        return f"update = 'mean' needs the metric {STEPS!r}, the number of local steps, above 0"
    if (size := len(json.dumps(facts["metrics"]))) > MOST_METRICS:
        return f"the metrics of the client app take {size:,} bytes: at most {MOST_METRICS:,} travel"
    return ""
