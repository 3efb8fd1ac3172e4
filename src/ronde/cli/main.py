"""The console script `ronde`. Decides only which way to go: `ronde run` has to start quickly and reads its flags
itself; everything else is in commands."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The console script."""
    if sys.argv[1:2] == ["run"]:
        from ronde.cli.run.command import run

        sys.exit(run(sys.argv[2:]))
    from ronde.cli.commands import app

    app()


if __name__ == "__main__":
    main()
