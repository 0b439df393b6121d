"""A strategy that CFedAvg wraps: its average, its evaluation by clients, and its memory between rounds.

The memory is, for example, FedAdam's moments or an adaptive clipping norm. Flower has no interface for it. So
this module stores the attributes that have changed since the start of the server: numbers, texts and arrays
of numbers, also in lists, tuples and dicts. Other attributes, such as a generator of random numbers, are not
stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from logging import WARNING
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from cfedavg.compress import decompress
from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.run_files import Record
from cfedavg.core.tensors import UNREADABLE
from cfedavg.federate.protocol import Version
from cfedavg.flower.array_layout import Form
from cfedavg.flower.federation_state import FederationState, Node, StrategyMemory
from cfedavg.flower.replies import OURS, SAMPLES, TakenReply, check_metrics, shorten_reason
from cfedavg.flower.requests import Dispatcher, make_record
from cfedavg.flower.rounds import Loads, Round, describe_kind, find_odd_ones, make_columns
from cfedavg.wire import WireError

_NUMBERS = [np.dtype(kind) for kind in "?bBhHiIqQefd"]  # the dtypes that a tensor file can hold


class WrappedStrategy:
    """A strategy of Flower's or a user's own, which CFedAvg calls with uncompressed models and metrics."""

    def __init__(self, inner: Strategy, form: Form, result: Result, memory: StrategyMemory | None) -> None:
        """Set the attributes of `inner` that `memory` holds; raise InputError if they do not fit `inner`."""
        self.inner, self.form, self.result = inner, form, result
        self._at_first = read_attributes(inner)
        if memory is not None:
            restore_memory(inner, memory)

    def read_memory(self) -> StrategyMemory:
        """Return the strategy's attributes whose values have changed since the start of the server."""
        memory = StrategyMemory({}, {})
        for path, value in read_attributes(self.inner).items():
            if value and not value.equals(self._at_first.get(path)):
                memory.codes[path] = value.code
                memory.arrays.update(value.arrays)
        return memory

    def leave_out_odd_ones(self, now: Round) -> None:
        """Reject the replies that the strategy cannot average with the others."""
        kinds = {who: describe_kind(each.metrics, each.arrays) for who, each in now.taken.items()}
        for who, why in find_odd_ones(kinds, now.server_round).items():
            now.leave_out(who, "metrics", why)

    def average(self, now: Round, x: NDArray[np.float32]) -> tuple[NDArray[np.float32], bytes] | None:
        """Let the strategy average the replies; return the next x and the next uncompressed arrays.

        If the strategy fails or makes NaN or Inf, undo its changes, make the round void, and return None.
        """
        before = read_attributes(self.inner)
        pairs = zip(now.in_order, now.claims.samples, strict=True)
        made = self._aggregate(now, [self._restore_reply(*pair, now, x) for pair in pairs])
        if made and (path := find_spoilt(self.inner, before)):
            now.make_void(f"the inner strategy would remember NaN or Inf, in {path!r}")
            made = None
        if made is None:  # undo what the strategy learnt in a void round
            roll_back(self.inner, before)
        return made

    def _aggregate(self, now: Round, replies: list[Message]) -> tuple[NDArray[np.float32], bytes] | None:
        try:
            arrays, metrics = self.inner.aggregate_train(now.server_round, replies)
        except Exception as error:  # a retry would get the same replies and fail again
            now.make_void(f"the inner strategy failed: {summarise_error(error)}")
            return None
        if metrics is not None:
            self.result.train_metrics_clientapp[now.server_round] = metrics
        if arrays is None:
            now.make_void(f"the inner strategy made no model of {len(replies)} replies")
            return None
        found = {name: array.numpy() for name, array in arrays.items()}
        if wrong := self.form.difference(found, kinds=False):
            raise InputError(f"the inner strategy must return the same arrays as the model: {wrong}")
        made = self.form.split(found)
        if why := self.form.find_fault_in_model(*made):
            now.make_void(why)
            return None
        return made

    def _restore_reply(
        self, taken: TakenReply, samples: float, now: Round, x: NDArray[np.float32]
    ) -> Message:
        """Return the reply that a client without the mod would have sent, with the whole trained model.

        A strategy may weight replies by their numbers of examples. So the number in each record is capped at
        `samples`.
        """
        model = make_record(self.form.join(x + decompress(taken.payload)[0], taken.uncompressed))
        records = {}
        for name, record in taken.metrics.items():
            claim = record.get(SAMPLES, 0)
            if isinstance(claim, int | float) and claim > samples:
                capped = int(samples) if isinstance(claim, int) else samples
                record = MetricRecord({**record, SAMPLES: capped})
            records[name] = record
        content = RecordDict({**records, taken.arrays: model})
        return Message(content, reply_to=now.requests[taken.node.id])

    def evaluate(
        self,
        now: Round,
        arrays: ArrayRecord,
        config: ConfigRecord,
        dispatcher: Dispatcher,
        state: FederationState,
    ) -> Record:
        """Let clients that the strategy chooses evaluate `arrays`; return the metrics as columns of a row."""
        loads = Loads(self.form, dispatcher.replica, state)
        asked = Round(now.server_round, arrays, loads, now.began, now.max_norm, now.compressor)
        wanted = self.inner.configure_evaluate(now.server_round, arrays, config, dispatcher.grid)
        messages = dispatcher.pack(asked, wanted, state)
        replies = list(dispatcher.exchange(asked, messages, state))
        for node_id, each in asked.downloads.items():
            now.downloads[node_id] = now.downloads.get(node_id, []) + each
        for node, reply in replies:
            if (version := _take_version(reply)) is not None:
                dispatcher.reported[node.identity] = version
        try:
            found = self.inner.aggregate_evaluate(now.server_round, _choose_alike(replies, asked))
        except Exception as error:  # the round stays valid
            log(WARNING, "the inner strategy cannot average the evaluations: %s", summarise_error(error))
            return {}
        if found is None:
            return {}
        self.result.evaluate_metrics_clientapp[now.server_round] = found
        return make_columns(found, "client_")


def _take_version(reply: Message) -> Version | None:
    """Remove cfedavg's record from a reply; return the version of the node's model copy in it, or None."""
    if reply.has_error() or OURS not in reply.content:
        return None
    record: Mapping[str, Any] = reply.content.config_records.get(OURS, {})
    del reply.content[OURS]
    match record.get("version"):
        case [int(generation), int(round), int(hash)]:
            return Version(generation, round, hash)
    return None


def _choose_alike(replies: list[tuple[Node, Message]], asked: Round) -> list[Message]:
    """Return the evaluation replies, except those with invalid or unusual metrics; log what is wrong.

    Replies with an error stay. Their reason becomes one printable line, since a strategy may log it as it is.
    """
    wrong, kinds = dict[Node, str](), dict[Node, frozenset[str]]()
    for node, reply in replies:
        try:
            if reply.has_error():
                raise WireError(shorten_reason(reply.error.reason) or "the node failed without a reason")
            check_metrics(reply.content.metric_records)
            kinds[node] = describe_kind(reply.content.metric_records)
        except WireError as error:
            wrong[node] = str(error)
    wrong |= find_odd_ones(kinds, asked.server_round)
    for node, why in wrong.items():
        log(WARNING, "%s: left out of the evaluation (%s)", node.name, why)
    found = []
    for node, reply in replies:
        if reply.has_error():
            shortened = Error(reply.error.code, shorten_reason(reply.error.reason))
            found.append(Message(shortened, reply_to=asked.requests[node.id]))
        elif node not in wrong:
            found.append(reply)
    return found


class Value(NamedTuple):
    """The value of an attribute, as JSON in `code`. An index in `code` stands for each array of the value.

    `arrays`: these arrays by attribute path and index, such as `moments/0`.
    """

    code: Any
    arrays: dict[str, NDArray[Any]]

    def equals(self, other: Value | None) -> bool:
        """Return whether both values are equal; NaN equals NaN."""
        if other is None or repr(self.code) != repr(other.code) or self.arrays.keys() != other.arrays.keys():
            return False
        pairs = ((array, other.arrays[name]) for name, array in self.arrays.items())
        return all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True) for a, b in pairs)

    @property
    def is_finite(self) -> bool:
        """Whether the value is not NaN or Inf, and its arrays hold no NaN or Inf."""
        if isinstance(self.code, float) and not math.isfinite(self.code):
            return False
        return all(bool(np.isfinite(each).all()) for each in self.arrays.values())


Attributes = dict[str, Value | None]


def name_strategy(strategy: Strategy) -> str:
    """Return the class names of a strategy and the strategies within it, such as `Clipping(FedAdam)`."""
    within = [type(each).__name__ for path, each in _find_strategies(strategy).items() if path]
    return type(strategy).__name__ + (f"({', '.join(within)})" if within else "")


def _find_strategies(strategy: Strategy) -> dict[str, Strategy]:
    """Return the strategy and the strategies in its attributes, by attribute path, each strategy once."""
    found, new = dict[str, Strategy](), [("", strategy)]
    while new:
        path, each = new.pop()
        if all(each is not known for known in found.values()):
            found[path] = each
            parts = [(name, part) for name, part in vars(each).items() if isinstance(part, Strategy)]
            new += [(f"{path}{name}.", part) for name, part in reversed(parts)]
    return found


def read_attributes(strategy: Strategy) -> Attributes:
    """Return the values of a strategy's attributes, and of strategies within it, by attribute path.

    A value that cannot be stored is None.
    """
    found: Attributes = {}
    for path, each in _find_strategies(strategy).items():
        for name, value in vars(each).items():
            found[path + name], arrays = None, dict[str, NDArray[Any]]()
            with suppress(TypeError, RecursionError):
                found[path + name] = Value(_encode(value, arrays, path + name), arrays)
    return found


def _encode(value: Any, arrays: dict[str, NDArray[Any]], path: str) -> Any:
    """Return `value` as JSON, and add its arrays to `arrays`; raise TypeError if it cannot be stored."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and value.dtype in _NUMBERS:
        index = len(arrays)
        arrays[f"{path}/{index}"] = np.array(value).view(value.dtype.str)  # turns `ulonglong` into `uint64`
        return {"array": index}
    if isinstance(value, dict):
        return {"dict": [_encode(list(item), arrays, path) for item in value.items()]}
    if type(value) is tuple:
        return {"tuple": _encode(list(value), arrays, path)}
    if isinstance(value, list):
        return [_encode(each, arrays, path) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot store a value of type {type(value).__name__}")


def _decode(code: Any, arrays: dict[str, NDArray[Any]], path: str) -> Any:
    if isinstance(code, list):
        return [_decode(each, arrays, path) for each in code]
    if not isinstance(code, dict):
        return code
    ((kind, held),) = code.items()
    if kind == "array":
        return arrays[f"{path}/{held}"]
    if kind not in ("dict", "tuple") or not isinstance(held, list):
        raise ValueError(f"a JSON object must have the key dict, tuple or array, got {kind!r:.40}")
    parts = _decode(held, arrays, path)
    return dict(parts) if kind == "dict" else tuple(parts)


def find_spoilt(strategy: Strategy, before: Attributes) -> str:
    """Return the path of an attribute that has become NaN or Inf since `before`, or an empty string."""
    for path, value in read_attributes(strategy).items():
        old = before.get(path)
        if value and not value.is_finite and (old is None or old.is_finite):
            return path
    return ""


def roll_back(strategy: Strategy, before: Attributes) -> None:
    """Set the strategy's attributes to their values in `before`, and delete new attributes."""
    now = read_attributes(strategy)
    for path, value in before.items():
        if value and not value.equals(now.get(path)):
            _put(*_find_owner(strategy, path), _decode(value.code, value.arrays, path))
    for path in now.keys() - before.keys():
        delattr(*_find_owner(strategy, path))


def restore_memory(strategy: Strategy, memory: StrategyMemory) -> None:
    """Set the strategy's attributes to `memory`; if one does not fit, raise InputError and set none."""
    found, owners = [], _find_strategies(strategy)
    for path, code in memory.codes.items():
        within, _, name = path.rpartition(".")
        owner = owners.get(within and f"{within}.")
        if owner is None or name.startswith("__") or callable(getattr(owner, name, None)):
            raise InputError(
                f"`inner` must be the federation's strategy, but `inner` has no attribute {path!r:.80}"
            )
        try:
            found.append((owner, name, _decode(code, memory.arrays, path)))
        except UNREADABLE as error:
            raise InputError(
                f"`inner`: the stored value of the attribute {path!r:.80} is damaged ({error!r:.80})"
            ) from None
    for each in found:
        _put(*each)


def _find_owner(strategy: Strategy, path: str) -> tuple[Any, str]:
    *through, name = path.split(".")
    return reduce(getattr, through, strategy), name


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute. If it is a dict, replace only the dict's items, since it may be a defaultdict."""
    old = getattr(owner, name, None)
    if isinstance(old, dict) and isinstance(value, dict):
        old.clear()
        old.update(value)
    else:
        setattr(owner, name, value)
