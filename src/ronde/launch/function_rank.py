"""A rank of ronde.run: reads a function call from its pipe, calls the function, and writes the reply. Started with
function.FUNCTION_RANK_COMMAND.

Call and reply are two pickles each, a small one first, so that what the second is about is known even if it cannot be
unpickled.

    call      (argv, paths before the standard library, paths after it)    (function, args, kwargs)
    reply     the traceback, empty when the function has returned          the return value, or the exception
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any

import cloudpickle

from ronde.exit_codes import INTERRUPTED_CODE
from ronde.launch.agent.rank import CALL_FD_VARIABLE, RESULT_FD_VARIABLE, RESULT_LENGTH_BYTES


def main() -> int:
    """Return the exit code: 0 when the function has returned."""
    call_fd, result_fd = int(os.environ.pop(CALL_FD_VARIABLE)), int(os.environ.pop(RESULT_FD_VARIABLE))
    for fd in (call_fd, result_fd):
        os.set_inheritable(fd, False)  # what the function starts must not hold the pipes open
    try:
        value = _call_function(call_fd)
        if "ronde.comm.world" in sys.modules:  # the function may have called init() without shutdown(): no failure
            sys.modules["ronde.comm.world"].shutdown()
        code, reply = 0, (pickle.dumps(""), _pickle_value(value))
    except BaseException as error:  # the process's edge: it travels to the caller
        sys.last_value = error  # so that the other ranks are told why this one leaves
        code, reply = _exit_code(error), (pickle.dumps(_format_traceback(error)), _pickle_error(error))
    with open(result_fd, "wb") as pipe:  # a descriptor, not a path
        pipe.write(sum(map(len, reply)).to_bytes(RESULT_LENGTH_BYTES, "big"))
        pipe.writelines(reply)
    return code


def _call_function(call_fd: int) -> Any:  # whatever the function returns
    with open(call_fd, "rb") as pipe:
        sys.argv[:], before, after = pickle.load(pipe)
        # Modules are found as the caller finds them: those beside its script before installed ones.
        sys.path[:] = dict.fromkeys([*before, *sys.path, *after])
        fn, args, kwargs = pickle.load(pipe)
    try:
        return fn(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None


def _exit_code(error: BaseException) -> int:
    """Return the exit code with which Python itself would exit."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_CODE
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF or 1
    if isinstance(error, SystemExit):
        sys.stderr.write(f"{error.code}\n")
    return 1


def _format_traceback(error: BaseException) -> str:
    """Format the traceback from the function on, without the frames of this module."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _pickle_value(value: object) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # whatever a __reduce__ raises
        raise TypeError(f"what the function returned cannot be sent back: {error!r}") from error


def _pickle_error(error: BaseException) -> bytes:
    """Pickle an exception as it is, or by its parts: pickle restores an exception by calling it with its args, which
    are often not what its __init__ takes. None is pickled when neither can be restored."""
    restorable = [found for each in (error, _ExceptionParts(error)) if (found := _pickle_round_trip(each)) is not None]
    pickled, _ = max(restorable, key=lambda found: found[1] == str(error), default=(pickle.dumps(None), ""))
    return pickled


class _ExceptionParts:
    """Becomes the exception itself where it is unpickled."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        kind, args, *attributes = _builtin_base(type(self._error)).__reduce__(self._error)
        return _rebuild_exception, (kind, args), *attributes


def _rebuild_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind, *args)
    _builtin_base(kind).__init__(error, *args)  # an OSError gets its errno there
    return error


def _builtin_base(kind: type[BaseException]) -> Any:  # mypy allows neither of the two calls
    """Return the nearest base class that is Python's own."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def _pickle_round_trip(value: object) -> tuple[bytes, str] | None:
    """Return the pickle and the text of the restored value; None if it cannot be pickled or restored."""
    try:
        pickled: bytes = cloudpickle.dumps(value)
        return pickled, str(pickle.loads(pickled))
    except Exception:  # whatever a __reduce__ or an __init__ raises
        return None


if __name__ == "__main__":
    sys.exit(main())
