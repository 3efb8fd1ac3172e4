"""What the driver and its agents say to each other. Over ssh, as frames on the agent's standard input and output; in
the driver's own process, as calls with the same values.

ssh has authenticated and encrypted the way; decoding is strict all the same. A frame is its length (4 bytes, big
endian) and the message. Used by the driver (launch/driver, launch/ssh) and the agent (launch/agent, launch/remote).

Messages as frames in a stream of bytes: a length (4 bytes, big endian), then msgpack. Used at both ends of the ssh
connection: launch/remote and launch/ssh.

The shell that starts an agent may print to the same stream first (a banner, what ~/.bashrc says). So an agent opens
with MARK, and the driver's reader skips what comes before it, and keeps its end: when no agent ever speaks, that is
the best explanation there is.
"""

from __future__ import annotations

import struct
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from ronde.errors import ProtocolError
from ronde.text import NOT_STARTED_CODE

__all__ = [
    "AgentHello",
    "AgentMessage",
    "DriverHeartbeat",
    "DriverMessage",
    "FrameReader",
    "FunctionResult",
    "MAX_FRAME_BYTES",
    "PREAMBLE",
    "ProbeReply",
    "ProbeRequest",
    "RankExited",
    "RankInput",
    "RankOrder",
    "RankOutput",
    "RankStartFailed",
    "RankStarted",
    "ResizeTerminal",
    "SignalRanks",
    "StartRanks",
    "StdStream",
    "StopAgent",
    "UsageReport",
    "encode_frame",
    "make_agent_message_reader",
    "make_driver_message_reader",
]

StdStream: TypeAlias = Literal["out", "err"]


class LaunchMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
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
    tty: bool = False
    """Give it a terminal of its own (a pty): Input reaches it, and everything it prints comes as stream "out"."""
    stdin_pipe: bool = False
    """Input reaches it through a pipe instead, which has an end: the driver's standard input is no terminal either."""
    output_ptys: bool = False
    """Let its output look like a terminal's (ptys for out and err), so that progress bars show."""
    pickled_call: bytes = b""
    """A function to call, as `ronde.run` pickles it: handed to the rank on a pipe of its own, see launch/rank."""


class ProbeRequest(LaunchMessage, frozen=True):
    """Open a door at each of your addresses, or (with `others`) say at which of these addresses you reach them."""

    key: str
    """The job's secret: only a door of this job counts as reached."""
    targets: tuple[tuple[str, ...], ...] = ()
    """`address:port` candidates, a tuple per host; empty to be asked for one's own."""
    timeout_s: float = 5.0
    num_ports: int = 0
    """With one's own doors: so many further TCP ports that nobody uses here now (Probed.ports), all different. They
    become MASTER_PORT and the ports in TF_CONFIG, which other systems open themselves."""


class StartRanks(LaunchMessage, frozen=True):
    """Start these ranks."""

    orders: tuple[RankOrder, ...]
    pickled_call: bytes = b""
    """What RankOrder.call is to be for all of them: said here, it travels once."""


class SignalRanks(LaunchMessage, frozen=True):
    """Send a signal to the process groups of these ranks, as far as they run."""

    ranks: tuple[int, ...]
    number: int


class RankInput(LaunchMessage, frozen=True):
    """Bytes for the terminal of a rank; empty ends it."""

    rank: int
    data: bytes


class ResizeTerminal(LaunchMessage, frozen=True):
    """The driver's terminal has so many rows and columns now."""

    rank: int
    rows: int
    columns: int


class DriverHeartbeat(LaunchMessage, frozen=True):
    """The driver lives. Sent over ssh again and again, the first right after Hello came: a cut network closes nothing,
    so an agent (launch/remote) that has heard a Beat and then hears nothing at all for silence_s quits."""

    timeout_s: float


class StopAgent(LaunchMessage, frozen=True):
    """Kill what still runs, and end. The end of the connection means the same."""


DriverMessage: TypeAlias = (
    ProbeRequest | StartRanks | SignalRanks | RankInput | ResizeTerminal | DriverHeartbeat | StopAgent
)


# --- from an agent ---------------------------------------------------------------------------------------------


class AgentHello(LaunchMessage, frozen=True, forbid_unknown_fields=False, tag="Hello"):
    """I am here. The first message; its shape must stay readable for other versions of ronde: they may add to its
    end."""

    version: str
    """ronde's."""
    python: str
    host_identity: str
    """net.addresses.host_identity(): equal where ranks share memory."""
    pid: int
    num_cores: int
    cpus: tuple[int, ...]
    """Cores that this process may use."""
    addresses: tuple[str, ...] = ()
    """Where others may reach this host, best first."""


class ProbeReply(LaunchMessage, frozen=True):
    """Answer to Probe: my own doors as `address:port`; or for each host in turn the candidates that answered."""

    reachable: tuple[tuple[str, ...], ...]
    errors: tuple[str, ...] = ()
    """For each host in turn, why the candidates that did not answer failed, in words."""
    free_ports: tuple[int, ...] = ()
    """Probe.num_ports free ones."""


class RankStarted(LaunchMessage, frozen=True):
    """The rank's process runs."""

    rank: int
    pid: int


class RankStartFailed(LaunchMessage, frozen=True):
    """The rank could not be started (rank -1: something else failed on this host)."""

    rank: int
    reason: str
    exit_code: int = NOT_STARTED_CODE
    """The rank's exit code, as shells have it."""


class RankOutput(LaunchMessage, frozen=True):
    """What a rank printed, as it came. All of it is sent before the rank's Exited."""

    rank: int
    stream: StdStream
    data: bytes


class FunctionResult(LaunchMessage, frozen=True):
    """What the function of a rank returned or raised, as launch/function pickled it."""

    rank: int
    data: bytes


class RankExited(LaunchMessage, frozen=True):
    """The rank's process has ended, and everything in its process group with it. A signal counts below 0."""

    rank: int
    exit_code: int
    detail: str = ""
    """What else is known of the end, such as that the host ran out of memory."""


class UsageReport(LaunchMessage, frozen=True):
    """What the ranks of this host use; about once per second. (rank, CPU share of one core, resident bytes)."""

    ranks: tuple[tuple[int, float, int], ...]
    gpus: tuple[tuple[float, int], ...] = ()
    """(share busy, bytes used) per GPU of the host, where there is one."""


AgentMessage: TypeAlias = (
    AgentHello | ProbeReply | RankStarted | RankStartFailed | RankOutput | FunctionResult | RankExited | UsageReport
)

PREAMBLE = b"\0ronde agent\0"
"""What an agent sends before its first frame. No shell prints it by accident."""
MAX_FRAME_BYTES = 2**32 - 1
"""What the length can say."""
MAX_TEXT_BEFORE_PREAMBLE_BYTES = 4096
"""So much of what came before MARK is kept."""

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()
_agent_message_decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)
_driver_message_decoder: msgspec.msgpack.Decoder[DriverMessage] = msgspec.msgpack.Decoder(DriverMessage)

T = TypeVar("T")


def encode_frame(message: DriverMessage | AgentMessage) -> bytes:
    """One message for the wire."""
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
    """Collects bytes as they come and gives out whole messages. Made by from_agent() or from_driver()."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], *, preamble: bytes = b"") -> None:
        self._decoder = decoder
        self._preamble = preamble
        self._partial_preamble = b""
        """What may be the beginning of the mark."""
        self._parts: list[bytes] = []
        self._num_bytes = 0
        """Of all parts."""
        self._num_needed_bytes = _LENGTH.size
        """With fewer there is no whole message."""
        self.text_before_preamble = b""
        """The end of what came before the mark: not from an agent."""

    def feed(self, data: bytes) -> list[T]:
        """The messages that are whole now. Raises ProtocolError when it is none; nothing after that makes sense."""
        if self._preamble:
            data = self._skip_to_preamble(data)
        self._parts.append(data)
        self._num_bytes += len(data)
        if self._num_bytes < self._num_needed_bytes:  # put together once: a frame may have hundreds of megabytes
            return []
        return self._split_frames(b"".join(self._parts))

    def _split_frames(self, data: bytes) -> list[T]:
        found: list[T] = []
        start, self._num_needed_bytes = 0, _LENGTH.size
        with memoryview(data) as view:
            while len(data) - start >= self._num_needed_bytes:
                end = start + _LENGTH.size + _LENGTH.unpack_from(data, start)[0]
                if end > len(data):
                    self._num_needed_bytes = end - start
                    break
                found.append(self._decode(view[start + _LENGTH.size : end]))
                start = end
        self._parts, self._num_bytes = [data[start:]], len(data) - start
        return found

    def _skip_to_preamble(self, data: bytes) -> bytes:
        """What comes after the mark; nothing as long as it has not come."""
        before, mark, after = (self._partial_preamble + data).partition(self._preamble)
        if mark:
            self._preamble, self._partial_preamble = b"", b""
        else:
            first = max(0, len(before) - len(self._preamble) + 1)
            cut = next(cut for cut in range(first, len(before) + 1) if self._preamble.startswith(before[cut:]))
            before, self._partial_preamble = before[:cut], before[cut:]
        self.text_before_preamble = (self.text_before_preamble + before)[-MAX_TEXT_BEFORE_PREAMBLE_BYTES:]
        return after

    def _decode(self, data: memoryview) -> T:
        with data:
            try:
                return self._decoder.decode(data)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise ProtocolError(f"not a message: {error}; is it the same version of ronde on all hosts?") from None


def make_agent_message_reader() -> FrameReader[AgentMessage]:
    """Reads what an agent sends."""
    return FrameReader(_agent_message_decoder, preamble=PREAMBLE)


def make_driver_message_reader() -> FrameReader[DriverMessage]:
    """Reads what the driver sends."""
    return FrameReader(_driver_message_decoder)
