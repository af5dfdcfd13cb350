"""Common parts of writer and reader: dtype names, entry names, the raw bytes of a tensor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gossamer.io.gap_code import Bytes

TABLE, GAPS, VALUES = "gossamer.table", "gossamer.gaps", "gossamer.values."
CHUNK = 1 << 18  # elements per chunk

DTYPES: Mapping[str, torch.dtype] = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32},
    **{"I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def raw_bytes(chunk: Tensor) -> Bytes:
    """The memory of a contiguous one-dimensional CPU tensor."""
    if chunk.numel() < 2:  # torch counts any stride as contiguous then, but will not view it as bytes
        chunk = torch.as_strided(chunk, (chunk.numel(),), (1,))
    raw: Bytes = chunk.view(torch.uint8).numpy()
    return raw
