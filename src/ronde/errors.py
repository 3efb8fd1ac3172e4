"""Every exception that ronde raises. A mistake of the caller is a plain ValueError or TypeError.

RuntimeError
└── RondeError             something went wrong that the caller did not cause
    ├── NotInitialized     a call needs ronde.init() first
    ├── StartFailed        the members of the job did not find each other
    │   ├── JobFinished    the others have finished the elastic job that this process wants to join
    │   ├── LeftBehind     the others have gone on without this process, and do not take it back
    │   └── StateLost      all ranks that had the state of training were lost while this process was about to join them
    ├── RoundEnded         this round is over; a new one may begin
    │   └── PeerLost       a rank that the operation needs is gone; what does not involve it goes on
    ├── OperationTimeout   the deadline of an operation passed
    ├── ProtocolError      a message that no ronde of this version sends, or that was changed on its way
    ├── JobFailed          a job that ronde.run() started has failed
    ├── OutOfSync          ranks hold different parameters
    ├── CheckpointError    a checkpoint cannot be written or read
    ├── DataError          data cannot be read, are damaged, or are not to be trusted
    └── ModelError         a model cannot be exported, loaded or run
ValueError
└── Mismatch               members asked for different things; raised on every member
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "CheckpointError",
    "DataError",
    "JobFailed",
    "JobFinished",
    "LeftBehind",
    "Mismatch",
    "ModelError",
    "NotInitialized",
    "OperationTimeout",
    "OutOfSync",
    "PeerLost",
    "ProtocolError",
    "RondeError",
    "RoundEnded",
    "StartFailed",
    "StateLost",
]


class RondeError(RuntimeError):
    """Something went wrong that the caller did not cause: a process, a host, the network, a file."""

    missing: tuple[int, ...] = ()
    """If an operation timed out, the ranks that did not come to it, as far as they are known; otherwise empty."""


class NotInitialized(RondeError):
    """An operation was called before init() or after shutdown()."""

    def __init__(self, what: str = "this call") -> None:
        super().__init__(f"{what} needs a running round; call ronde.init() first")


class StartFailed(RondeError):
    """The members of a job did not find each other in time, or could not be started."""


class JobFinished(StartFailed):
    """The elastic job is finished, so there is nothing left to do for a process that wants to join it."""


class LeftBehind(StartFailed):
    """This process of an elastic job was silent or out of reach for too long. The others have gone on without it, and
    it cannot come back; the launcher may start another one in its place."""


class StateLost(StartFailed):
    """All ranks of the elastic job that had the state of training were lost before this process could join them. The
    job begins again with processes that have loaded the script's checkpoint; the launcher starts one in the place of
    this one."""


class RoundEnded(RondeError):
    """The round of this operation is over, or its channel is closed."""


class PeerLost(RoundEnded):
    """A rank that the operation needs is gone: killed, exited, or no longer reachable. Operations of groups without it,
    and messages between other ranks, go on."""

    def __init__(self, *, rank: int, peer: int, op: str = "", why: str = "") -> None:
        self.rank = rank
        """The rank that raises this."""
        self.peer = peer
        """The rank that is gone."""
        self.op = op
        """The operation, in words; empty if it was none."""
        self.why = why
        """What is known of the reason, in words."""
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
    """Ranks hold different parameters."""

    def __init__(self, message: str, *, tensor: str = "", ranks: tuple[int, ...] = ()) -> None:
        self.tensor = tensor
        """The name of the first tensor that differs; empty if it is not known."""
        self.ranks = ranks
        """The ranks that differ from the majority; empty if there is none."""
        super().__init__(message)


class CheckpointError(RondeError):
    """A checkpoint cannot be written or read; the message names its path."""


class DataError(RondeError):
    """Data cannot be read or written, are damaged, or hold what is not to be trusted; the message names the file, and
    the offset if it is known."""


class ModelError(RondeError):
    """A model cannot be exported, loaded or run, or its files are damaged or not to be trusted; the message names
    it."""


class Mismatch(ValueError):
    """The members of a group asked for different things in the same operation. Raised on every member."""

    joined: tuple[int, ...] = ()
    """Ranks that were in join() while others asked for an operation that needs every member."""
    answers: Mapping[int, object] = MappingProxyType({})
    """By rank, what each has, equal for those that agree; empty if it is not known."""
