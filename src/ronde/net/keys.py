"""The job's secret and all that is derived from it. Used by door (proofs) and control (CURVE keys).

One job has one seed of 32 random bytes. It travels only in the environment of the job's own processes; what goes over
a network is derived from it one way, under a label of its own, so that no use can be mistaken for another.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NoReturn

import zmq
from zmq.utils import z85

__all__ = ["JobKey", "new_key"]

SEED_BYTES = 32


def new_key() -> str:
    """A fresh secret for one job, as 64 hexadecimal digits."""
    return secrets.token_hex(SEED_BYTES)


class JobKey:
    """The secret of one job. Whoever holds it is a member; it shows itself in no text and in no pickle."""

    __slots__ = ("_seed", "client_public", "client_secret", "server_public", "server_secret")

    server_secret: bytes
    """The coordinator's CURVE keys and the workers', as the 40 characters of Z85 that ZeroMQ takes."""
    server_public: bytes
    client_secret: bytes
    client_public: bytes

    def __init__(self, hex: str) -> None:
        # The value is not repeated in the error: a mistyped secret is still nearly a secret.
        digits = "0123456789abcdefABCDEF"
        if not isinstance(hex, str) or len(hex) != 2 * SEED_BYTES or not set(hex) <= set(digits):
            raise ValueError(
                f"the job's key must be {2 * SEED_BYTES} hexadecimal digits; make one with ronde.net.keys.new_key()"
            )
        self._seed = bytes.fromhex(hex)
        self.server_secret, self.server_public = self._curve_pair(b"server")
        self.client_secret, self.client_public = self._curve_pair(b"client")

    def mac(self, label: bytes, *parts: bytes) -> bytes:
        """HMAC-SHA256 over the label and the parts. Each goes in with its length, so no two lists look alike."""
        digest = hmac.new(self._seed, b"ronde", hashlib.sha256)
        for part in (label, *parts):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return digest.digest()

    def _curve_pair(self, role: bytes) -> tuple[bytes, bytes]:
        secret = z85.encode(self.mac(b"curve", role))
        return secret, zmq.curve_public(secret)

    def __repr__(self) -> str:
        """Never the secret."""
        return "JobKey(hidden)"

    def __reduce__(self) -> NoReturn:
        """A pickle would carry the secret to where nobody expects it."""
        raise TypeError("a JobKey cannot be pickled; hand on the hexadecimal digits in the environment")
