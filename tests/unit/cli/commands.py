"""Calling commands of `ronde` in this process, and what they draw. Shared by the tests of the command line."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from rich.console import Console, RenderableType

from ronde.cli.main import main


class Finished(NamedTuple):
    exit_code: object
    out: str
    err: str


def ronde(*arguments: str) -> Finished:
    """Call `ronde ARGUMENTS`: its exit code and its output, as text."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exit_code: object = main(arguments)
        except SystemExit as exited:
            exit_code = exited.code
    out.seek(0)
    err.seek(0)
    return Finished(exit_code, out.read(), err.read())


def drawn(renderable: RenderableType, width: int) -> str:
    """What a terminal of this width shows of it."""
    file = io.StringIO()
    Console(file=file, width=width).print(renderable)
    return file.getvalue()
