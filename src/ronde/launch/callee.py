"""A rank of ronde.run: `python -m ronde.launch.callee`. Reads the call from its pipe, makes it, sends the answer back."""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

import cloudpickle

from ronde.launch.function import Answer
from ronde.launch.rank import CALL_FD, LENGTH_BYTES, RESULT_FD

__all__ = ["main"]

FAILED_CODE = 1


def main() -> int:
    """The exit code: 0 when the function has returned."""
    call_fd, result_fd = int(os.environ.pop(CALL_FD)), int(os.environ.pop(RESULT_FD))
    os.set_inheritable(result_fd, False)  # what the function starts must not hold the pipe open
    with open(call_fd, "rb") as pipe:  # noqa: PTH123  # a descriptor, no path
        data = pipe.read()
    answer = _answer(data)
    with open(result_fd, "wb") as pipe:  # noqa: PTH123
        result = _pickle(answer)
        pipe.write(len(result).to_bytes(LENGTH_BYTES, "big"))
        pipe.write(result)
    return FAILED_CODE if answer.trace else 0


def _answer(data: bytes) -> Answer:
    try:
        paths, call = cloudpickle.loads(data)
        sys.path.extend(path for path in paths if path not in sys.path)
        fn, args, kwargs = cloudpickle.loads(call)
        value = fn(*args, **kwargs)
        _leave()
        return Answer(value=value)
    except BaseException as error:  # the process's edge: it becomes a value for the caller
        sys.last_value = error  # so that the goodbye to the other ranks says why
        return Answer(error=error, trace=_trace(error))


def _leave() -> None:
    """The function may have called init() and not shutdown(): going is no accident."""
    if "ronde.comm.current" in sys.modules:
        sys.modules["ronde.comm.current"].shutdown()


def _trace(error: BaseException) -> str:
    """From the function on: how it was called here is nobody's concern."""
    frames: TracebackType | None = error.__traceback__
    frames = frames.tb_next if frames is not None else None
    return "".join(traceback.format_exception(type(error), error, frames))


def _pickle(answer: Answer) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(answer)
        if answer.error is not None:
            cloudpickle.loads(pickled)  # an exception may pickle and not come back
    except Exception as why:  # whatever a __reduce__ raises
        if answer.trace:
            return bytes(cloudpickle.dumps(Answer(trace=answer.trace)))
        trace = f"what the function returned cannot be sent back: {why!r}\n"
        return bytes(cloudpickle.dumps(Answer(error=TypeError(trace.strip()), trace=trace)))
    return pickled


if __name__ == "__main__":
    sys.exit(main())
