"""The handshake in which both sides prove the job's key to each other. Without I/O: bytes in, bytes out.

    client                                               server
    HELLO   magic, version, length of request, nonce  →
                                                      ←  CHALLENGE  magic, version, nonce
    PROOF   request, mac("client", nonces, request)   →
                                                      ←  RESULT     0, length, reply, mac("server", nonces, …)
                                                         or 1 (wrong key), 2 (internal error), 3 (another round),
                                                         length 0; then it closes

- Nothing can be replayed: each side's proof covers the other side's fresh nonce.
- Nothing can be reflected: the two proofs have different labels, and so have the two opening messages.
- A peer without the key learns the version and a random number. Request and reply are not used without their proof.
- Sizes are fixed or bounded, and exactly the announced bytes are read: what follows belongs to the socket's user.
- Only the start of a connection is protected: who can change packets between the hosts can change what follows.

The lengths of HELLO and CHALLENGE stay the same in all versions, so that two versions recognize each other.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ronde.errors import ProtocolError
from ronde.net.keys import JobKey
from ronde.types import Topology

VERSION = 4
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 64 * 1024

_HELLO = struct.Struct("!5sBH32s")
_CHALLENGE = struct.Struct("!5sB32s")
_RESULT = struct.Struct("!BI")
_CLIENT_MAGIC = b"RONDc"
_SERVER_MAGIC = b"RONDd"
_ACCEPTED, _WRONG_KEY, _INTERNAL_ERROR, _OTHER_ROUND = 0, 1, 2, 3

INTERNAL_ERROR = _RESULT.pack(_INTERNAL_ERROR, 0)
"""The result sent to a client that has proved the key when the server cannot go on."""
OTHER_ROUND = _RESULT.pack(_OTHER_ROUND, 0)
"""The result sent to a client that has proved the key and is not a member of the server's round."""


@dataclass(frozen=True, slots=True)
class ConnectionRequest:
    """Who connects, and what for."""

    purpose: str
    rank: int
    detail: str = ""
    worker: str = ""
    """The identity of its process."""
    round: int = 0
    """The id of the round for which it connects; 0 if it is in none."""
    ready: bool = False
    """Whether the worker of an elastic job has built what it trains, so that it may be in the next round. In such a job
    `rank` is the number of the worker."""


def member_request(topology: Topology, purpose: str, detail: str = "") -> ConnectionRequest:
    """The request of a member of a round that connects to another one: the only one that its listener accepts."""
    worker = topology.members[topology.rank].worker
    return ConnectionRequest(purpose, topology.rank, detail, worker, topology.round)


class HandshakeFailed(ProtocolError):
    """The other side has not proved that it belongs to the job. The message is a predicate: its subject is "it"."""

    def __init__(self, reason: str, *, reply: bytes = b"") -> None:
        self.reply = reply
        """To be sent before the connection is closed."""
        super().__init__(reason)


class _HandshakeSide:
    """Collects exactly the bytes that the next step needs, then runs it."""

    def __init__(self, num_bytes: int, step: Callable[[bytes], bytes]) -> None:
        self._buffer = bytearray()
        self._num_bytes = num_bytes
        self._step = step

    @property
    def num_wanted(self) -> int:
        """How many bytes to read next; 0 when the handshake is complete."""
        return self._num_bytes - len(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Take what was read, at most num_wanted bytes, and return what to send."""
        self._buffer += data
        if self.num_wanted > 0:
            return b""
        message = bytes(self._buffer)
        self._buffer.clear()
        return self._step(message)

    def _expect(self, num_bytes: int, step: Callable[[bytes], bytes]) -> None:
        self._num_bytes = num_bytes
        self._step = step


class ServerHandshake(_HandshakeSide):
    """The listening side. Complete when `request` is set."""

    def __init__(self, key: JobKey, nonce: bytes, make_reply: Callable[[ConnectionRequest], bytes]) -> None:
        super().__init__(_HELLO.size, self._handle_hello)
        self._key = key
        self._nonce = nonce
        self._make_reply = make_reply
        self._client_nonce = b""
        self.request: ConnectionRequest | None = None

    def _handle_hello(self, message: bytes) -> bytes:
        magic, version, num_request_bytes, self._client_nonce = _HELLO.unpack(message)
        challenge = _CHALLENGE.pack(_SERVER_MAGIC, VERSION, self._nonce)
        if magic != _CLIENT_MAGIC:
            raise HandshakeFailed("does not speak ronde")
        if version != VERSION:
            raise HandshakeFailed(f"speaks version {version} of the handshake, this is {VERSION}", reply=challenge)
        if num_request_bytes > MAX_REQUEST_BYTES:
            raise HandshakeFailed(
                f"announces a request of {num_request_bytes} bytes, at most {MAX_REQUEST_BYTES} are allowed"
            )
        self._expect(num_request_bytes + MAC_BYTES, self._handle_proof)
        return challenge

    def _handle_proof(self, message: bytes) -> bytes:
        request, proof = message[:-MAC_BYTES], message[-MAC_BYTES:]
        nonces = (self._client_nonce, self._nonce)
        if not hmac.compare_digest(proof, self._key.mac(b"client", *nonces, request)):
            raise HandshakeFailed("does not have the job's key", reply=_RESULT.pack(_WRONG_KEY, 0))
        try:
            decoded = msgspec.msgpack.decode(request, type=ConnectionRequest)
        except (msgspec.DecodeError, RecursionError) as error:
            raise HandshakeFailed(f"sent a request that is not valid: {error}", reply=INTERNAL_ERROR) from None
        reply = self._make_reply(decoded)
        if len(reply) > MAX_REPLY_BYTES:
            raise HandshakeFailed(f"would get a reply of {len(reply)} bytes, too much", reply=INTERNAL_ERROR)
        self.request = decoded
        self._num_bytes = 0
        return _RESULT.pack(_ACCEPTED, len(reply)) + reply + self._key.mac(b"server", *nonces, request, reply)


class ClientHandshake(_HandshakeSide):
    """The connecting side: it sends `hello`, then feeds what it reads. Complete when `reply` is set."""

    def __init__(self, key: JobKey, nonce: bytes, request: ConnectionRequest) -> None:
        super().__init__(_CHALLENGE.size, self._handle_challenge)
        self._key = key
        self._nonce = nonce
        self._server_nonce = b""
        self._encoded_request = msgspec.msgpack.encode(request)
        if len(self._encoded_request) > MAX_REQUEST_BYTES:
            raise ValueError(
                f"purpose and detail of a request may take {MAX_REQUEST_BYTES} bytes, got {len(self._encoded_request)}"
            )
        self.hello = _HELLO.pack(_CLIENT_MAGIC, VERSION, len(self._encoded_request), nonce)
        self.reply: bytes | None = None

    def _handle_challenge(self, message: bytes) -> bytes:
        magic, version, self._server_nonce = _CHALLENGE.unpack(message)
        if magic != _SERVER_MAGIC:
            raise HandshakeFailed("what answers there is not ronde; check the address and the port")
        if version != VERSION:
            raise HandshakeFailed(
                f"ronde there speaks version {version} of the handshake, this one version {VERSION}; "
                "install the same ronde on all hosts"
            )
        self._expect(_RESULT.size, self._handle_result)
        return self._encoded_request + self._key.mac(b"client", self._nonce, self._server_nonce, self._encoded_request)

    def _handle_result(self, message: bytes) -> bytes:
        result, num_reply_bytes = _RESULT.unpack(message)
        if result == _WRONG_KEY:
            raise HandshakeFailed(
                "it refused the job's key; give all ranks the same RONDE_KEY, "
                "and check that no other job has that address"
            )
        if result == _OTHER_ROUND:
            raise HandshakeFailed("what listens there is in another round of the job; the round of this rank is over")
        if result != _ACCEPTED or num_reply_bytes > MAX_REPLY_BYTES:
            raise HandshakeFailed("it could not answer; the log of the other side says why")
        self._expect(num_reply_bytes + MAC_BYTES, self._handle_reply)
        return b""

    def _handle_reply(self, message: bytes) -> bytes:
        reply, proof = message[:-MAC_BYTES], message[-MAC_BYTES:]
        expected = self._key.mac(b"server", self._nonce, self._server_nonce, self._encoded_request, reply)
        if not hmac.compare_digest(proof, expected):
            raise HandshakeFailed("it does not have the job's key; check that no other job has that address")
        self.reply = reply
        self._num_bytes = 0
        return b""
