"""Exit codes of processes: those that ronde's commands use, and how the end of a process is told."""

from __future__ import annotations

import signal

USAGE_ERROR_CODE = 2
"""The exit code of every command for arguments that it cannot use."""
NOT_EXECUTABLE_CODE = 126
"""The exit code of shells for a file that is no program."""
NOT_STARTED_CODE = 127
"""The exit code of shells for a command that does not exist; here for every other reason why a rank cannot start."""
INTERRUPTED_CODE = 128 + signal.SIGINT
"""The exit code of shells for a program that Ctrl-C ended."""
LOST_CODE = 255
"""The exit code of ssh for a lost connection: how the rank itself ended is not known."""


def shell_exit_code(code: int) -> int:
    """Return the exit code that a shell shows for a process: 128 + the signal that killed it, if one did."""
    return 128 - code if code < 0 else code


def describe_exit_code(code: int) -> str:
    """Return `exited with code 3` or, for a code below 0, `killed by signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"
