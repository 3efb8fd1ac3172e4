"""Sources of hosts for elastic jobs (launch.driver.host_source.HostSource): a script that prints them, and a hostfile
that is watched. Made by `ronde run` for --discover and --hostfile."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import IO

from ronde.errors import StartFailed
from ronde.exit_codes import describe_exit_code
from ronde.launch.agent.orphans import OrphanKiller
from ronde.launch.placement import Host, parse_host_lines
from ronde.text import shorten

POLL_INTERVAL_S = 1.0
"""How long after an answer a source is asked again."""
SCRIPT_TIMEOUT_S = 30.0
"""How long a script may take to print the hosts."""
MAX_QUOTED_CHARS = 300
"""Of what a script has printed as its error."""


class DiscoveryScript:
    """A command that prints the hosts which the job may use now, one per line: `host` or `host:slots`."""

    def __init__(
        self,
        command: str,
        *,
        slots_per_host: int = 1,
        timeout_s: float = SCRIPT_TIMEOUT_S,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        """The command may have arguments; no shell reads it. ValueError if it cannot be split into words."""
        self._command = command
        self._argv = shlex.split(command)
        if not self._argv:
            raise ValueError("the command that discovers hosts is empty")
        self._slots_per_host = slots_per_host
        self._timeout_s = timeout_s
        self.poll_interval_s: float | None = poll_interval_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orphan_killer: OrphanKiller | None = None
        """Ends the script when this process is killed, and with close() what it has left behind."""
        self._closed = False

    def hosts(self) -> tuple[Host, ...]:
        # Files, not pipes: what the script leaves behind in the background may keep them open.
        with tempfile.TemporaryFile() as printed_file, tempfile.TemporaryFile() as error_file:
            returncode = self._run(printed_file, error_file)
            printed, errors = (_read_text(file) for file in (printed_file, error_file))
        if returncode != 0:
            said = shorten(errors.strip(), MAX_QUOTED_CHARS)
            how = describe_exit_code(returncode)
            raise StartFailed(f"the discovery script {self._command} {how}" + (f": {said}" if said else ""))
        try:
            return parse_host_lines(printed, f"what {self._command} printed", default_slots=self._slots_per_host)
        except ValueError as error:
            raise StartFailed(str(error)) from None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._kill(self._process)
            if self._orphan_killer is not None:
                self._orphan_killer.close()

    def _run(self, printed_file: IO[bytes], error_file: IO[bytes]) -> int:
        """Run the script to its end. Return its exit code."""
        with self._lock:
            if self._closed:
                raise StartFailed(f"{self._command} is not asked any more")
            try:
                self._orphan_killer = self._orphan_killer or OrphanKiller()
                process = self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=printed_file,
                    stderr=error_file,
                    env=self._orphan_killer.environ,
                    start_new_session=True,  # so that all that it starts can be ended
                )
            except OSError as error:
                raise StartFailed(f"the discovery script {self._argv[0]} cannot be started: {error.strerror}") from None
        try:
            return process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            self._kill(process)
            process.wait()
            raise StartFailed(
                f"the discovery script {self._command} did not end within {self._timeout_s:g} s"
            ) from None
        finally:
            with self._lock:
                self._process = None

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the script and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


class WatchedHostfile:
    """A hostfile that is read again and again. A change counts when two readings in a row agree: the file may be
    written just now."""

    def __init__(
        self, path: str | Path, *, slots_per_host: int = 1, poll_interval_s: float | None = POLL_INTERVAL_S
    ) -> None:
        self._path = Path(path)
        self._slots_per_host = slots_per_host
        self.poll_interval_s = poll_interval_s
        self._accepted: tuple[Host, ...] | None = None
        self._last_text = ""

    def hosts(self) -> tuple[Host, ...]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise StartFailed(f"cannot read the hostfile {self._path}: {reason}") from None
        has_changed, self._last_text = text != self._last_text, text
        if has_changed and self._accepted is not None:
            return self._accepted
        try:
            found = parse_host_lines(text, str(self._path), default_slots=self._slots_per_host)
        except ValueError as error:
            raise StartFailed(str(error)) from None
        if not found:
            raise StartFailed(f"{self._path} names no host")
        self._accepted = found
        return found

    def close(self) -> None: ...
