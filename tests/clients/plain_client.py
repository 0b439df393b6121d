"""A client of a Flower federation on the C library, written from docs/wire.md and docs/envelope.md alone.

It sends the largest numbers of its update as bf16 or fp32. Of the package it uses types alone. Its state is
in memory; a real client stores it in one step before it replies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict

from cfedavg import Layout, Payload
from cfedavg.core.payload import Floats
from tests import plain_envelope as plain
from tests.clients import library as lib

REFUSED, FORGED, OTHER_VERSION, NEED_WHOLE = 1001, 1009, 1010, 1011
Arrays = dict[str, np.ndarray]
Train = Callable[[Arrays, Message], Arrays]


@dataclass(frozen=True)
class State:
    incarnation: int
    e: np.ndarray
    sent: dict[str, Any] | None = None
    newest: tuple[int, int] = (0, 0)
    agreed: dict[int, int] = field(default_factory=dict)
    copy: tuple[plain.Version, np.ndarray] | None = None


class Refusal(Exception):
    """The error that the client replies with."""


class PlainClient:
    """`train` is the app: it returns the trained arrays."""

    def __init__(self, train: Train) -> None:
        self.train, self.started = train, 0
        self.kinds: list[int] = []  # of the broadcasts that it has followed
        self.state: State | None = None

    def answer(self, request: Message) -> Message:
        order = dict(request.content.config_records["cfedavg"])
        try:
            if order.keys() != plain.REQUEST:
                raise Refusal(OTHER_VERSION)
            sent = self._answer(order, request)
        except Refusal as refusal:
            return Message(Error(int(str(refusal)), "refused"), reply_to=request)
        return Message(RecordDict({"cfedavg": ConfigRecord(sent)}), reply_to=request)

    def _answer(self, order: dict[str, Any], request: Message) -> dict[str, Any]:
        form = plain.read_form(order["form"])
        names, shapes, dtypes = form.tensors
        layout = Layout(tuple(names), tuple(map(tuple, shapes)), tuple(dtypes))
        data = order["body"] or request.content.array_records[order["arrays"]]["body"].numpy().tobytes()
        data, apart = plain.read_body(data)
        broadcast = plain.read_broadcast(data) if order["copy"] else None
        state, stamp = self.state or self._fresh(layout), (order["generation"], order["stamp"])
        if not (min(stamp) >= 1 and max(stamp) < 2**32 and stamp[0] <= time.time() + 172_800):
            raise Refusal(FORGED)
        if state.sent and stamp == tuple(state.sent["stamp"]):
            return state.sent
        if stamp <= state.newest:
            raise Refusal(REFUSED)
        if broadcast:
            now = broadcast.version[:2]
            if now != (stamp[0], order["t"]) or (state.copy and now < state.copy[0][:2]):
                raise Refusal(REFUSED)
        if is_outdated(state, order["mark"]):
            state = self._fresh(layout, state.copy)
        state = self._begin(state, order, broadcast, layout)
        x = np.frombuffer(data, "<f4") if state.copy is None else numbers_of(state.copy[1])
        g, uncompressed = self._train(order, form, x, apart, request)
        return self._send(state, order, layout, g, uncompressed)

    def _fresh(self, layout: Layout, copy: Any = None) -> State:
        self.started += 1
        return State(self.started, np.zeros(layout.d, np.float32), copy=copy)

    def _begin(
        self, state: State, order: dict[str, Any], broadcast: plain.Broadcast | None, layout: Layout
    ) -> State:
        """Steps 5 to 7: the copy, the last reply, `agreed`."""
        copy = follow(state.copy, broadcast, order["copy"], layout) if broadcast else None
        self.kinds += [broadcast.kind] if broadcast else []
        e, agreed, mark = state.e, dict(state.agreed), order["mark"]
        if state.sent:
            if mark != plain.mark(state.sent):
                payload, *_ = plain.read_update(state.sent["message"], layout.d, state.sent["uncompressed"])
                e = e + dense(lib.decode(payload, layout))
            if mark[:2] == state.sent["stamp"]:
                agreed[mark[0]] = mark[1]
        agreed[order["generation"]] = order["stamp"] - 1
        return replace(state, e=e, agreed=agreed, copy=copy, sent=None)

    def _train(
        self, order: dict[str, Any], form: plain.Form, x: np.ndarray, apart: bytes, request: Message
    ) -> tuple[np.ndarray, bytes]:
        """Step 8: the update, and the uncompressed arrays as bytes."""
        arrays, at, start = dict[str, np.ndarray](), 0, 0
        for name, shape, dtype, yes in zip(*form.__dict__.values(), strict=True):
            n = math.prod(shape)
            if yes:
                arrays[name], at = x[at : at + n].reshape(shape), at + n
                continue
            short = order["copy"] == "int16" and dtype == "float32" and name.endswith(plain.STATISTICS)
            found = np.frombuffer(apart, np.int16 if short else dtype, n, start)
            start += found.nbytes
            arrays[name] = (numbers_of(found) if short else found).reshape(shape)
        trained, g, uncompressed = self.train(arrays, request), [], b""
        short = "bf16" in order["compressor"]
        for name, dtype, yes in zip(form.names, form.dtypes, form.compressed, strict=True):
            array = trained[name].astype(dtype)
            if yes:
                g.append((array - arrays[name]).reshape(-1))
            elif short and dtype == "float32" and name.endswith(plain.STATISTICS):
                uncompressed += lib.to_bf16(array.reshape(-1)).tobytes()
            else:
                uncompressed += array.tobytes()
        return np.concatenate(g), uncompressed

    def _send(
        self, state: State, order: dict[str, Any], layout: Layout, g: np.ndarray, uncompressed: bytes
    ) -> dict[str, Any]:
        """Steps 9 and 10: compress, store, reply."""
        p = g + state.e
        comp = float(order["compressor"].split("topk(")[1].split(")")[0])
        indices = lib.find_largest(p, max(1, round((1 - comp) * layout.d)))
        values = Floats(p[indices], "fp32")
        if "bf16" in order["compressor"]:
            values = Floats(lib.to_bf16(p[indices]), "bf16")
        payload = Payload(layout.d, np.array([0, len(indices)]), indices, values)
        sequence = order["generation"] << 32 | order["stamp"]
        data = lib.encode(payload, layout, client=order["number"], sequence=sequence, round=order["t"])
        left = p - dense(payload)
        facts = {
            "metrics": {"metrics": {"num-examples": 10}},
            "noise2": float((left.astype(float) ** 2).sum()),
        }
        message = plain.write_update(data, facts, uncompressed)
        sent = plain.reply(order["generation"], order["stamp"], state.incarnation, message)
        newest = order["generation"], order["stamp"]
        kept = {**sent, "uncompressed": len(uncompressed)}
        self.state = replace(state, e=left, sent=kept, newest=newest)
        return sent


def is_outdated(state: State, mark: list[int]) -> bool:
    """Step 4."""
    if not mark or state.newest == (0, 0):
        return False
    if state.sent and mark[:2] == state.sent["stamp"]:
        return mark[2] == state.incarnation and mark[3] != plain.digest(state.sent["message"])
    return mark[0] >= min(state.agreed) and mark[1] > state.agreed.get(mark[0], 0)


def follow(copy: Any, broadcast: plain.Broadcast, dtype: str, layout: Layout) -> Any:
    """Return the version and the copy after the broadcast."""
    if copy and copy[0] == broadcast.version:
        return copy
    if broadcast.kind == plain.WHOLE:
        w = lib.decode(broadcast.messages[0], layout).values.data.copy()
    elif copy is None:
        raise Refusal(NEED_WHOLE)
    elif broadcast.kind == plain.CHAIN:
        missed = plain.missed_messages(copy[0], broadcast)
        if missed is None:
            raise Refusal(NEED_WHOLE)
        w = copy[1]
        for message in missed:
            w = lib.receive(w, message, layout)
        return broadcast.version, w
    elif copy[0] not in broadcast.earlier:
        raise Refusal(NEED_WHOLE)
    else:
        changes, w = lib.decode(broadcast.messages[0], layout), copy[1].copy()
        w[changes.indices] = changes.values.data
    assert w.dtype == dtype
    if plain.digest(w.tobytes()) != broadcast.digest:
        raise Refusal(NEED_WHOLE)
    return broadcast.version, w


def numbers_of(w: np.ndarray) -> np.ndarray:
    """Return the fp32 numbers of a copy, or of bf16 bits."""
    return w if w.dtype == np.float32 else (w.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def dense(payload: Payload) -> np.ndarray:
    """Return the vector that a payload of floats means."""
    assert isinstance(payload.values, Floats)
    p = np.zeros(payload.d, np.float32)
    p[payload.indices] = numbers_of(payload.values.data)
    return p
