"""Checksums: all ways to compute them give the same numbers."""

from __future__ import annotations

import subprocess
import sys
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.data.checksums import crc32, crc32c, crc32c_by_numpy, masked_crc32c
from tests.limits import PATIENCE_S

BYTES = bytes(range(256)) * 40
WITHOUT_LIBRARIES = """
import sys, warnings, zlib
sys.modules["isal"] = sys.modules["google_crc32c"] = None
from ronde.data import checksums, shards
assert checksums.crc32 is zlib.crc32 and checksums.crc32c is checksums.crc32c_by_numpy
print(checksums.crc32(b"abc" * 999), checksums.masked_crc32c(b"abc" * 999))
"""


@given(st.binary(max_size=3000), st.integers(0, 300), st.integers(0, 9999), st.integers(0, (1 << 32) - 1))
@settings(deadline=None)
def test_crc_32_is_that_of_zlib_at_any_offset_and_length(data: bytes, start: int, length: int, before: int) -> None:
    for each in (data, BYTES[start : start + length], memoryview(BYTES)[start : start + length]):
        assert crc32(each) == zlib.crc32(each)
        assert crc32(each, before) == zlib.crc32(each, before)


@given(st.binary(max_size=1500))
@settings(deadline=None)
def test_crc_32c_is_that_of_its_polynomial(data: bytes) -> None:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc32c_by_numpy(data) == crc ^ 0xFFFFFFFF


def test_a_checksum_of_tensorflow_for_a_long_record() -> None:
    assert masked_crc32c(b"x" * 1000).to_bytes(4, "little").hex() == "baad154c"


@pytest.mark.slow
def test_without_the_libraries_the_checksums_are_the_same() -> None:
    command = [sys.executable, "-c", WITHOUT_LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split() == [str(crc32(b"abc" * 999)), str(masked_crc32c(b"abc" * 999))]
