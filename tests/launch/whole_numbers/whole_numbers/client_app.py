"""The client. A mod around ours loses some replies: Flower then also takes back the node's Context.state."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from cfedavg.flower import compressed
from whole_numbers import is_lost, numbers


def lose(message: Message, context: Context, call_next) -> Message:
    reply = call_next(message, context)
    config = message.content.config_records.get("config")
    if config and is_lost(context.node_config["partition-id"], config["server-round"]):
        raise RuntimeError("this reply gets lost")
    return reply


app = ClientApp(mods=[lose, compressed])


@app.train()
def train(message: Message, context: Context) -> Message:
    partition, server_round = context.node_config["partition-id"], message.content["config"]["server-round"]
    added = numbers(context.run_config["seed"], partition, server_round)
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    arrays = ArrayRecord({name: Array(array + added[name]) for name, array in model.items()})
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
