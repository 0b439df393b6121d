"""NNCodec 2.1.3 (ISO/IEC 15938-17) as a lossless coder of levels, and its parts that a federation needs.

Importing this module imports NNCodec. Its wheel of torchvision is a build for CUDA, whose operators do not
load beside the CPU build of torch; NNCodec calls none of them, but importing torchvision needs two by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

_NAMES = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _NAMES.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from nncodec import nnc  # noqa: E402 (the names come first)
from nncodec.extensions import deepCABAC  # noqa: E402
from nncodec.nnc_core.hdsp.hdsp_tool import HDSP_OPTS_OFF  # noqa: E402

Levels = dict[str, np.ndarray]  # int32, by the names of tensors


class Settings(NamedTuple):
    """What may change the bytes of integer tensors without a history.

    `unary` is the number of magnitudes that have a bit of their own, less 1. `transposed` is ours: matrices
    are handed over with their axes swapped.
    """

    row_skipping: bool
    param_opt: bool
    unary: int
    transposed: bool


DEFAULT = Settings(row_skipping=True, param_opt=True, unary=10, transposed=False)


def all_settings() -> Iterator[Settings]:
    """Yield the settings to choose from. Other scan orders than 0 were longer by 3% to 15% in trials."""
    yield from itertools.starmap(
        Settings, itertools.product((True, False), (True, False), (0, 1, 10), (False, True))
    )


def arrange(levels: np.ndarray, shapes: dict[str, tuple[int, ...]], settings: Settings) -> Levels:
    """Return a flat vector of levels as the tensors that NNCodec codes."""
    tensors, start = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensor = levels[start : start + size].reshape(shape)
        if settings.transposed and tensor.ndim > 1:
            tensor = tensor.reshape(len(tensor), -1).T
        tensors[name], start = np.ascontiguousarray(tensor, np.int32), start + size
    return tensors


def restore(tensors: Levels, shapes: dict[str, tuple[int, ...]], settings: Settings) -> np.ndarray:
    """Return the flat vector that `arrange` was given."""
    turned = settings.transposed
    return np.concatenate([
        (tensors[name].T if turned and len(shape) > 1 else tensors[name]).reshape(-1)
        for name, shape in shapes.items()
    ])  # fmt: skip


def encode(tensors: Levels, settings: Settings) -> bytearray:
    """Return NNCodec's bitstream of integer tensors, which it does not quantise."""
    stream: bytearray = nnc.compress(
        tensors, bitstream_path=None, return_bitstream=True, row_skipping=settings.row_skipping,
        param_opt=settings.param_opt, cabac_unary_length_minus1=settings.unary,
    )  # fmt: skip
    return stream


def decode(stream: bytearray) -> Levels:
    """Return the tensors of a bitstream."""
    tensors: Levels = nnc.decompress(stream)
    return tensors


def encode_bare(tensors: Levels, settings: Settings) -> list[np.ndarray]:
    """Run NNCodec's arithmetic coder in C++ alone: no headers, no entry points, no checks in Python."""
    streams = []
    for tensor in tensors.values():
        coder = deepCABAC.Encoder()
        coder.initCtxModels(settings.unary + 1, settings.param_opt)
        rows = tensor.reshape(len(tensor), -1)
        skipped = (~rows.any(1)).astype(np.int32) if tensor.ndim > 1 else np.zeros(len(tensor), np.int32)
        options: tuple[Any, ...] = (*HDSP_OPTS_OFF(), 0, 0)
        coder.encodeLayer(tensor, 0, 0, 1, 0, int(settings.row_skipping), skipped, *options)
        streams.append(coder.finish())
    return streams
