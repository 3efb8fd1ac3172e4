"""Sees to it that ranks do not outlive the process that started them, even when that process is killed.

A rank's process group cannot be ended by somebody who is dead. So a small shell holds the reading end of a pipe, and is
told every group that begins and ends. When the pipe ends, its writer is gone, however it went: the shell kills the
groups that are left, and then whoever left its group (a daemon, a server in a session of its own) and still carries the
mark that every process inherits in its environment. Used by launch/process, for the agent and LocalJob.
"""

from __future__ import annotations

import os
import subprocess
import uuid

__all__ = ["COOKIE_VARIABLE", "OrphanKiller"]

COOKIE_VARIABLE = "RONDE_GUARD"
"""The variable that marks a process as ours. One that is started without it lives on after the job."""

CLOSE_TIMEOUT_S = 5.0
"""The shell ends within milliseconds of its pipe."""

SCRIPT = r"""
trap '' HUP INT TERM
groups=
while read -r change group; do
    case $change in
    begin) groups="$groups $group"; eval "runs_$group=1" ;;
    end) unset "runs_$group" ;;
    esac
done
for group in $groups; do
    eval "runs=\${runs_$group-}"
    if [ "$runs" ]; then kill -s KILL -- "-$group"; fi
done
for round in 1 2 3 4 5 6 7 8; do  # what one of them started while we looked is found the next time
    found=$(grep -lzxF "$1" /proc/[0-9]*/environ)  # it complains of what is not ours to read
    if [ -z "$found" ]; then break; fi
    for place in $found; do
        place=${place#/proc/}
        kill -s KILL "${place%/environ}"
    done
done
"""
"""POSIX; but for grep without any program but the shell itself."""


class OrphanKiller:
    """Kills the process groups it was told of, and all that carry its mark, when this process ends or it is closed."""

    def __init__(self) -> None:
        self.cookie = {COOKIE_VARIABLE: uuid.uuid4().hex}
        """To be in the environment of whoever is guarded."""
        reading, self._fd = os.pipe()
        try:
            os.set_blocking(self._fd, False)
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", SCRIPT, "ronde-guard", f"{COOKIE_VARIABLE}={self.cookie[COOKIE_VARIABLE]}"],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
                start_new_session=True,  # out of the way of Ctrl-C and of whoever ends this process's group
            )
        except BaseException:
            os.close(self._fd)
            raise
        finally:
            os.close(reading)

    @property
    def pid(self) -> int:
        """Of the shell."""
        return self._shell.pid

    def watch_group(self, group: int) -> None:
        """From now on, this process group ends with us."""
        self._write_line(f"begin {group}\n")

    def forget_group(self, group: int) -> None:
        """Everything in the group has been killed. To be said before its leader is reaped: afterwards the number may
        be a stranger's."""
        self._write_line(f"end {group}\n")

    def close(self) -> None:
        """End the shell, and with it everything that is left. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        try:
            self._shell.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._shell.kill()
            self._shell.wait()

    def _write_line(self, line: str) -> None:
        if self._fd < 0:
            return
        try:
            os.write(self._fd, line.encode())
        except (BrokenPipeError, BlockingIOError):
            # Somebody killed or stopped the shell. The ranks need no guard as long as this process lives.
            pass
