"""Payload <-> bytes. Lossless: decode(encode(payload)) is the payload, bit for bit. No torch here."""

from cfedavg.wire.format import WireError, decode, encode

__all__ = ["WireError", "decode", "encode"]
