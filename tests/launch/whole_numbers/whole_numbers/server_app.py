"""The server: the model gains the sum of what the clients have sent."""

from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from cfedavg.flower import CFedAvg
from whole_numbers import MODEL

app = ServerApp()


class Summing(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        self.now = {name: array.numpy() for name, array in arrays.items()}
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        made = {name: array.copy() for name, array in self.now.items()}
        for reply in replies:
            for name, array in reply.content["arrays"].items():
                made[name] += array.numpy() - self.now[name]
        return ArrayRecord({name: Array(array) for name, array in made.items()}), None


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    CFedAvg(
        Summing(fraction_evaluate=0.0, min_train_nodes=4, min_available_nodes=4),
        compressor="topk(0.7)",
        compressor_down="topk(0.7)",
        out=config["out"],
        resume=config["resume"],
    ).start(
        grid,
        ArrayRecord({name: Array(array) for name, array in MODEL.items()}),
        num_rounds=config["rounds"],
    )
