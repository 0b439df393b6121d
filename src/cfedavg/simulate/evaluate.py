"""Evaluation of a model on the test set, as a whole and client by client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cfedavg.core.errors import InputError
from cfedavg.core.run_files import Record
from cfedavg.simulate.local import to_device
from cfedavg.task import Batch, Loss, Task, accuracy, check_number, cross_entropy, wrap_errors

EVALUATION_BATCH = {"cpu": 512, "cuda": 2500}


class EvaluatedBatches(NamedTuple):
    """Results of test batches: each batch's first row, its loss times its size, and its samples' metrics."""

    starts: list[int]
    losses: list[float]
    values: list[np.ndarray]


def evaluate(model: nn.Module, task: Task, device: torch.device, dtype: torch.dtype) -> Record:
    """Return `test_loss`, the metric, and the metric's mean and minimum over the clients' test sets."""
    return summarise_batches(task, [evaluate_batches(model, task, device, dtype)])


@torch.no_grad()
def evaluate_batches(
    model: nn.Module,
    task: Task,
    device: torch.device,
    dtype: torch.dtype,
    first: int = 0,
    every: int = 1,
    prepare: Callable[[Batch], Batch] = lambda batch: batch,
) -> EvaluatedBatches:
    """Evaluate test batches `first`, `first + every`, ...; `prepare` converts each batch for the model."""
    if task.test is None:
        return EvaluatedBatches([], [], [])
    model.eval()
    n, size, starts = len(task.test), EVALUATION_BATCH.get(device.type, 512), []
    losses, metrics = [], []
    for start in range(first * size, n, every * size):
        rows = np.arange(start, min(start + size, n))
        batch = prepare(to_device(task.test.batch(rows), device, dtype))
        loss, metric = _loss_and_metric(model, task, batch, len(rows))
        starts.append(start)
        losses.append(loss.double() * len(rows))
        metrics.append(metric)
    if not starts:
        return EvaluatedBatches([], [], [])
    values = torch.cat(metrics).cpu().numpy()
    each = np.split(values, np.cumsum([len(m) for m in metrics])[:-1])
    return EvaluatedBatches(starts, torch.stack(losses).tolist(), each)


@torch.no_grad()
def evaluate_first(model: nn.Module, task: Task, device: torch.device, dtype: torch.dtype) -> None:
    """Evaluate the first batch of the test set, so that errors show before the run."""
    if task.test is None:
        return
    rows = np.arange(min(EVALUATION_BATCH.get(device.type, 512), len(task.test)))
    batch = wrap_errors(task.test.batch, "Task.test gives no batch")(rows)
    _loss_and_metric(model.eval(), task, to_device(batch, device, dtype), len(rows))


def summarise_batches(task: Task, parts: Sequence[EvaluatedBatches]) -> Record:
    """Return the test columns of a metrics row, from batches summed in the order of the test set."""
    batches = sorted(
        (batch for part in parts for batch in zip(*part, strict=True)), key=lambda batch: batch[0]
    )
    if not batches:
        return {}
    _, losses, each = zip(*batches, strict=True)
    values = np.concatenate(each)
    record: Record = {"test_loss": float(torch.tensor(losses, dtype=torch.float64).sum()) / len(values)}
    record[f"test_{task.metric_name}"] = float(values.mean())
    if task.test_parts is not None:
        means = [float(values[rows].mean()) for rows in task.test_parts if len(rows)]
        if means:
            record[f"client_{task.metric_name}_mean"] = float(np.mean(means))
            record[f"client_{task.metric_name}_min"] = min(means)
    return record


def _loss_and_metric(model: nn.Module, task: Task, batch: Batch, n: int) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch of n samples, and the metric of each sample."""
    loss: Loss = wrap_errors(task.loss, "Task.loss fails on a batch of Task.test")
    metric = wrap_errors(task.metric, "Task.metric fails on a batch of Task.test")
    if task.loss is cross_entropy and task.metric is accuracy:
        # One forward pass serves both loss and metric.
        output = wrap_errors(lambda: model(batch[0]), "Task.model fails on a batch of Task.test")()
        known: Any = lambda _: output  # noqa: E731
        return loss(known, batch), _per_sample(metric(known, batch), n)
    value = loss(model, batch)
    check_number(value)
    return value, _per_sample(metric(model, batch), n)


def _per_sample(found: Any, n: int) -> Tensor:
    """Return a metric as n numbers, one for each sample; a single number for the batch is repeated."""
    try:
        values = torch.as_tensor(found).double()
        return values.expand(n)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {list(found.shape)}" if isinstance(found, Tensor) else ""
        raise InputError(
            f"Task.metric must return {n} numbers, one for each sample, or one number for the batch, "
            f"got {type(found).__name__}{shape}"
        ) from None
