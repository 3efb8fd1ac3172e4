"""A rank of tests/jobs/test_run_security.py: logs all there is to log, and takes the steps of scripts/strangers until
the test says stop."""

from __future__ import annotations

import logging
import os

import ronde
from ronde.settings import Settings
from tests.jobs.scripts.control import ControlSocket
from tests.jobs.scripts.strangers import step


def main() -> None:
    logging.basicConfig(level=logging.DEBUG)
    logging.debug("these are the settings: %s", Settings.load({}, os.environ))
    with ControlSocket() as test:
        ronde.init()
        stop = test.next_message()
        test.send("open")
        while not step(stop):
            pass
        ronde.shutdown()
        test.send("over")


if __name__ == "__main__":
    main()
