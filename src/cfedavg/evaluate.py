"""Evaluation of a model on the test set, as a whole and client by client."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cfedavg.local import to_device
from cfedavg.metrics import Record
from cfedavg.task import Batch, Task, accuracy, cross_entropy

EVALUATION_BATCH = 512


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, device: torch.device, dtype: torch.dtype) -> Record:
    """`test_loss`, `test_` and the metric, and the metric's mean and minimum over the clients' parts."""
    if task.test is None:
        return {}
    model.eval()
    n = len(task.test)
    losses, metrics = [], []
    for start in range(0, n, EVALUATION_BATCH):
        rows = np.arange(start, min(start + EVALUATION_BATCH, n))
        loss, metric = _loss_and_metric(model, task, to_device(task.test.batch(rows), device, dtype))
        losses.append(loss.double() * len(rows))
        metrics.append(metric.double().expand(len(rows)))
    values = torch.cat(metrics).cpu().numpy()
    record: Record = {"test_loss": float(torch.stack(losses).sum()) / n}
    record[f"test_{task.metric_name}"] = float(values.mean())
    if task.test_parts is not None:
        parts = [float(values[rows].mean()) for rows in task.test_parts if len(rows)]
        if parts:
            record[f"client_{task.metric_name}_mean"] = float(np.mean(parts))
            record[f"client_{task.metric_name}_min"] = min(parts)
    return record


def _loss_and_metric(model: nn.Module, task: Task, batch: Batch) -> tuple[Tensor, Tensor]:
    if task.loss is cross_entropy and task.metric is accuracy:
        # One forward pass serves both: what the two ask the model next, it has answered already.
        answered: Any = partial(lambda answer, _: answer, model(batch[0]))
        return cross_entropy(answered, batch), accuracy(answered, batch)
    return task.loss(model, batch), task.metric(model, batch)
