"""Every exception ronde raises by itself. The caller's own mistakes are plain ValueError and TypeError.

RondeError                 the world's fault
├── NotInitialized         a call that needs ronde.init() first
├── StartFailed            the members did not find each other
├── RoundEnded             this round is over; a new one may begin
│   └── PeerLost           … because a member is gone
├── OperationTimeout       an operation's deadline passed
├── ProtocolError          a message that no ronde of this version sends
├── JobFailed              a job that ronde.run started has ended badly
├── OutOfSync              ranks hold different parameters
└── CheckpointError        a checkpoint cannot be written or read
Mismatch (ValueError)      members asked for different things; the same on every member
"""

from __future__ import annotations

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
    """Something in the world went wrong: not the caller's mistake."""

    missing: tuple[int, ...] = ()
    """Ranks that did not come to the operation that ran out of time, as far as they are known."""


class NotInitialized(RondeError):
    """An operation was called outside of init() … shutdown()."""

    def __init__(self, what: str = "this call") -> None:
        super().__init__(f"{what} needs a running round; call ronde.init() first")


class StartFailed(RondeError):
    """The members of a job did not come together."""


class RoundEnded(RondeError):
    """The round this operation belonged to is over."""


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
        """Keyword-only arguments do not survive the default pickling."""
        return (_peer_lost, (self.rank, self.peer, self.op, self.why))


def _peer_lost(rank: int, peer: int, op: str, why: str) -> PeerLost:
    return PeerLost(rank=rank, peer=peer, op=op, why=why)


class OperationTimeout(RondeError):
    """An operation did not finish before its deadline."""


class ProtocolError(RondeError):
    """A message was truncated, too large, of another version, or makes no sense."""


class JobFailed(RondeError):
    """A job failed without an exception of its own to raise: a rank was killed, or a host was lost."""

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
        """Exit code of the job."""

    def __reduce__(self) -> tuple[object, ...]:
        """Keyword-only arguments do not survive the default pickling."""
        return (_job_failed, (str(self), self.code))


def _job_failed(message: str, code: int) -> JobFailed:
    return JobFailed(message, code=code)


class OutOfSync(RondeError):
    """Ranks hold different parameters. `tensor` is the first that differs, `ranks` are the odd ones out."""

    def __init__(self, message: str, *, tensor: str = "", ranks: tuple[int, ...] = ()) -> None:
        self.tensor = tensor
        self.ranks = ranks
        super().__init__(message)


class CheckpointError(RondeError):
    """A checkpoint cannot be written or read; the message names its path."""


class Mismatch(ValueError):
    """The members of a group asked for different things under one name or at one place in their programs."""

    joined: tuple[int, ...] = ()
    """Ranks that were in join() while others asked for an operation that needs every member."""
