"""A server process of a job: `python -m ronde.ps.server_process`, which `ronde run --servers` starts beside the ranks.

It is a server of every parameter server that the workers make, and ends when it is told to (SIGTERM): `ronde run` does
so when the last rank has ended. It imports no ML framework, and runs nothing of the user's script but an optimizer of
the user's own.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from ronde.ps.server_rounds import ServerRounds
from ronde.settings import Settings

CHECK_S = 0.2
"""How often it looks whether it can go on, and lets Python run signal handlers."""


def main() -> str | None:
    """Serve until it is told to end. Return why it cannot, if that is so."""
    settings = Settings.load({})
    if not settings.server_coordinator or settings.worker < 0:
        return "this is a part of `ronde run --servers`, and is not to be started by itself"
    is_told_to_end = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        is_told_to_end.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    rounds = ServerRounds(settings, settings.worker, is_server_process=True)
    rounds.start()
    while not is_told_to_end.wait(CHECK_S) and rounds.error is None:
        pass
    if rounds.error is not None and not is_told_to_end.is_set():
        return f"this server cannot go on: {rounds.error}"
    rounds.stop()
    return None


if __name__ == "__main__":
    sys.exit(main())
