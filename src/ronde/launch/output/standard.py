"""This process's own standard streams as a Target, also where they are no files: in a notebook, in a test. Used by
launch/function."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Mapping
from io import RawIOBase
from typing import Any, BinaryIO, cast

from ronde.launch.output.options import Place, PrintOptions, Target

__all__ = ["standard_options", "standard_target"]


def standard_target() -> Target:
    """What sys.stdout and sys.stderr are now."""
    return Target(_binary(sys.stdout), _binary(sys.stderr))


def standard_options(target: Target, environ: Mapping[str, str]) -> PrintOptions:
    """How to print to them."""
    if not all(_is_file(each) for each in target):
        return PrintOptions(place=Place(shared=True))
    place = Place.of(target)
    color = (place.out_terminal or place.err_terminal) and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    return PrintOptions(place=place, color=color)


def _binary(stream: Any) -> BinaryIO:  # a text stream, perhaps a notebook's; None, when it is closed
    if stream is not None:
        stream.flush()  # what was printed before comes before
    return cast("BinaryIO", getattr(stream, "buffer", None) or _TextSink(stream))


def _is_file(file: BinaryIO) -> bool:
    try:
        return file.fileno() >= 0
    except (OSError, ValueError):
        return False


class _TextSink(RawIOBase):
    """Takes bytes for a stream that takes text only."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:  # bytes of any kind
        """All of it."""
        if self._stream is not None:
            self._stream.write(self._decoder.decode(bytes(data)))
        return len(data)

    def flush(self) -> None:
        """What was written."""
        if self._stream is not None:
            self._stream.flush()
