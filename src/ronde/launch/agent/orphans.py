"""Kills the ranks of an agent that was itself killed, so that they do not outlive it.

A small shell reads from a pipe a line for every process group that begins and ends. When the pipe
ends, the agent is gone, however it went: the shell kills the groups that are left, and then every process that left
its group (a daemon, a server in a session of its own) but still has the cookie that all processes of the agent inherit
in their environment.
"""

from __future__ import annotations

import os
import subprocess
import uuid

from ronde.launch.timeouts import ORPHAN_KILLER_EXIT_TIMEOUT_S

COOKIE_VARIABLE = "RONDE_GUARD"
"""The variable that marks the processes of an agent. One that is started without it lives on after the job."""

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
for round in 1 2 3 4 5 6 7 8; do  # what one of them started meanwhile is found the next time
    found=$(grep -lzxF "$1" /proc/[0-9]*/environ)  # it complains of what it may not read
    if [ -z "$found" ]; then break; fi
    for path in $found; do
        path=${path#/proc/}
        kill -s KILL "${path%/environ}"
    done
done
"""
"""POSIX shell; needs no program but grep."""


class OrphanKiller:
    """Kills the process groups it watches and all processes with its cookie when this process ends or it is closed."""

    def __init__(self) -> None:
        self.cookie = {COOKIE_VARIABLE: uuid.uuid4().hex}
        """The variable that every rank has to have in its environment."""
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
                start_new_session=True,  # not reached by Ctrl-C or by signals to this process's group
            )
            self.pid = self._shell.pid
        except BaseException:
            os.close(self._fd)
            raise
        finally:
            os.close(reading)

    @property
    def environ(self) -> dict[str, str]:
        """The environment of this process, with the cookie."""
        return {**os.environ, **self.cookie}

    def watch_group(self, group: int) -> None:
        """Kill this process group when this process ends."""
        self._write_line(f"begin {group}\n")

    def forget_group(self, group: int) -> None:
        """Everything in the group has been killed. To be called before its leader is reaped: afterwards another process
        may get its number."""
        self._write_line(f"end {group}\n")

    def close(self) -> None:
        """End the shell, which kills everything that is left. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        try:
            self._shell.wait(ORPHAN_KILLER_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._shell.kill()
            self._shell.wait()

    def _write_line(self, line: str) -> None:
        if self._fd < 0:
            return
        try:
            os.write(self._fd, line.encode())
        except (BrokenPipeError, BlockingIOError):
            # Somebody killed or stopped the shell. It is not needed as long as this process lives.
            pass
