"""The client: trains what it is sent on its own images."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from cfedavg.flower import compressed
from quickstart.task import make_model, train, train_data

app = ClientApp(mods=[compressed])


@app.train()
def train_round(message: Message, context: Context) -> Message:
    model, settings = make_model(), context.run_config
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    part, parts = context.node_config["partition-id"], context.node_config["num-partitions"]
    seed = settings["seed"] + message.content["config"]["server-round"]
    data = train_data(part, parts, settings["batch-size"], seed)
    loss = train(model, data, settings["local-epochs"], message.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data.dataset)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
