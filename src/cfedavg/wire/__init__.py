"""The wire format, without torch: `encode` turns payloads into bytes, `decode` restores them bit for bit."""

from cfedavg.wire.format import decode, encode, is_ready, measure, plain_length
from cfedavg.wire.header import Header, WireError, read_header

__all__ = ["Header", "WireError", "decode", "encode", "is_ready", "measure", "plain_length", "read_header"]
