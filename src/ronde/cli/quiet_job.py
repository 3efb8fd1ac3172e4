"""A job that runs in the background and prints nothing. `ronde bench` and `ronde doctor` start their ranks with it."""

from __future__ import annotations

import os
import threading
from contextlib import closing

from ronde.launch.driver.driver import Driver, JobResult
from ronde.launch.job import Job
from ronde.launch.output.printer import OutputOptions, Printer
from ronde.launch.output.terminal import StandardStreams
from ronde.types import Deadline


class QuietJob:
    """A job that starts at once. The output of its ranks is shown nowhere; the summary of a failure quotes the end of
    it. As a context, it ends with the block."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._result: JobResult | None = None
        self._error: BaseException | None = None
        self._driver: Driver | None = None
        self._started = threading.Event()
        # Owned by the job. Runs its driver, and sets the result or the error as the last thing.
        self._thread = threading.Thread(target=self._run_driver, name="ronde-driver", daemon=True)
        self._thread.start()
        self._started.wait()

    def wait(self, deadline: Deadline | None = None) -> JobResult | None:
        """The result, as soon as all ranks have ended; None at the deadline. Raises what kept the driver from running
        the job."""
        self._thread.join(None if deadline is None else deadline.remaining_s)
        if self._error is not None:
            raise self._error
        return self._result

    def stop(self, reason: str) -> None:
        """End the ranks: SIGTERM, then SIGKILL. Does not wait for them."""
        if self._driver is not None:
            self._driver.stop(reason)

    def close(self) -> None:
        """End the ranks, and wait until they have ended. Idempotent."""
        self.stop("it is not needed any more")
        self._thread.join()

    def __enter__(self) -> QuietJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_driver(self) -> None:
        try:
            with (
                open(os.devnull, "wb") as discard,  # noqa: PTH123  # a device
                closing(
                    Printer(
                        StandardStreams(discard, discard),
                        num_ranks=self._job.num_ranks,
                        options=OutputOptions(fold=False),
                    )
                ) as printer,
            ):
                self._driver = Driver(self._job, printer)
                self._started.set()
                self._result = self._driver.run()
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()
