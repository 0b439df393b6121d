"""A round of FedAvg in plain PyTorch: eager, one client after another, nothing compressed or encoded.

With several processes each does its share of the clients, and the sums of the models are added up by gloo.
Evaluation is shared in the same way. Clients' samples lie on the device from the start and are read in a
fixed order, as in pfl; precision is PyTorch's default (on a GPU: TF32 in convolutions, not in products).
"""

from __future__ import annotations

import torch
from common import join, leave, local_sgd, memory, moved, now, report, right, settings, spread, work
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def main() -> None:
    given = settings(__doc__)
    spread(given)
    join(given)
    task, rank, size = work(given), given.rank, given.processes
    model = task.model.to(given.device)
    clients = [moved(client, given.device) for client in task.clients[rank::size]]
    samples = len(task.test[1])
    labels = task.test[1].numel()
    share = slice(samples * rank // size, samples * (rank + 1) // size)
    test = moved((task.test[0][share], task.test[1][share]), given.device)

    def added(tensor: torch.Tensor) -> torch.Tensor:
        if size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    x = parameters_to_vector(model.parameters()).detach().clone()
    stamps, accuracy = [], []
    for _ in range(1 + given.rounds):
        total = torch.zeros_like(x)
        for client in clients:
            vector_to_parameters(x.clone(), model.parameters())
            local_sgd(model, client, given.epochs, task.batch)
            total += parameters_to_vector(model.parameters()).detach()
        x = added(total) / given.clients
        vector_to_parameters(x.clone(), model.parameters())
        accuracy.append(int(added(torch.tensor(right(model, test)))) / labels)
        stamps.append(now(given.device))
    peak = memory(given)
    if rank == 0:
        report("plain PyTorch", given, task.steps(given.epochs), stamps, accuracy[1:], peak)


if __name__ == "__main__":
    main()
    leave()
