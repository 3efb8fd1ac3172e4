"""Both sides prove the job's key to each other before anything else is said. Used by door. Pure: bytes in, bytes out.

    caller                                               door
    HELLO   magic, version, length of who, nonce    →
                                                    ←    CHALLENGE  magic, version, nonce
    PROOF   who, mac("caller", nonces, who)         →
                                                    ←    WELCOME    0, length, greeting, mac("door", nonces, …)
                                                         or a REFUSAL: 1 (key) or 2 (fault), length 0; then it hangs up

- Nothing can be replayed: each side's proof covers the other side's fresh nonce.
- Nothing can be reflected: the two proofs have different labels, and so have the two opening messages.
- A stranger learns the version and a random number. Who calls, and the greeting, count only with their proof.
- Sizes are fixed or bounded, and exactly the announced bytes are read: what follows belongs to the socket's owner.
- It guards the door, not the road: whoever can change packets between the hosts can still change what follows.

HELLO's length and CHALLENGE's stay the same in all versions, so that two versions can tell each other apart.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ronde.errors import ProtocolError
from ronde.net.keys import JobKey

__all__ = ["INTERNAL_ERROR", "ConnectionRequest", "ClientHandshake", "ServerHandshake", "HandshakeFailed"]

VERSION = 1
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 64 * 1024

_HELLO = struct.Struct("!5sBH32s")
_CHALLENGE = struct.Struct("!5sB32s")
_RESULT = struct.Struct("!BI")
_CLIENT_MAGIC = b"RONDc"
_SERVER_MAGIC = b"RONDd"
_ACCEPTED, _WRONG_KEY, _INTERNAL_ERROR = 0, 1, 2

INTERNAL_ERROR = _RESULT.pack(_INTERNAL_ERROR, 0)
"""What a proved caller is told when the door cannot go on."""


@dataclass(frozen=True, slots=True)
class ConnectionRequest:
    """Who connects, and what for."""

    purpose: str
    rank: int
    detail: str = ""


class HandshakeFailed(ProtocolError):
    """The other side has not proved that it belongs to the job."""

    def __init__(self, reason: str, *, reply: bytes = b"") -> None:
        self.reply = reply
        """What it may be told before the connection is closed."""
        super().__init__(reason)


class _HandshakeSide:
    """Collects exactly the bytes the next step needs, then takes it."""

    def __init__(self, num_bytes: int, step: Callable[[bytes], bytes]) -> None:
        self._buffer = bytearray()
        self._expect(num_bytes, step)

    @property
    def num_wanted(self) -> int:
        """How many bytes to read next; 0 when the handshake is over."""
        return self._num_bytes - len(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Take what was read, at most num_wanted bytes; returns what to send."""
        self._buffer += data
        if self.num_wanted > 0:
            return b""
        message = bytes(self._buffer)
        self._buffer.clear()
        return self._step(message)

    def _expect(self, num_bytes: int, step: Callable[[bytes], bytes]) -> None:
        self._num_bytes = num_bytes
        self._step = step

    def _handle_nothing_more(self, data: bytes) -> bytes:
        assert not data, "fed after the end"
        return b""


class ServerHandshake(_HandshakeSide):
    """The side that was called. Over and proved when `caller` is set."""

    def __init__(self, key: JobKey, nonce: bytes, make_reply: Callable[[ConnectionRequest], bytes]) -> None:
        super().__init__(_HELLO.size, self._handle_hello)
        self._key = key
        self._nonce = nonce
        self._make_reply = make_reply
        self._client_nonce = b""
        self.request: ConnectionRequest | None = None

    def _handle_hello(self, message: bytes) -> bytes:
        magic, version, who_bytes, self._client_nonce = _HELLO.unpack(message)
        challenge = _CHALLENGE.pack(_SERVER_MAGIC, VERSION, self._nonce)
        if magic != _CLIENT_MAGIC:
            raise HandshakeFailed("does not speak ronde")
        if version != VERSION:
            raise HandshakeFailed(f"speaks version {version} of the handshake, this is {VERSION}", reply=challenge)
        if who_bytes > MAX_REQUEST_BYTES:
            raise HandshakeFailed(f"announces {who_bytes} bytes about itself, at most {MAX_REQUEST_BYTES} are allowed")
        self._expect(who_bytes + MAC_BYTES, self._handle_proof)
        return challenge

    def _handle_proof(self, message: bytes) -> bytes:
        who, proof = message[:-MAC_BYTES], message[-MAC_BYTES:]
        nonces = (self._client_nonce, self._nonce)
        if not hmac.compare_digest(proof, self._key.mac(b"caller", *nonces, who)):
            raise HandshakeFailed("does not have the job's key", reply=_RESULT.pack(_WRONG_KEY, 0))
        try:
            caller = msgspec.msgpack.decode(who, type=ConnectionRequest)
        except (msgspec.DecodeError, RecursionError) as error:
            raise HandshakeFailed(f"does not say who it is: {error}", reply=INTERNAL_ERROR) from None
        greeting = self._make_reply(caller)
        if len(greeting) > MAX_REPLY_BYTES:
            raise HandshakeFailed(f"would get a greeting of {len(greeting)} bytes, too much", reply=INTERNAL_ERROR)
        self.request = caller
        self._expect(0, self._handle_nothing_more)
        return _RESULT.pack(_ACCEPTED, len(greeting)) + greeting + self._key.mac(b"door", *nonces, who, greeting)


class ClientHandshake(_HandshakeSide):
    """The side that calls: sends `hello`, then feeds what comes. Over and proved when `greeting` is set."""

    def __init__(self, key: JobKey, nonce: bytes, request: ConnectionRequest) -> None:
        super().__init__(_CHALLENGE.size, self._handle_challenge)
        self._key = key
        self._nonce = nonce
        self._server_nonce = b""
        self._encoded_request = msgspec.msgpack.encode(request)
        if len(self._encoded_request) > MAX_REQUEST_BYTES:
            raise ValueError(
                f"purpose and note of a caller may take {MAX_REQUEST_BYTES} bytes, got {len(self._encoded_request)}"
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
        return self._encoded_request + self._key.mac(b"caller", self._nonce, self._server_nonce, self._encoded_request)

    def _handle_result(self, message: bytes) -> bytes:
        verdict, greeting_bytes = _RESULT.unpack(message)
        if verdict == _WRONG_KEY:
            raise HandshakeFailed(
                "it refused the job's key; give all ranks the same RONDE_KEY, "
                "and check that no other job has that address"
            )
        if verdict != _ACCEPTED or greeting_bytes > MAX_REPLY_BYTES:
            raise HandshakeFailed("it could not answer; the log of the other side says why")
        self._expect(greeting_bytes + MAC_BYTES, self._handle_reply)
        return b""

    def _handle_reply(self, message: bytes) -> bytes:
        greeting, proof = message[:-MAC_BYTES], message[-MAC_BYTES:]
        wanted = self._key.mac(b"door", self._nonce, self._server_nonce, self._encoded_request, greeting)
        if not hmac.compare_digest(proof, wanted):
            raise HandshakeFailed("it does not have the job's key; check that no other job has that address")
        self.reply = greeting
        self._expect(0, self._handle_nothing_more)
        return b""
