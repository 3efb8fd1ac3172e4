"""The console script `ronde`. Makes sure of its standard streams, and decides which way to go: `ronde run` has to start
quickly and reads its flags itself; everything else is in commands."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["main"]


def main() -> None:
    """The console script."""
    _secure_streams()
    if sys.argv[1:2] == ["run"]:
        from ronde.cli.run import run

        sys.exit(run(sys.argv[2:]))
    from ronde.cli.commands import app

    app()


def _secure_streams() -> None:
    """No command fails over them: one that is closed (`>&-`) leads nowhere, and a character that the encoding of
    standard output does not have is shown as `?`. (Standard error escapes it.)"""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The closed descriptor is the lowest free one: so no file gets its number, to be written to by mistake.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123  # a device, for good
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
