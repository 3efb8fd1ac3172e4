"""What the driver and its agents say to each other. Over ssh, as frames on the agent's standard input and output; in
the driver's own process, as calls with the same values.

ssh has authenticated and encrypted the way; decoding is strict all the same. A frame is its length (4 bytes, big
endian) and the message. Used by the driver (launch/driver, launch/ssh) and the agent (launch/agent, launch/remote).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ronde.launch.verdict import NOT_STARTED_CODE

__all__ = [
    "Beat",
    "Exited",
    "Failed",
    "FromAgent",
    "FromDriver",
    "Hello",
    "Input",
    "Launch",
    "Load",
    "Output",
    "Probe",
    "Probed",
    "Quit",
    "RankOrder",
    "Resize",
    "Result",
    "Signal",
    "Started",
    "Stream",
]

Stream: TypeAlias = Literal["out", "err"]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""


# --- from the driver -------------------------------------------------------------------------------------------


class RankOrder(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank to start: everything is decided, the agent only carries it out."""

    rank: int
    argv: tuple[str, ...]
    """With a call, an empty first word stands for the Python that runs the agent."""
    env: dict[str, str]
    """The whole environment of the rank; on another host, on top of what only that host knows (HOME, USER …)."""
    cwd: str
    cpus: tuple[int, ...] = ()
    """Cores it may use; empty for all."""
    terminal: bool = False
    """Give it a terminal of its own (a pty): Input reaches it, and everything it prints comes as stream "out"."""
    piped: bool = False
    """Input reaches it through a pipe instead, which has an end: the driver's standard input is no terminal either."""
    progress: bool = False
    """Let its output look like a terminal's (ptys for out and err), so that progress bars show."""
    call: bytes = b""
    """A function to call, as `ronde.run` pickles it: handed to the rank on a pipe of its own, see launch/rank."""


class Probe(Message, frozen=True):
    """Open a door at each of your addresses, or (with `others`) say at which of these addresses you reach them."""

    key: str
    """The job's secret: only a door of this job counts as reached."""
    others: tuple[tuple[str, ...], ...] = ()
    """`address:port` candidates, a tuple per host; empty to be asked for one's own."""
    limit_s: float = 5.0
    num_ports: int = 0
    """With one's own doors: so many further TCP ports that nobody uses here now (Probed.ports), all different. They
    become MASTER_PORT and the ports in TF_CONFIG, which other systems open themselves."""


class Launch(Message, frozen=True):
    """Start these ranks."""

    orders: tuple[RankOrder, ...]
    call: bytes = b""
    """What RankOrder.call is to be for all of them: said here, it travels once."""


class Signal(Message, frozen=True):
    """Send a signal to the process groups of these ranks, as far as they run."""

    ranks: tuple[int, ...]
    number: int


class Input(Message, frozen=True):
    """Bytes for the terminal of a rank; empty ends it."""

    rank: int
    data: bytes


class Resize(Message, frozen=True):
    """The driver's terminal has so many rows and columns now."""

    rank: int
    rows: int
    columns: int


class Beat(Message, frozen=True):
    """The driver lives. Sent over ssh again and again, the first right after Hello came: a cut network closes nothing,
    so an agent (launch/remote) that has heard a Beat and then hears nothing at all for silence_s quits."""

    silence_s: float


class Quit(Message, frozen=True):
    """Kill what still runs, and end. The end of the connection means the same."""


FromDriver: TypeAlias = Probe | Launch | Signal | Input | Resize | Beat | Quit


# --- from an agent ---------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """I am here. The first message; its shape must stay readable for other versions of ronde: they may add to its
    end."""

    version: str
    """ronde's."""
    python: str
    host: str
    """net.addresses.host_identity(): equal where ranks share memory."""
    pid: int
    num_cores: int
    cpus: tuple[int, ...]
    """Cores that this process may use."""
    addresses: tuple[str, ...] = ()
    """Where others may reach this host, best first."""


class Probed(Message, frozen=True):
    """Answer to Probe: my own doors as `address:port`; or for each host in turn the candidates that answered."""

    reached: tuple[tuple[str, ...], ...]
    errors: tuple[str, ...] = ()
    """For each host in turn, why the candidates that did not answer failed, in words."""
    ports: tuple[int, ...] = ()
    """Probe.num_ports free ones."""


class Started(Message, frozen=True):
    """The rank's process runs."""

    rank: int
    pid: int


class Failed(Message, frozen=True):
    """The rank could not be started (rank -1: something else failed on this host)."""

    rank: int
    why: str
    code: int = NOT_STARTED_CODE
    """The rank's exit code, as shells have it."""


class Output(Message, frozen=True):
    """What a rank printed, as it came. All of it is sent before the rank's Exited."""

    rank: int
    stream: Stream
    data: bytes


class Result(Message, frozen=True):
    """What the function of a rank returned or raised, as launch/function pickled it."""

    rank: int
    data: bytes


class Exited(Message, frozen=True):
    """The rank's process has ended, and everything in its process group with it. A signal counts below 0."""

    rank: int
    code: int
    note: str = ""
    """What else is known of the end, such as that the host ran out of memory."""


class Load(Message, frozen=True):
    """What the ranks of this host use; about once per second. (rank, CPU share of one core, resident bytes)."""

    ranks: tuple[tuple[int, float, int], ...]
    gpus: tuple[tuple[float, int], ...] = ()
    """(share busy, bytes used) per GPU of the host, where there is one."""


FromAgent: TypeAlias = Hello | Probed | Started | Failed | Output | Result | Exited | Load
