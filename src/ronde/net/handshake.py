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

__all__ = ["FAULT", "Caller", "CallerSide", "DoorSide", "Stranger"]

VERSION = 1
NONCE_BYTES = 32
MAC_BYTES = 32
WHO_LIMIT_BYTES = 4096
GREETING_LIMIT_BYTES = 64 * 1024

_HELLO = struct.Struct("!5sBH32s")
_CHALLENGE = struct.Struct("!5sB32s")
_VERDICT = struct.Struct("!BI")
_CALLER_MAGIC = b"RONDc"
_DOOR_MAGIC = b"RONDd"
_WELCOME, _WRONG_KEY, _FAULT = 0, 1, 2

FAULT = _VERDICT.pack(_FAULT, 0)
"""What a proved caller is told when the door cannot go on."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who connects, and what for."""

    purpose: str
    rank: int
    note: str = ""


class Stranger(ProtocolError):
    """The other side has not proved that it belongs to the job."""

    def __init__(self, why: str, *, answer: bytes = b"") -> None:
        self.answer = answer
        """What it may be told before the connection is closed."""
        super().__init__(why)


class _Side:
    """Collects exactly the bytes the next step needs, then takes it."""

    def __init__(self, num_bytes: int, step: Callable[[bytes], bytes]) -> None:
        self._buffer = bytearray()
        self._next(num_bytes, step)

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

    def _next(self, num_bytes: int, step: Callable[[bytes], bytes]) -> None:
        self._num_bytes = num_bytes
        self._step = step

    def _over(self, data: bytes) -> bytes:
        assert not data, "fed after the end"
        return b""


class DoorSide(_Side):
    """The side that was called. Over and proved when `caller` is set."""

    def __init__(self, key: JobKey, nonce: bytes, greet: Callable[[Caller], bytes]) -> None:
        super().__init__(_HELLO.size, self._hello)
        self._key = key
        self._nonce = nonce
        self._greet = greet
        self._caller_nonce = b""
        self.caller: Caller | None = None

    def _hello(self, message: bytes) -> bytes:
        magic, version, who_bytes, self._caller_nonce = _HELLO.unpack(message)
        challenge = _CHALLENGE.pack(_DOOR_MAGIC, VERSION, self._nonce)
        if magic != _CALLER_MAGIC:
            raise Stranger("does not speak ronde")
        if version != VERSION:
            raise Stranger(f"speaks version {version} of the handshake, this is {VERSION}", answer=challenge)
        if who_bytes > WHO_LIMIT_BYTES:
            raise Stranger(f"announces {who_bytes} bytes about itself, at most {WHO_LIMIT_BYTES} are allowed")
        self._next(who_bytes + MAC_BYTES, self._proof)
        return challenge

    def _proof(self, message: bytes) -> bytes:
        who, proof = message[:-MAC_BYTES], message[-MAC_BYTES:]
        nonces = (self._caller_nonce, self._nonce)
        if not hmac.compare_digest(proof, self._key.mac(b"caller", *nonces, who)):
            raise Stranger("does not have the job's key", answer=_VERDICT.pack(_WRONG_KEY, 0))
        try:
            caller = msgspec.msgpack.decode(who, type=Caller)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Stranger(f"does not say who it is: {error}", answer=FAULT) from None
        greeting = self._greet(caller)
        if len(greeting) > GREETING_LIMIT_BYTES:
            raise Stranger(f"would get a greeting of {len(greeting)} bytes, too much", answer=FAULT)
        self.caller = caller
        self._next(0, self._over)
        return _VERDICT.pack(_WELCOME, len(greeting)) + greeting + self._key.mac(b"door", *nonces, who, greeting)


class CallerSide(_Side):
    """The side that calls: sends `hello`, then feeds what comes. Over and proved when `greeting` is set."""

    def __init__(self, key: JobKey, nonce: bytes, caller: Caller) -> None:
        super().__init__(_CHALLENGE.size, self._challenge)
        self._key = key
        self._nonce = nonce
        self._door_nonce = b""
        self._who = msgspec.msgpack.encode(caller)
        if len(self._who) > WHO_LIMIT_BYTES:
            raise ValueError(f"purpose and note of a caller may take {WHO_LIMIT_BYTES} bytes, got {len(self._who)}")
        self.hello = _HELLO.pack(_CALLER_MAGIC, VERSION, len(self._who), nonce)
        self.greeting: bytes | None = None

    def _challenge(self, message: bytes) -> bytes:
        magic, version, self._door_nonce = _CHALLENGE.unpack(message)
        if magic != _DOOR_MAGIC:
            raise Stranger("what answers there is not ronde; check the address and the port")
        if version != VERSION:
            raise Stranger(
                f"ronde there speaks version {version} of the handshake, this one version {VERSION}; "
                "install the same ronde on all hosts"
            )
        self._next(_VERDICT.size, self._verdict)
        return self._who + self._key.mac(b"caller", self._nonce, self._door_nonce, self._who)

    def _verdict(self, message: bytes) -> bytes:
        verdict, greeting_bytes = _VERDICT.unpack(message)
        if verdict == _WRONG_KEY:
            raise Stranger(
                "it refused the job's key; give all ranks the same RONDE_KEY, "
                "and check that no other job has that address"
            )
        if verdict != _WELCOME or greeting_bytes > GREETING_LIMIT_BYTES:
            raise Stranger("it could not answer; the log of the other side says why")
        self._next(greeting_bytes + MAC_BYTES, self._welcome)
        return b""

    def _welcome(self, message: bytes) -> bytes:
        greeting, proof = message[:-MAC_BYTES], message[-MAC_BYTES:]
        wanted = self._key.mac(b"door", self._nonce, self._door_nonce, self._who, greeting)
        if not hmac.compare_digest(proof, wanted):
            raise Stranger("it does not have the job's key; check that no other job has that address")
        self.greeting = greeting
        self._next(0, self._over)
        return b""
