"""The wire format, without torch: `encode` turns payloads into bytes, `decode` restores them bit for bit."""

from cfedavg.wire.format import (
    can_prepare,
    compile_coders,
    decode,
    encode,
    is_ready,
    measure,
    plain_length,
)  # fmt: skip
from cfedavg.wire.frame import Header, WireError, read_header

__all__ = [
    "Header", "WireError", "can_prepare", "compile_coders", "decode", "encode", "is_ready", "measure",
    "plain_length", "read_header",
]  # fmt: skip
