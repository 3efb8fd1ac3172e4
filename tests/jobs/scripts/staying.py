"""A rank of tests/jobs/test_run.py that has a child and does not end by itself; a `deaf` one does not end when asked,
either. Does not use ronde."""

from __future__ import annotations

import signal
import subprocess
import sys

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    if sys.argv[1] == "deaf":
        for number in REQUESTS:
            signal.signal(number, signal.SIG_IGN)  # and so does the child
    subprocess.Popen(["sleep", "1000"])
    print("ready", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
