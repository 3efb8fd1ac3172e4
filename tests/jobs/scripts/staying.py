"""A rank of tests/jobs/test_run.py that has a child and does not end by itself; a `deaf` one does not end when asked,
either. With a folder as second argument it makes a file there, named by its rank, when it is ready. Does not use
ronde."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    if sys.argv[1] == "deaf":
        for number in REQUESTS:
            signal.signal(number, signal.SIG_IGN)  # and so does the child
    subprocess.Popen(["sleep", "1000"])
    print("ready", flush=True)
    if len(sys.argv) > 2:
        Path(sys.argv[2], os.environ["RANK"]).touch()
    signal.pause()


if __name__ == "__main__":
    main()
