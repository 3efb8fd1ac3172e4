"""Every exception that ronde raises. A mistake of the caller is a plain ValueError or TypeError.

RuntimeError
└── RondeError             something went wrong that the caller did not cause
    ├── NotInitialized     a call needs ronde.init() first
    ├── StartFailed        the members of the job did not find each other
    ├── RoundEnded         this round is over; a new one may begin
    │   └── PeerLost       this round is over because a member is gone
    ├── OperationTimeout   the deadline of an operation passed
    ├── ProtocolError      a message that no ronde of this version sends, or that was changed on its way
    ├── JobFailed          a job that ronde.run() started has failed
    ├── OutOfSync          ranks hold different parameters
    └── CheckpointError    a checkpoint cannot be written or read
ValueError
└── Mismatch               members asked for different things; raised on every member
"""

from __future__ import annotations

import functools

__all__ = [
    "CheckpointError",
    "JobFailed",
    "Mismatch",
    "NotInitialized",
    "OperationTimeout",
    "OutOfSync",
    "PeerLost",
    "ProtocolError",
    "RondeError",
    "RoundEnded",
    "StartFailed",
]


class RondeError(RuntimeError):
    """Something went wrong that the caller did not cause: a process, a host, the network, a file. If an operation timed
    out, `missing` has the ranks that did not come to it, as far as they are known; otherwise it is empty."""

    missing: tuple[int, ...] = ()


class NotInitialized(RondeError):
    """An operation was called before init() or after shutdown()."""

    def __init__(self, what: str = "this call") -> None:
        super().__init__(f"{what} needs a running round; call ronde.init() first")


class StartFailed(RondeError):
    """The members of a job did not find each other in time, or could not be started."""


class RoundEnded(RondeError):
    """The round of this operation is over."""


class PeerLost(RoundEnded):
    """A member is gone: killed, exited, or no longer reachable."""

    def __init__(self, *, rank: int, peer: int, op: str = "", why: str = "") -> None:
        self.rank = rank
        self.peer = peer
        self.op = op
        self.why = why
        during = f" during {op}" if op else ""
        because = f" ({why})" if why else ""
        super().__init__(
            f"rank {rank} lost rank {peer}{during}{because}; start a new round, or look at the output of rank {peer}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # The default pickling does not keep keyword-only arguments.
        return functools.partial(PeerLost, rank=self.rank, peer=self.peer, op=self.op, why=self.why), ()


class OperationTimeout(RondeError):
    """An operation did not finish before its deadline."""


class ProtocolError(RondeError):
    """A message was truncated, too large, changed on its way, or of another version of ronde."""


class JobFailed(RondeError):
    """A job of ronde.run() failed and no rank raised an exception: a rank was killed, or a host was lost."""

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
        """Exit code of the job."""

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(JobFailed, str(self), code=self.code), ()


class OutOfSync(RondeError):
    """Ranks hold different parameters. `tensor` is the first one that differs, `ranks` are those in the minority."""

    def __init__(self, message: str, *, tensor: str = "", ranks: tuple[int, ...] = ()) -> None:
        self.tensor = tensor
        self.ranks = ranks
        super().__init__(message)


class CheckpointError(RondeError):
    """A checkpoint cannot be written or read; the message names its path."""


class Mismatch(ValueError):
    """The members of a group asked for different things in the same operation. Raised on every member."""

    joined: tuple[int, ...] = ()
    """Ranks that were in join() while others asked for an operation that needs every member."""
