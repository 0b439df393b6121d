"""Payload <-> bytes. Lossless: decode(encode(payload)) is the payload, bit for bit. No torch here."""

from cfedavg.wire.format import decode, encode, is_ready, measure, plain_length
from cfedavg.wire.header import Header, WireError, read_header

__all__ = ["Header", "WireError", "decode", "encode", "is_ready", "measure", "plain_length", "read_header"]
