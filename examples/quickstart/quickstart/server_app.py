"""The server: federated averaging, and a look at the test set after every round."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from cfedavg.flower import CFedAvg
from quickstart.task import accuracy, make_model, test_data

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    torch.manual_seed(settings["seed"])
    model, data = make_model(), test_data()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        found = accuracy(model, data)
        print(f"after round {server_round}: accuracy {found:.4f}", flush=True)
        return MetricRecord({"accuracy": found})

    strategy = CFedAvg(FedAvg(fraction_evaluate=0.0), out=settings["out"] or None, resume=settings["resume"])
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": settings["learning-rate"]}),
        num_rounds=settings["num-server-rounds"],
        evaluate_fn=evaluate,
    )
