"""Compression on the wire: gradients and parameters travel as numbers of 16 bits, and are trained as what they are.

A worker rounds its gradients once. Both replicas of a part get the same bits, and so come to the same values. Servers
round what they send to workers, and keep the exact values.
"""

from __future__ import annotations

import numpy as np

from ronde.ps.partition import Array

CODECS = ("none", "float16", "bfloat16")


def check_codec(codec: str | None) -> str:
    """The codec that a caller means."""
    name = "none" if codec is None else codec
    if name not in CODECS:
        raise ValueError(f"compression must be one of {', '.join(CODECS)}, got {codec!r}")
    return name


def encode_values(values: Array, codec: str) -> Array:
    """What travels. Numbers of bfloat16 are the upper halves of those of float32, as uint16."""
    if codec == "none":
        return values
    if codec == "float16":
        with np.errstate(over="ignore"):  # what is too large becomes infinity, as with every other codec
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def decode_values(encoded: Array, dtype: str) -> Array:
    """What encode_values() was given, rounded."""
    if encoded.dtype == np.uint16:
        encoded = (encoded.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return encoded.astype(dtype, copy=False)
