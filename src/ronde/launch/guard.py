"""Sees to it that ranks do not outlive the process that started them, even when that process is killed.

A rank's process group cannot be ended by somebody who is dead. So a small shell holds the reading end of a pipe, and is
told every group that begins and ends. When the pipe ends, its writer is gone, however it went: the shell kills the
groups that are left. Used by launch/process, for the agent and LocalJob.
"""

from __future__ import annotations

import os
import subprocess

__all__ = ["Guard"]

CLOSE_S = 5.0
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
"""
"""POSIX, without any program but the shell itself."""


class Guard:
    """Kills the process groups it was told of when this process ends, or when it is closed."""

    def __init__(self) -> None:
        reading, self._fd = os.pipe()
        try:
            os.set_blocking(self._fd, False)
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", SCRIPT, "ronde-guard"],
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

    def begin(self, group: int) -> None:
        """From now on, this process group ends with us."""
        self._tell(f"begin {group}\n")

    def end(self, group: int) -> None:
        """Everything in the group has been killed. To be said before its leader is reaped: afterwards the number may
        be a stranger's."""
        self._tell(f"end {group}\n")

    def close(self) -> None:
        """End the shell, and with it the groups that are left. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        try:
            self._shell.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._shell.kill()
            self._shell.wait()

    def _tell(self, line: str) -> None:
        if self._fd < 0:
            return
        try:
            os.write(self._fd, line.encode())
        except (BrokenPipeError, BlockingIOError):
            # Somebody killed or stopped the shell. The ranks need no guard as long as this process lives.
            pass
