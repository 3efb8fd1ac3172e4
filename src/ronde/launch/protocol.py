"""The messages that the driver and its agents exchange. With the agent of another host they travel as frames through
the pipes of ssh, which has authenticated and encrypted the connection; with the agent in the driver's own process they
are passed as values. A frame is its length (4 bytes, big endian) and the message in msgpack.

The shell that starts an agent may print to the same stream first (a banner, output of ~/.bashrc). So an agent begins
with PREAMBLE; the driver's reader skips what comes before it and keeps its end, which explains best why no agent came.
"""

from __future__ import annotations

import enum
import struct
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from ronde.errors import ProtocolError

StdStream: TypeAlias = Literal["out", "err"]


SERVER_COMMAND = (
    "",  # the agent's own Python
    "-c",
    # Not -m: that looks into the working directory first, where the user may have files of any name.
    "import sys; sys.path[:1] == [''] and sys.path.pop(0)\nfrom ronde.ps.server_process import main; sys.exit(main())",
)
"""RankOrder.argv of a server process of ronde.ps."""


class LaunchMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""


# --- from the driver -------------------------------------------------------------------------------------------


class RankOrder(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything that an agent needs to start one rank."""

    rank: int
    argv: tuple[str, ...]
    """An empty first word stands for the Python that runs the agent."""
    env: dict[str, str]
    """The whole environment of the rank; on another host, on top of that host's login variables (HOME, USER …)."""
    cwd: str
    cpus: tuple[int, ...] = ()
    """CPUs that the rank may use; empty for all."""
    tty: bool = False
    """Start the rank in a pty: RankInput reaches it, and all its output is reported as stream "out"."""
    stdin_pipe: bool = False
    """With tty: RankInput reaches the rank through a pipe instead, because the driver's standard input is no terminal
    either and has an end."""
    output_ptys: bool = False
    """Give the rank ptys as standard output and error, so that it shows progress bars."""
    message_pipes: bool = False
    """Give the rank pipes for RankMessage."""


class PortCounts(NamedTuple):
    """How many TCP ports of a host a job needs for systems that open them by themselves."""

    free: int = 0
    """Ports that are free when the job starts, such as MASTER_PORT."""
    reserved: int = 0
    """Ports that are also reserved while the agent of the host lives: those in TF_CONFIG."""


class ProbeRequest(LaunchMessage, frozen=True):
    """Without targets: listen at each address of this host. With targets: connect to them and report which answer."""

    key: str
    """The job's key: only listeners of this job count as reached."""
    targets: tuple[tuple[str, ...], ...] = ()
    """`address:port` candidates, one tuple per host."""
    timeout_s: float = 5.0
    num_ports: PortCounts = PortCounts()
    """Without targets: how many ports to find as well (ProbeReply.free_ports)."""


class StartRanks(LaunchMessage, frozen=True):
    orders: tuple[RankOrder, ...]
    pickled_call: bytes = b""
    """The function call of `ronde.run`, which every rank reads from a pipe of its own (agent/rank)."""
    terminate_s: float = 5.0
    """When the agent itself is told to end: between SIGTERM and SIGKILL for its ranks."""


class SignalRanks(LaunchMessage, frozen=True):
    """Send a signal to the process groups of those of these ranks that run."""

    ranks: tuple[int, ...]
    number: int


class RankInput(LaunchMessage, frozen=True):
    """Bytes for the terminal of a rank; no bytes are the end of its input."""

    rank: int
    data: bytes


class RankMessage(LaunchMessage, frozen=True):
    """Bytes that mean something only to the program that runs the job and to its rank. Sent both ways, in jobs with
    Job.has_messages."""

    rank: int
    data: bytes


class ResizeTerminal(LaunchMessage, frozen=True):
    rank: int
    rows: int
    columns: int


class PauseOutput(LaunchMessage, frozen=True):
    """Stop reading what ranks print, so that they wait, or go on. Everything else is still reported at once: the driver
    never stops reading from an agent, so that an exit is not kept behind output that nobody reads."""

    paused: bool


class DriverHeartbeat(LaunchMessage, frozen=True):
    """The driver lives. Sent over ssh at intervals, first right after AgentHello: a cut network closes no connection,
    so an agent that has got a heartbeat and then receives nothing for timeout_s stops."""

    timeout_s: float


class StopAgent(LaunchMessage, frozen=True):
    """Kill the ranks that still run, and exit. The end of the connection means the same."""


DriverMessage: TypeAlias = (
    ProbeRequest
    | StartRanks
    | SignalRanks
    | RankInput
    | RankMessage
    | ResizeTerminal
    | PauseOutput
    | DriverHeartbeat
    | StopAgent
)


# --- from an agent ---------------------------------------------------------------------------------------------


class AgentHello(LaunchMessage, frozen=True, forbid_unknown_fields=False, tag="Hello"):
    """The first message of an agent. Other versions of ronde have to read it: fields are added at its end only."""

    version: str
    python: str
    host_identity: str
    """net.addresses.host_identity(): equal where ranks share memory."""
    cpus: tuple[int, ...]
    """CPUs that this process may use, neighbours beside each other."""
    effective_cpu_count: int
    """How many of them the CPU quota of the agent's container allows to use at a time."""


class ProbeReply(LaunchMessage, frozen=True):
    """Answer to ProbeRequest: this host's own listeners; or for each host in turn the candidates that answered."""

    reachable: tuple[tuple[str, ...], ...]
    errors: tuple[str, ...] = ()
    """For each host in turn, why the other candidates did not answer."""
    free_ports: tuple[int, ...] = ()
    """The reserved ones are behind the others."""


class AgentError(LaunchMessage, frozen=True):
    """Something failed on this host that concerns no single rank."""

    reason: str


class AgentStopping(LaunchMessage, frozen=True):
    """The agent was told to end, not by its driver: it starts no rank any more, has sent SIGTERM to those that run, and
    ends when they have."""

    reason: str


class RankStarted(LaunchMessage, frozen=True):
    rank: int
    pid: int


class RankOutput(LaunchMessage, frozen=True):
    """Bytes that a rank printed. All of them are sent before the rank's RankExit."""

    rank: int
    stream: StdStream
    data: bytes


class FunctionResult(LaunchMessage, frozen=True):
    """The return value or exception of a rank's function, as function_rank pickled it."""

    rank: int
    data: bytes


class ExitReason(enum.Enum):
    EXITED = "exited"
    """Its process ended, by itself or by a signal: see the exit code."""
    OOM_KILLED = "oom_killed"
    """The kernel killed it because memory ran out."""
    OOM_SUSPECTED = "oom_suspected"
    """It exited while the kernel killed some process, perhaps one of its own, because memory ran out."""
    NOT_STARTED = "not_started"
    """Its process could not be started."""
    HOST_LOST = "host_lost"
    """The connection to its host ended, and with it the agent and its ranks."""


class RankExit(LaunchMessage, frozen=True):
    """The rank's process and everything in its process group have ended, or it could not be started."""

    rank: int
    exit_code: int
    """Below 0: the signal that ended it."""
    reason: ExitReason = ExitReason.EXITED
    detail: str = ""
    """For NOT_STARTED and HOST_LOST: what is known about it, as text for people."""
    host: str = ""
    """The host's name as the user wrote it. Added by the driver."""
    requested: bool = False
    """Whether the driver had sent the rank a signal to end. Added by the driver."""
    name: str = ""
    """What a process is called that is no rank: a scheduler or server. Added by the driver."""


class UsageReport(LaunchMessage, frozen=True):
    """What the ranks of this host use; about once per second."""

    ranks: tuple[tuple[int, float, int], ...]
    """(rank, CPU share of one core, resident bytes)"""
    gpus: tuple[tuple[float, int], ...] = ()
    """(share busy, bytes used) per GPU of the host, where there is one."""


AgentMessage: TypeAlias = (
    AgentHello
    | ProbeReply
    | AgentError
    | AgentStopping
    | RankStarted
    | RankOutput
    | RankMessage
    | FunctionResult
    | RankExit
    | UsageReport
)

PREAMBLE = b"\0ronde agent\0"
"""What an agent sends before its first frame. No shell prints it by accident."""
MAX_FRAME_BYTES = 2**32 - 1
"""The largest length that 4 bytes can hold."""
MAX_TEXT_BEFORE_PREAMBLE_BYTES = 4096
"""How much of what came before the preamble is kept."""

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


def encode_frame(message: DriverMessage | AgentMessage) -> bytes:
    data = bytearray(_LENGTH.size)
    _encoder.encode_into(message, data, _LENGTH.size)
    size = len(data) - _LENGTH.size
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} takes {size} bytes, more than the {MAX_FRAME_BYTES} that fit into a frame; "
            "pass large data by file, and only its path to the function"
        )
    _LENGTH.pack_into(data, 0, size)
    return bytes(data)


class FrameReader(Generic[T]):
    """Collects bytes and returns whole messages. Made by make_agent_message_reader or make_driver_message_reader."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], *, preamble: bytes = b"") -> None:
        self._decoder = decoder
        self._preamble = preamble
        self._buffer = bytearray()
        self.text_before_preamble = b""
        """The end of what came before the preamble: not from an agent."""

    def feed(self, data: bytes) -> list[T]:
        """Return the messages that are complete now. After a ProtocolError the rest of the stream is unreadable."""
        self._buffer += data
        if self._preamble:
            before, found, after = self._buffer.partition(self._preamble)
            self._buffer = after if found else before[-MAX_TEXT_BEFORE_PREAMBLE_BYTES:]
            self.text_before_preamble = bytes(before[-MAX_TEXT_BEFORE_PREAMBLE_BYTES:])
            if not found:
                return []
            self._preamble = b""
        messages: list[T] = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if end > len(self._buffer):
                break
            messages.append(self._decode(end))
            del self._buffer[:end]
        return messages

    def _decode(self, end: int) -> T:
        with memoryview(self._buffer) as view, view[_LENGTH.size : end] as data:
            try:
                return self._decoder.decode(data)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise ProtocolError(f"not a message: {error}; is it the same version of ronde on all hosts?") from None


def make_agent_message_reader() -> FrameReader[AgentMessage]:
    return FrameReader(msgspec.msgpack.Decoder(AgentMessage), preamble=PREAMBLE)


def make_driver_message_reader() -> FrameReader[DriverMessage]:
    return FrameReader(msgspec.msgpack.Decoder(DriverMessage))
