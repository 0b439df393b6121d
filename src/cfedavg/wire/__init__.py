"""The wire format, without torch: `encode` turns payloads into bytes, `decode` restores them bit for bit."""

from cfedavg.wire.format import (
    compile_coders,
    decode,
    encode,
    measure,
    needs_compiling,
    plain_length,
)  # fmt: skip
from cfedavg.wire.frame import Header, WireError, read_header

__all__ = [
    "Header", "WireError", "compile_coders", "decode", "encode", "measure", "needs_compiling",
    "plain_length", "read_header",
]  # fmt: skip
