"""`ronde run`: reads what is asked for, and lets the driver do it. Used by cli/main, and by entry for the list of all
commands.

Nothing heavy is imported before the request is known to be right.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ronde.cli.run.flags import parse_flags
from ronde.errors import RondeError
from ronde.launch.config import Request, make_request

if TYPE_CHECKING:
    from ronde.launch.output.options import Target
    from ronde.launch.output.printer import Printer

__all__ = ["run"]

WRONG_CODE = 2
INTERRUPTED_CODE = 130


def run(arguments: Sequence[str]) -> int:
    """Carry out `ronde run ARGUMENTS`: the exit code for the shell."""
    try:
        request = make_request(*parse_flags(arguments))
        return _carry_out(request)
    except (RondeError, ValueError, OSError) as error:
        _say(f"ronde run: {' '.join(str(error).split())}")
        return WRONG_CODE
    except KeyboardInterrupt:  # before the driver hears signals, or while a reader that has stopped is waited for
        return INTERRUPTED_CODE


def _carry_out(request: Request) -> int:
    from ronde.launch.driver import Driver
    from ronde.launch.output.options import Target

    with ExitStack() as opened:
        target = Target(sys.stdout.buffer, sys.stderr.buffer)
        if request.top:
            if not sys.stderr.isatty():
                raise ValueError("--top needs a terminal; `ronde top` can look at the job from one")
            from ronde.cli.run.live import LiveTable

            nowhere = opened.enter_context(open(os.devnull, "wb"))  # noqa: PTH123  # a device
            target = Target(nowhere, nowhere)
            opened.enter_context(LiveTable(request.job.name or str(os.getpid())))
        screen = opened.enter_context(contextlib.closing(_make_printer(request, target)))
        outcome = Driver(request.job, screen).run()
    if outcome.summary and (outcome.stop is None or _is_read(sys.stderr.fileno())):
        _say(outcome.summary)
    return outcome.code


def _make_printer(request: Request, target: Target) -> Printer:
    from ronde.launch.output.options import Place, PrintOptions
    from ronde.launch.output.printer import Printer

    place = Place.of(target)
    options = PrintOptions(
        fold=request.fold,
        timestamps=request.timestamps,
        color=request.color and (place.out_terminal or place.err_terminal),
        folder=request.output,
        place=place,
        raw_rank=request.job.debug_rank,
    )
    return Printer(target, num_ranks=request.job.num_ranks, options=options)


def _is_read(fd: int) -> bool:
    """Whether it takes a few lines now."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # who does not read it does not need it
        print(text, file=sys.stderr, flush=True)
