"""Checksums of samples: CRC-32 for our shards and the cache, CRC-32C for TFRecord.

Every sample is checked when it is read, so they are computed by instructions of the processor where isal and
google-crc32c are installed, as `ronde[data]` does it: for an image of 20 KB that takes 0.5 and 1 microseconds. Without
them zlib takes ten times as long, and NumPy a thousand times. The numbers are the same.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from ronde.comm.buffers import Array

LANE_BYTES = 64
CASTAGNOLI = 0x82F63B78


def crc32c_by_numpy(data: bytes) -> int:
    """CRC-32C: the data are cut into lanes, the CRCs of all lanes are computed at a time, and combined.

    Zeros in front of the data do not change a CRC that begins with 0, so the first lane is filled with them; to begin
    with ones instead is to invert the first four bytes.
    """
    if len(data) < 4 * LANE_BYTES:
        crc = 0xFFFFFFFF
        table = _byte_table_list()
        for byte in data:
            crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
        return crc ^ 0xFFFFFFFF
    padding = -len(data) % LANE_BYTES
    filled = np.zeros(padding + len(data), np.uint8)
    filled[padding:] = np.frombuffer(data, np.uint8)
    filled[padding : padding + 4] ^= 0xFF
    words = filled.view("<u4").reshape(-1, LANE_BYTES // 4)
    tables = _word_tables()
    crcs = np.zeros(len(words), np.uint32)
    for column in np.ascontiguousarray(words.T):
        mixed = crcs ^ column
        crcs = tables[3][mixed & 255] ^ tables[2][(mixed >> 8) & 255] ^ tables[1][(mixed >> 16) & 255]
        crcs ^= tables[0][mixed >> 24]
    level = 0
    while len(crcs) > 1:
        if len(crcs) % 2:
            crcs = np.concatenate([np.zeros(1, np.uint32), crcs])
        crcs = _apply(_shift(level), crcs[::2]) ^ crcs[1::2]
        level += 1
    return int(crcs[0]) ^ 0xFFFFFFFF


@functools.cache
def _byte_table() -> Array:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(CASTAGNOLI), table >> 1)
    return table


@functools.cache
def _byte_table_list() -> Sequence[int]:
    numbers: list[int] = _byte_table().tolist()
    return numbers


@functools.cache
def _word_tables() -> tuple[Array, ...]:
    """tables[k][b] is the CRC of the byte b with k zeros behind it."""
    tables = [_byte_table()]
    for _ in range(3):
        tables.append(_byte_table()[tables[-1] & 255] ^ (tables[-1] >> 8))
    return tuple(tables)


@functools.cache
def _shift(level: int) -> Array:
    """What LANE_BYTES * 2**level zeros behind the data do to each bit of a CRC."""
    if level:
        return _apply(_shift(level - 1), _shift(level - 1))
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(LANE_BYTES):
        bits = _byte_table()[bits & 255] ^ (bits >> 8)
    return bits


def _apply(columns: Array, crcs: Array) -> Array:
    result = np.zeros_like(crcs)
    for bit, column in enumerate(columns):
        result ^= np.where((crcs >> np.uint32(bit)) & 1, column, np.uint32(0))
    return result


# --- which of them are used ----------------------------------------------------------------------------------------


def _find_crc32() -> Callable[..., int]:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    fast: Callable[..., int] = isal_zlib.crc32
    return fast


def _find_crc32c() -> Callable[[bytes], int]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it was not compiled, and is slower than NumPy
            import google_crc32c
    except ImportError:
        return crc32c_by_numpy
    fast: Callable[[bytes], int] = google_crc32c.value
    return fast if google_crc32c.implementation == "c" else crc32c_by_numpy


crc32 = _find_crc32()
"""CRC-32 of bytes; with a second argument, of what had that CRC-32 followed by these bytes."""
crc32c = _find_crc32c()


def masked_crc32c(data: bytes) -> int:
    """The checksum of TFRecord."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
