"""What the driver tells the part that shows the job to its user. Implemented by launch.output.printer.Printer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ronde.launch.messages import Stream

__all__ = ["Gone", "Screen"]


class Gone(NamedTuple):
    """Why nothing can be shown any more."""

    why: str
    unread: bool = False
    """The reader of a pipe has left, as `| head` does when it has seen enough."""


class Screen(Protocol):
    """Takes what ranks print. The driver calls it from one thread, and `tick` once per turn of its loop: after
    whatever it handed over in that turn, and again at the time that `tick` answered."""

    def output(self, rank: int, stream: Stream, data: bytes) -> None:
        """Bytes of a rank, as they came: any chunks, any bytes."""

    def ended(self, rank: int) -> None:
        """Nothing more comes from this rank."""

    def note(self, text: str) -> None:
        """One or more lines of the driver itself, shown as `[ronde] text` on the error stream, after all that was
        handed over before."""

    def tick(self, now_s: float) -> float | None:
        """Do what is due. Answers when to call again at the latest (same clock), None while nothing waits."""

    def tail(self, rank: int, code: int) -> str:
        """The last words of a rank that ended with this code (a signal counts below 0): the traceback that says why, or
        the last lines of both streams."""

    def gone(self) -> Gone | None:
        """Why nothing can be shown any more; None while all is well."""

    def full(self) -> bool:
        """Whether the reader of a pipe or terminal is far behind: better not to read more from ranks until `tick` has
        changed that. Who goes on all the same is made to wait in `tick`, sooner or later."""

    def close(self, *, give_up_s: float | None = None) -> None:
        """Show all that still waits, leave the terminal tidy, close the files. A reader that takes nothing for
        give_up_s gets no more; without, it is waited for. Idempotent."""
